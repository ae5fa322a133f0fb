"""Every code block of the top-level README.md works as it stands there; see tests/readme.py for how to write one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.readme import Block, blocks, stories
from tests.story import ROOT, Story

README = ROOT / "README.md"
MARKDOWN = README.read_text(encoding="utf-8") if README.exists() else ""
STORIES = stories(MARKDOWN)

# Command lines that a story leaves out, and what sees that they work.
ELSEWHERE = {
    'pip install "outbox-relay[binary]"': "needs a release; `make install` installs the same package from here",
}

Teller = Callable[[list[Block]], None]


@pytest.fixture
def tell(tmp_path: Path, database_url: str, vhost_url: str) -> Teller:
    """Runs blocks as one story."""
    return Story(tmp_path, database_url=database_url, broker_url=vhost_url, elsewhere=ELSEWHERE).tell


@pytest.mark.parametrize("story", STORIES)
def test_the_readme(tell: Teller, story: str) -> None:
    tell(STORIES[story])


def test_the_readme_has_blocks_and_no_command_is_left_out_for_nothing() -> None:
    commands = {command for block in blocks(MARKDOWN) if block.language in ("sh", "console") for command in block.commands}
    assert STORIES
    assert set(ELSEWHERE) <= commands


TWO_STORIES = """
# Shop

<!-- test: story=shop tables
import sqlalchemy as sa
-->
```python
engine = sa.create_engine("postgresql+psycopg://app@db/shop")
with engine.connect() as connection:
    print(connection.scalar(sa.text("SELECT count(*) FROM outbox_partition")))
```

<!-- test: story=shop -->
```sql
CREATE TABLE orders (id int); INSERT INTO orders VALUES (1);
```

    <!-- test: story=shop -->
    ```python
    async def count():
        with engine.connect() as connection:
            return connection.scalar(sa.text("SELECT id FROM orders"))
    assert await count() == 1
    ```

## Elsewhere

```console
$ make help
$ pip install "outbox-relay[binary]"
```

<!-- test: at=examples -->
```console
$ echo "one \\
two"; pwd
one two
/.../examples
$ echo $OUTBOX_DATABASE_URL
postgresql+psycopg://...
```

```mermaid
not looked at
```
"""


def test_blocks_of_a_story_share_a_namespace_a_database_and_a_folder(tell: Teller) -> None:
    found = stories(TWO_STORIES)
    assert list(found) == [
        "shop",
        *(f"Elsewhere, {where}" for where in ("console in line 29", "console in line 35", "mermaid in line 44")),
    ]
    tell(found["shop"])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_block_may_stand_alone(tell: Teller, number: int) -> None:
    tell(list(stories(TWO_STORIES).values())[number])


BACKGROUND = """
<!-- test: story=x file=count.py -->
```python
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(CODE))
print("ready", flush=True)
print("steady", flush=True)
signal.pause()
```

<!-- test: story=x background=ready -->
```sh
export A=1
python count.py
```

<!-- test: story=x output -->
```text
...
steady
```
"""


def test_a_program_in_the_background_is_stopped_at_the_end(tell: Teller) -> None:
    tell(blocks(BACKGROUND.replace("CODE", "0")))


def test_a_program_that_does_not_stop_in_good_order_is_a_failure(tell: Teller) -> None:
    with pytest.raises(AssertionError, match=r"exit code 3 of .*count\.py.* after SIGTERM"):
        tell(blocks(BACKGROUND.replace("CODE", "3")))


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```\nx\n```", "nothing tests a block in ''"),
        ("```yaml\nx\n```", "nothing tests a block in 'yaml'"),
        ("```sh\nfalse\n```", "exit code 1"),
        ("```sh\nmake nothing-of-this-name\n```", "No rule to make target"),
        ("```sh\nnot-a-command | cat\n```", "exit code 127"),
        ("```console\n$ echo one\ntwo\n```", "expected:\ntwo"),
        ("```python\nassert 1 == 2, 'no sum'\n```", "no sum"),
    ],
)
def test_what_does_not_work_fails(tell: Teller, block: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        tell(blocks(block))


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ("```sql\nSELEC 1\n```", "syntax error"),
        ("```toml\nleese = 1\n```", "unknown option leese"),
        ("```toml\n[[routes]]\ntopic = 'x'\n```", "topic"),
        ("```python\nraise OSError('no')\n```", "no"),
    ],
)
def test_what_raises_fails(tell: Teller, block: str, error: str) -> None:
    with pytest.raises(Exception, match=error):
        tell(blocks(block))


@pytest.mark.parametrize(
    ("markdown", "problem"),
    [
        ("```sh\nfalse\n", "line 1: '```' does not belong"),
        ("<!-- test: story=x -->\n\nProse.\n\n```sh\nfalse\n```", "line 1: '<!-- test' does not belong"),
        ("<!-- test: storey=x -->\n```sh\nfalse\n```", "line 1: unknown option storey"),
    ],
)
def test_a_block_that_would_go_untested_is_refused(markdown: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        blocks(markdown)
