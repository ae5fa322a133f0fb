"""Topic names, and the patterns that select them as RabbitMQ would."""

import pytest

from outbox.topics import is_pattern, is_topic, matches


@pytest.mark.parametrize("name", ["orders", "orders.placed", "a.b-c.d_e.9", "A" * 255])
def test_dotted_words_are_topics_and_patterns(name):
    assert is_topic(name)
    assert is_pattern(name)


@pytest.mark.parametrize("name", ["", ".", "a.", ".a", "a..b", "a b", "č", "a/b", "a\n", "A" * 256])
def test_anything_else_is_neither(name):
    assert not is_topic(name)
    assert not is_pattern(name)


@pytest.mark.parametrize("pattern", ["*", "#", "orders.*", "#.placed", "*.#.*"])
def test_wildcards_are_patterns_but_no_topics(pattern):
    assert is_pattern(pattern)
    assert not is_topic(pattern)


@pytest.mark.parametrize("pattern", ["a*", "#a", "a.b#", "**", "a.##"])
def test_a_wildcard_stands_for_whole_words(pattern):
    assert not is_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("orders.placed", "orders.placed", True),
        ("orders.placed", "orders", False),
        ("orders.placed", "orders.placed.late", False),
        ("*", "orders", True),
        ("*", "orders.placed", False),
        ("orders.*", "orders.placed", True),
        ("orders.*", "orders", False),
        ("*.placed", "orders.placed", True),
        ("#", "orders", True),
        ("#", "orders.placed.late", True),
        ("orders.#", "orders", True),
        ("orders.#", "orders.placed.late", True),
        ("orders.#", "order", False),
        ("#.late", "late", True),
        ("#.late", "orders.placed.late", True),
        ("#.late", "orders.late.placed", False),
        ("a.#.z", "a.z", True),
        ("a.#.z", "a.b.c.z", True),
        ("*.#", "a", True),
        ("#.*", "a.b", True),
        ("#.#", "a", True),
    ],
)
def test_a_star_is_one_word_and_a_hash_any_number(pattern, topic, expected):
    assert matches(pattern, topic) is expected


def test_many_hashes_do_not_take_exponential_time():
    assert not matches(".".join(["#"] * 20 + ["z"]), ".".join(["a"] * 40))
