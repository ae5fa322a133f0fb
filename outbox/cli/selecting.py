"""The options by which dead letters are selected."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from outbox.cli.types import DURATION
from outbox.store.dead import Selection
from outbox.topics import is_pattern

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

Moment: TypeAlias = datetime | timedelta
_LONGEST_S = timedelta(days=36_500).total_seconds()


class _Moment(click.ParamType[Moment]):
    """A date or a time as in ISO 8601, in UTC unless it says otherwise, or how long ago it was."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        """Return an aware datetime, or how long ago."""
        if isinstance(value, datetime | timedelta):
            return value
        text = str(value).strip()
        try:
            moment = datetime.fromisoformat(text)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            pass  # then it should be a duration
        seconds = DURATION.convert(text, param, ctx) if text[-1:].isalpha() and text[:1].isdigit() else _LONGEST_S + 1
        if seconds > _LONGEST_S:
            self.fail(f"{value!r} is not a time; write e.g. 2026-01-31, 2026-01-31T08:30, 30m, 2h, 7d (ago)", param, ctx)
        return timedelta(seconds=seconds)


class _Pattern(click.ParamType[str]):
    """A topic, or a pattern of topics."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return it as it is."""
        if not is_pattern(str(value)):
            self.fail(f"{value!r} is not a topic pattern; write e.g. orders.placed, orders.*, orders.#", param, ctx)
        return str(value)


_OPTIONS = (
    click.option(
        "--topic", type=_Pattern(), metavar="PATTERN", help="Only of these topics: * is one word, # any number of words."
    ),
    click.option("--key", metavar="KEY", help="Only of this ordering key."),
    click.option(
        "--since", type=_Moment(), metavar="WHEN", help="Only what died at this time or later: 2026-01-31T08:30 (UTC), 2h (ago)."
    ),
    click.option("--until", type=_Moment(), metavar="WHEN", help="Only what died at this time or before."),
    click.option("--error-class", metavar="NAME", help="Only of this class of error, as in the list."),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command was asked to select."""

    message_ids: tuple[UUID, ...] | tuple[str, ...]
    topic: str | None
    key: str | None
    since: Moment | None
    until: Moment | None
    error_class: str | None

    @property
    def given(self) -> bool:
        """Tell whether anything was said that selects."""
        return bool(self.message_ids) or any(
            each is not None for each in (self.topic, self.key, self.since, self.until, self.error_class)
        )

    def at(self, clock: datetime) -> Selection:
        """Return the selection at this time by the database's clock; what dies later is not part of it."""
        message_ids: tuple[Any, ...] = tuple(dict.fromkeys(self.message_ids))
        return Selection(
            message_ids=message_ids,
            topics=self.topic,
            key=self.key,
            since=None if self.since is None else _absolute(self.since, clock),
            until=clock if self.until is None else min(clock, _absolute(self.until, clock)),
            error_class=self.error_class,
        )


def selecting(ids: click.ParamType[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that select dead letters, as one parameter `wanted`; their message ids are of the type `ids`."""
    named = click.argument("message_ids", nargs=-1, type=ids, metavar="[MESSAGE_ID]...")

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        packed = _packing(command)
        for option in reversed((named, *_OPTIONS)):
            packed = option(packed)
        return packed

    return decorate


def _packing(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def packed(
        *,
        message_ids: tuple[Any, ...],
        topic: str | None,
        key: str | None,
        since: Moment | None,
        until: Moment | None,
        error_class: str | None,
        **others: Any,
    ) -> None:
        command(wanted=Wanted(message_ids, topic, key, since, until, error_class), **others)

    return packed


def _absolute(moment: Moment, clock: datetime) -> datetime:
    return moment if isinstance(moment, datetime) else clock - moment
