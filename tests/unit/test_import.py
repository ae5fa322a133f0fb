"""`import outbox` is for producers: light, and with names that no submodule can take."""

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import outbox

HEAVY = ["kombu", "amqp", "psycopg", "click", "alembic", "pydantic", "opentelemetry", "sqlalchemy.ext.asyncio"]


def output_of(program: str) -> str:
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_importing_outbox_loads_sqlalchemy_and_nothing_heavier():
    assert output_of(f"import sys, outbox; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_the_modules_of_outbox_that_a_producer_loads_are_few():
    loaded = output_of("import sys, outbox; print(*[m for m in sys.modules if m.startswith('outbox.')])").split()
    folders = {module.split(".")[1] for module in loaded}
    assert not folders & {"cli", "relay", "publishers", "inbox", "migrations", "store"}


def test_outbox_works_where_greenlet_is_missing():
    program = """
import sys
sys.modules["greenlet"] = None
import sqlalchemy as sa, outbox
engine = sa.create_engine("sqlite://")
outbox.metadata.create_all(engine)
with engine.begin() as connection:
    outbox.enqueue(connection, outbox.Event(topic="a", payload=1))
    print(connection.execute(sa.text("SELECT count(*) FROM outbox_message")).scalar())
engine.dispose()
"""
    assert output_of(program) == "1"


@pytest.mark.parametrize("name", outbox.__all__)
def test_every_public_name_is_there(name):
    assert getattr(outbox, name) is not None


@pytest.mark.parametrize("name", sorted(set(outbox.__all__) - {"migrations"}))
def test_no_submodule_has_a_public_name(name):
    assert name not in {module.name for module in pkgutil.iter_modules(outbox.__path__)}


def test_public_names_stay_what_they_are_when_submodules_are_imported():
    for module in ("events", "enqueueing", "tables", "inbox", "migrations"):
        importlib.import_module(f"outbox.{module}")
    assert callable(outbox.event)
    assert callable(outbox.enqueue)
    assert isinstance(outbox.migrations, ModuleType)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outbox.nothing  # type: ignore[attr-defined]  # noqa: B018 - the access is what is tested
