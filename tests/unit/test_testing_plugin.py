"""The pytest plugin: installed with the package, of no cost where nobody uses it, and its fixtures undo everything."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest, sqlalchemy as sa, outbox

@pytest.fixture(scope="session")
def outbox_engine(tmp_path_factory):
    engine = sa.create_engine(f"sqlite:///{tmp_path_factory.mktemp('shop')}/shop.db")
    outbox.metadata.create_all(engine)
    yield engine
    engine.dispose()
"""
TESTS = """
import outbox, pytest
from outbox.testing import assert_committed, assert_enqueued, drain, refute_enqueued

def place(session):
    outbox.enqueue(session, outbox.Event(topic="orders.placed", payload={}))

@pytest.mark.parametrize("time", [1, 2])
def test_it_starts_empty_each_time(outbox_session, time):
    place(outbox_session)
    outbox_session.commit()
    assert_enqueued(outbox_session, topic="orders.placed")
    assert_committed(outbox_session)
    assert len(drain(outbox_session)) == 1

def test_a_rollback_of_the_code_under_test_is_its_own(outbox_session):
    place(outbox_session)
    outbox_session.commit()
    place(outbox_session)
    outbox_session.rollback()
    assert_enqueued(outbox_session, topic="orders.placed")

def test_a_forgotten_commit(outbox_session):
    place(outbox_session)
    with pytest.raises(AssertionError, match="never published"):
        assert_committed(outbox_session)

def test_nothing_is_left(outbox_engine):
    refute_enqueued(outbox_engine, topic="orders.placed")
"""


def run(pytester: pytest.Pytester) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")


def test_it_is_there_when_the_package_is_installed() -> None:
    [plugin] = [entry for entry in entry_points(group="pytest11") if entry.name == "outbox"]
    assert plugin.value == "outbox.testing.plugin"


def test_everything_in_its_session_is_undone(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    run(pytester).assert_outcomes(passed=5)


def test_what_is_wrong_is_told_as_it_is(pytester: pytest.Pytester) -> None:
    ready, bare = pytester.mkdir("ready"), pytester.mkdir("bare")
    (ready / "conftest.py").write_text(CONFTEST)
    (ready / "test_ready.py").write_text("""
from outbox.testing import assert_enqueued

def test_x(outbox_session):
    assert_enqueued(outbox_session, topic="orders.placed")
""")
    (bare / "test_bare.py").write_text("def test_x(outbox_session): pass")
    result = run(pytester)
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines_random(
        [
            "*override the fixture outbox_engine in your conftest.py*",
            "E *AssertionError: expected 1 of (topic='orders.placed') in the outbox, found 0*",
        ]
    )


def test_a_run_that_does_not_use_it_loads_nothing_and_keeps_its_own_warnings(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys, warnings
        def test_x():
            warnings.warn("mine", UserWarning)
            assert not {"sqlalchemy", "kombu", "outbox.inbox", "outbox.testing.redelivery"} & set(sys.modules)
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, warnings=1)


def test_pytest_is_needed_by_the_plugin_alone() -> None:
    program = (
        "import sys, outbox.testing; [getattr(outbox.testing, n) for n in outbox.testing.__all__]; print('pytest' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ran.stdout == "False\n"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    import outbox.testing

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outbox.testing.nothing  # type: ignore[attr-defined]  # noqa: B018 - the access is what is tested
