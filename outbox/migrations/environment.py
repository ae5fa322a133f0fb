"""Writes the revision into an application's own alembic environment. Needs alembic itself."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError, rev_id

from outbox.errors import ConfigurationError
from outbox.migrations import LATEST, revision

if TYPE_CHECKING:
    from collections.abc import Iterator


def write_revision(config_file: str, *, schema: str | None = None, message: str | None = None) -> Path | None:
    """Write a revision with the steps that no revision takes yet, and return its path; None when there are none.

    It follows the current head, and the environment's own template, file names and hooks. `env.py` is not run and no
    database is asked. Raises `ConfigurationError` when there is no such environment, or more than one head.
    """
    if not Path(config_file).is_file():
        problem = f"there is no {config_file}: run this where it is, or name it with --alembic-config, or use --stdout"
        raise ConfigurationError(problem)
    try:
        return _write(Config(config_file, cmd_opts=Namespace(quiet=True)), schema=schema, message=message)
    except CommandError as error:
        raise ConfigurationError(f"alembic: {error}") from error


def _write(config: Config, *, schema: str | None, message: str | None) -> Path | None:
    scripts = ScriptDirectory.from_config(config)
    versions = range(revision.taken(_sources(scripts)) + 1, LATEST + 1)
    if not versions:
        return None
    script = scripts.generate_revision(
        rev_id(),
        message or revision.message_for(versions),
        config=config,  # alembic's own `revision` command gives it to the template too
        imports=revision.IMPORTS,
        upgrades=revision.calls("upgrade", versions, schema=schema),
        downgrades=revision.calls("downgrade", versions, schema=schema),
    )
    return None if script is None else Path(script.path)


def _sources(scripts: ScriptDirectory) -> Iterator[str]:
    return (Path(script.path).read_text(encoding="utf-8") for script in scripts.walk_revisions())
