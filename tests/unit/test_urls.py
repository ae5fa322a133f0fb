"""URLs of which something is in a file."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from outbox import urls
from outbox.cli import main
from outbox.cli.exit import DATABASE, USAGE
from outbox.errors import ConfigurationError


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a secret"


@pytest.mark.parametrize("end", ["", "\n", "\r\n", " \n\n"])
def test_a_url_in_a_file_is_what_stands_there_without_the_end_of_the_line(file: Path, end: str) -> None:
    written(file, f"postgresql://app:secret@db/shop{end}")
    assert urls.current(urls.of_file(file)) == "postgresql://app:secret@db/shop"


def test_a_password_may_hold_anything_but_the_end_of_its_line(file: Path) -> None:
    written(file, " p@:/?#%;&č \n")
    assert (
        urls.current(f"amqp://app@mq/v?password_file={file}&a=b") == "amqp://app:%20p%40%3A%2F%3F%23%25%3B%26%C4%8D%20@mq/v?a=b"
    )


def test_each_of_several_brokers_gets_the_password(file: Path) -> None:
    written(file, "secret\n")
    url = f"amqp://a@one//?password_file={file};amqp://b@two//"
    assert urls.all_current(url) == ["amqp://a:secret@one//", "amqp://b@two//"]


def test_the_query_of_the_file_is_added_to_each_url_in_it(file: Path) -> None:
    written(file, "amqps://a:b@one//;amqps://a:b@two//?x=1\n")
    url = urls.adding(urls.of_file(file), {"ssl_ca_certs": "/a b"})
    assert urls.all_current(url) == ["amqps://a:b@one//?ssl_ca_certs=%2Fa+b", "amqps://a:b@two//?x=1&ssl_ca_certs=%2Fa+b"]


@pytest.mark.parametrize(
    "url", ["sqlite:///x;y.db", "postgresql:///db?host=/run/postgresql", "amqp://a;amqp://b", "", "nonsense"]
)
def test_a_url_without_files_is_left_as_it_is(url: str) -> None:
    assert urls.current(url) == url


@pytest.mark.parametrize(
    ("bad", "problem"),
    [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "cannot be read: .*: not UTF-8 text"), (None, "No such file")],
)
@pytest.mark.parametrize("url", ["file://{}", "amqp://u@h//?password_file={}"])
def test_a_file_without_anything_of_use_is_said_by_name(tmp_path: Path, bad: bytes | None, problem: str, url: str) -> None:
    path = tmp_path / "secret"
    if bad is not None:
        path.write_bytes(bad)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        urls.current(url.format(path))
    assert str(path) in str(caught.value)


def test_a_folder_in_place_of_a_file_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Is a directory"):
        urls.current(urls.of_file(tmp_path))


@pytest.mark.parametrize("url", ["amqp://u:geheim@h//", "amqp://h//", "sqlite://"])
def test_a_password_needs_a_user_who_has_none_yet(file: Path, url: str) -> None:
    written(file, "auch geheim")
    with pytest.raises(ConfigurationError, match="must have a user and no password") as caught:
        urls.current(f"{url}?password_file={file}")
    assert "geheim" not in str(caught.value)


def code_of(*arguments: str, **environment: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["status", *arguments], env=environment)
    assert "Traceback" not in done.output
    return done.exit_code, done.stderr


AWAY = "postgresql+psycopg://app:geheim@127.0.0.1:1/shop"


@pytest.mark.parametrize("how", ["flag", "variable", "configuration"])
def test_the_file_may_be_named_wherever_the_url_may(file: Path, tmp_path: Path, how: str) -> None:
    written(file, AWAY)
    configuration = written(tmp_path / "relay.toml", f"database_url_file = '{file}'\nbroker_url = 'memory://'\n")
    if how == "flag":
        code, error = code_of("--database-url-file", str(file))
    elif how == "variable":
        code, error = code_of(OUTBOX_DATABASE_URL_FILE=str(file))
    else:
        done = CliRunner().invoke(main, ["run", "--config", configuration])
        code, error = done.exit_code, done.stderr
    assert code == DATABASE, error
    assert "geheim" not in error


def test_of_url_and_file_the_one_that_was_said_nearer_wins(file: Path) -> None:
    written(file, AWAY)
    nonsense = "oracle://db"
    assert code_of("--database-url-file", str(file), OUTBOX_DATABASE_URL=nonsense)[0] == DATABASE
    assert code_of("--database-url", AWAY, OUTBOX_DATABASE_URL_FILE=written(file.with_name("other"), nonsense))[0] == DATABASE


@pytest.mark.parametrize("place", ["flags", "environment"])
def test_url_and_file_in_one_place_are_refused(file: Path, place: str) -> None:
    written(file, AWAY)
    if place == "flags":
        code, error = code_of("--database-url-file", str(file), "--database-url", AWAY)
    else:
        code, error = code_of(OUTBOX_DATABASE_URL_FILE=str(file), OUTBOX_DATABASE_URL=AWAY)
    assert code == USAGE
    assert "give --database-url or --database-url-file, not both" in error


def test_a_file_that_is_missing_is_an_error_of_the_configuration(file: Path) -> None:
    code, error = code_of("--database-url-file", str(file))
    assert code == USAGE
    assert f"the file with the URL cannot be read: {file}: No such file or directory" in error
