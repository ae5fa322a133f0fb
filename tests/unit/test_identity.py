"""Ids, and the hash that assigns keys to partitions: data at rest depends on it, so its values are pinned."""

import os
import subprocess
import sys

import pytest

from outbox.identity import PARTITIONS, new_message_id, partition_of


def test_there_are_64_partitions():
    assert PARTITIONS == 64


PINNED = [("", 52), ("1", 54), ("order-1", 61), ("žluťoučký", 55), ("k" * 255, 17)]


@pytest.mark.parametrize(("key", "partition"), PINNED)
def test_the_partition_of_a_key_never_changes(key, partition):
    assert partition_of(key) == partition


def test_the_partition_of_a_key_is_the_same_in_every_process():
    program = "from outbox.identity import partition_of; print(partition_of('order-1'))"
    env = os.environ | {"PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert int(run.stdout) == partition_of("order-1")


def test_keys_are_spread_over_all_partitions():
    assert {partition_of(str(number)) for number in range(2000)} == set(range(PARTITIONS))


def test_messages_without_a_key_are_spread_over_all_partitions():
    assert {partition_of(None) for _ in range(5000)} == set(range(PARTITIONS))


def test_message_ids_are_version_7_and_never_repeat():
    ids = [new_message_id() for _ in range(1000)]
    assert {message_id.version for message_id in ids} == {7}
    assert len(set(ids)) == len(ids)
