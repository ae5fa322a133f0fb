"""Refuses forks while a handler runs: the child would share the handler's database connection, and could end its transaction."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

ADVICE = (
    "the handler forks: the child has the same database connection, and whatever it does with it, or its end, can roll back or "
    "commit the transaction of the handler; use subprocess, or multiprocessing with the start method spawn or forkserver"
)


class Forked(AssertionError):
    """A handler has called `os.fork`, itself or through multiprocessing."""


@contextmanager
def forks_refused() -> Iterator[list[Forked]]:
    """Raise `Forked` wherever this process forks, and give the list of those that were raised: a handler may swallow them."""
    raised: list[Forked] = []

    def refuse() -> NoReturn:
        raised.append(Forked(ADVICE))
        raise raised[-1]

    with ExitStack() as patches:
        for name in ("fork", "forkpty"):
            if hasattr(os, name):
                patches.enter_context(patch.object(os, name, refuse))
        yield raised
