"""Reads the code blocks of a Markdown file, with what a comment before each says about how to test it.

A comment right before a block, which no reader of the rendered page sees, holds options, and code to run before it:

    <!-- test: story=producer tables
    engine = create_engine(os.environ["OUTBOX_DATABASE_URL"])
    -->

Options, all of them optional:
    story=NAME         blocks of one story share a folder, a database, a virtual host and a Python namespace; they run in
                       the order of the page, and what they left running is stopped at the end. Others stand alone.
    tables             make the outbox tables in the story's database first
    file=NAME          save the block under this name in the story's folder; Python is then not run
    at=FOLDER          run shell commands in this folder of the repository, not in the story's own
    background=TEXT    leave the last command running, and go on when it has printed TEXT
    eventually         repeat the block until it passes, for a minute at most
    output             of a `text` block: it shows what the story's shell block before it prints, `...` for anything
"""

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

OPTIONS = {"story", "tables", "file", "at", "background", "eventually", "output"}

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- test:(?P<options>[^\n]*?)(?:\n(?P<hidden>(?:(?!-->).)*))?-->\s*\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_LEFT_OVER = re.compile(r"<!-- *test|^ *(```|~~~)", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One fenced block. `line` is that of its first line of text; `hidden` is the code in the comment before it."""

    language: str
    text: str
    line: int
    heading: str
    options: Mapping[str, str]
    hidden: str = ""

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block: all of `sh`, and what follows the prompts of `console`."""
        text = self.text.replace("\\\n", " ")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        return [line[2:] for line in lines if line.startswith("$ ")] if self.language == "console" else lines

    @property
    def output(self) -> str:
        """What a `console` block shows between its prompts."""
        lines = self.text.replace("\\\n", " ").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("$ "))


def blocks(markdown: str) -> list[Block]:
    """Return the blocks in order. Raises `ValueError` for a fence or a comment that belongs to none."""
    return list(_blocks(markdown))


def stories(markdown: str) -> dict[str, list[Block]]:
    """Return the blocks by their story; one without a story is one of its own, named by its heading and line."""
    found: dict[str, list[Block]] = {}
    for block in blocks(markdown):
        name = block.options.get("story") or f"{block.heading}, {block.language} in line {block.line}"
        found.setdefault(name, []).append(block)
    return found


def with_urls(text: str, database_url: str, broker_url: str) -> str:
    """Return the text with the URLs in it replaced by those of other servers; the database driver's name stays."""
    for scheme, url in ((r"postgresql(?:\+psycopg)?", database_url), ("amqp", broker_url)):
        server = url.partition("://")[2].replace("\\", r"\\")
        text = re.sub(rf"\b({scheme})://[^\s\"'`,)\]]+", rf"\g<1>://{server}", text)
    return text


def _blocks(markdown: str) -> Iterator[Block]:
    heading, end = "", 0
    for match in _BLOCK.finditer(markdown):
        heading = _prose(markdown, end, match.start(), heading)
        end = match.end()
        yield Block(
            language=match["language"].strip(),
            text=textwrap.dedent(match["text"]),
            line=_line(markdown, match.start("text")),
            heading=heading,
            options=_options(match["options"] or "", _line(markdown, match.start())),
            hidden=textwrap.dedent(match["hidden"] or ""),
        )
    _prose(markdown, end, len(markdown), heading)


def _prose(markdown: str, start: int, end: int, heading: str) -> str:
    """Return the last heading of what stands between two blocks."""
    prose = markdown[start:end]
    if lost := _LEFT_OVER.search(prose):
        raise ValueError(f"line {_line(markdown, start + lost.start())}: {lost[0]!r} does not belong to any block")
    return next(reversed(_HEADING.findall(prose)), heading)


def _options(text: str, line: int) -> dict[str, str]:
    options = dict(word.partition("=")[::2] for word in shlex.split(text))
    if unknown := options.keys() - OPTIONS:
        raise ValueError(f"line {line}: unknown option {', '.join(sorted(unknown))}; known are {', '.join(sorted(OPTIONS))}")
    return options


def _line(markdown: str, position: int) -> int:
    return markdown.count("\n", 0, position) + 1
