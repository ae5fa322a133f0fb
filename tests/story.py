"""Runs the code blocks of one story of a Markdown file: what a reader copies from there works."""

import ast
import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, chdir
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from outbox.cli import config
from tests.readme import Block, with_urls
from tests.terminal import WAIT_SECONDS, Program, Terminal, assert_shows, eventually

ROOT = Path(__file__).parents[1]


class Story:
    """Runs blocks one after the other in one folder, and with one database, virtual host and Python namespace.

    URLs that a block names are replaced by those given, the driver's name excepted; OUTBOX_DATABASE_URL and
    OUTBOX_BROKER_URL are set. `elsewhere` are command lines that another test runs. Of `make TARGET` it is checked only
    that there is such a target.
    """

    def __init__(self, folder: Path, *, database_url: str, broker_url: str, elsewhere: Collection[str] = ()) -> None:
        self.folder = folder
        self.elsewhere = elsewhere
        self.urls = {"OUTBOX_DATABASE_URL": database_url, "OUTBOX_BROKER_URL": broker_url}
        self._printed: Callable[[], str] = str
        self._patience = 0.0
        self._module = ModuleType("story")
        self._ending = ExitStack()
        self._running: list[Program] = []
        self._loop = asyncio.Runner()

    def tell(self, blocks: Iterable[Block]) -> None:
        """Run the blocks, then stop what they left running."""
        with self._loop, self._ending:
            sys.modules["story"] = self._module  # where dataclasses and mapped classes look their annotations up
            self._ending.callback(self._leave)
            for block in blocks:
                self._run(block)
            for program in reversed(self._running):
                program.stop()

    def _run(self, block: Block) -> None:
        handler = HANDLERS.get(block.language)
        assert handler, f"line {block.line}: nothing tests a block in {block.language!r}; use {', '.join(HANDLERS)}"
        if "tables" in block.options:
            self.terminal().run(["python -m outbox schema upgrade"])
        if name := block.options.get("file"):
            (self.folder / name).write_text(self._here(block.text), encoding="utf-8")
            if block.language == "python":
                return
        if "eventually" in block.options:
            eventually(lambda: handler(self, block))
        else:
            handler(self, block)

    def terminal(self, at: str | None = None) -> Terminal:
        """Return a terminal in the story's folder, or in a folder of the repository."""
        return Terminal(self.folder if at is None else ROOT / at, self.urls)

    def _here(self, text: str) -> str:
        return with_urls(text, *self.urls.values())

    def python(self, block: Block) -> None:
        """Execute a block, in which `await` may stand anywhere."""
        namespace = vars(self._module)
        with chdir(self.folder), mock.patch.dict(os.environ, self.urls), mock.patch.object(sys, "path", ["", *sys.path]):
            for source, line in ((block.hidden, 1), (block.text, block.line)):
                text = "\n" * (line - 1) + self._here(source)
                code = compile(text, f"README.md, {block.heading}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                result: Any = eval(code, namespace)  # noqa: S307 - also runs statements
                if inspect.iscoroutine(result):
                    self._loop.run(result)

    def shell(self, block: Block) -> None:
        """Run the commands of a block; in `console` compare what they print, if the block shows it."""
        commands = [self._here(each) for each in block.commands if each not in self.elsewhere and not self._made(each)]
        commands = [*self._here(block.hidden).splitlines(), *commands]
        if not commands:
            return
        terminal = self.terminal(block.options.get("at"))
        if "background" in block.options:
            program = terminal.start(commands, self.folder / f"background-{len(self._running)}.log")
            self._running.append(self._ending.enter_context(program))
            program.wait_for(block.options["background"])
            self._printed, self._patience = lambda: program.output, WAIT_SECONDS
        else:
            output = terminal.run(commands)
            self._printed, self._patience = lambda: output, 0
        if block.language == "console" and block.output.strip():
            self._compare(block.output)

    def sql(self, block: Block) -> None:
        """Execute the statements of a block in PostgreSQL."""
        url = self.urls["OUTBOX_DATABASE_URL"].replace("+psycopg", "")
        with psycopg.connect(url) as connection:
            connection.execute((block.hidden + block.text).encode())

    def toml(self, block: Block) -> None:
        """Read a block as the relay reads its configuration."""
        path = self.folder / "block.toml"
        path.write_text(self._here(block.text), encoding="utf-8")
        config.routes(config.read(path).pop("routes", []))

    def prose(self, block: Block) -> None:
        """Compare a block with what was printed, if it says that it shows that."""
        if "output" in block.options:
            self._compare(block.text)

    def _compare(self, expected: str) -> None:
        eventually(lambda: assert_shows(self._printed(), expected), seconds=self._patience)

    def _made(self, command: str) -> bool:
        makes = command.startswith("make ")
        if makes:
            self.terminal(at=".").run([command.replace("make", "make --dry-run", 1)])
        return makes

    def _leave(self) -> None:
        del sys.modules["story"]
        for value in vars(self._module).values():
            if isinstance(value, sa.Engine):
                value.dispose()
            elif isinstance(value, AsyncEngine):
                self._loop.run(value.dispose())


HANDLERS: dict[str, Callable[[Story, Block], None]] = {
    "python": Story.python,
    "console": Story.shell,
    "sh": Story.shell,
    "sql": Story.sql,
    "toml": Story.toml,
    "text": Story.prose,
    "mermaid": Story.prose,
}
