"""`tests/faults/FIELD.md` names tests that exist; and what it says cannot occur here, still cannot."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

from outbox.cli import main as relay
from outbox.cli.consume import main as consume

ROOT = Path(__file__).parents[2]
FIELD = ROOT / "tests" / "faults" / "FIELD.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROW = re.compile(r"^\| (?!kind \|)(.+) \| (.+) \| (.+) \|$", re.MULTILINE)
SOURCES = sorted((ROOT / "outbox").rglob("*.py"))
UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "joblib"}


def rows() -> list[tuple[str, str, str]]:
    return ROW.findall(FIELD.read_text(encoding="utf-8"))


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_")}


# The document


def test_every_test_that_it_names_exists() -> None:
    named = NAMED.findall(FIELD.read_text(encoding="utf-8"))

    assert len(named) > 100
    assert [f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in functions_of(path)] == []


def test_whatever_looks_like_a_test_is_named_so_that_it_can_be_found() -> None:
    """`path::name` in backticks, and nothing else with `::` or `test_` in it."""
    rest = NAMED.sub("", FIELD.read_text(encoding="utf-8")).replace("`tests/unit/test_field.py`", "")

    assert "::" not in rest
    assert "test_" not in rest


def test_every_kind_has_a_test_or_a_reason() -> None:
    found = rows()

    assert len(found) > 60
    assert all(here.strip() and (NAMED.search(here) or "cannot" in here or "*inbox*" in here) for _, _, here in found)
    assert len({kind for kind, _, _ in found}) == len(found), "each kind once"


def test_no_row_of_the_tables_is_overlooked() -> None:
    lines = [line for line in FIELD.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    heads = [line for line in lines if line.startswith(("| kind |", "|---"))]

    assert len(rows()) == len(lines) - len(heads)


# What cannot occur


def texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module or ""] if isinstance(node, ast.ImportFrom) else names:
            yield name.partition(".")[0]


def test_nothing_is_ever_unpickled() -> None:
    assert [str(path) for path in SOURCES if UNPICKLERS & set(imports(path))] == []


# What the README says


COMMANDS = {"run": relay.commands["run"], "outbox-consume": consume.commands["run"]}
OPTIONS = re.compile(r"^\| (`--[a-z-]+`(?:, `--[a-z-]+`)*) \| `OUTBOX_[^|]*\|([^|]*)\|", re.MULTILINE)


def documented() -> list[tuple[str, str]]:
    """The options of the README's tables with their defaults, as they are written."""
    found = []
    for names, defaults in OPTIONS.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        options, values = re.findall(r"`([^`]+)`", names), [each.strip("` ") for each in defaults.split(",")]
        found += list(zip(options, values if len(values) == len(options) else values * len(options), strict=True))
    return found


def defaults_of(option: str) -> set[str]:
    """What the commands that have this option say its default is: they may differ."""
    params = [param for command in COMMANDS.values() for param in command.params if option in param.opts]
    return {_written(param) for param in params}


def _written(param: click.Parameter) -> str:
    default = param.default if isinstance(param.default, (str, int, float)) else None
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default is None else str(default)


def test_the_defaults_in_the_readme_are_those_of_the_commands() -> None:
    found = documented()

    assert len(found) >= 20
    assert [(option, value) for option, value in found if value not in defaults_of(option) and value != "workers + 20"] == []
