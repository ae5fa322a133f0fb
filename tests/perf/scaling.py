"""How many messages 1, 2, 4 and 8 relays claim and settle in a second when publishing costs nothing: the database's own limit.

With 1,000 keys, without keys, and all with the same key, which is one partition's work whatever the number of relays;
`one_partition` is the rate of one partition without that key. `OUTBOX_PERF_ROWS` says how many messages a run has (default:
200,000), `OUTBOX_PERF_RELAYS` how many relays there are at most (default: 8). Judged by what the relays would have published:
every message once, and those of a key in their order.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outbox.identity import partition_of
from tests.perf.parts import backlog
from tests.perf.parts.backlog import Key
from tests.perf.parts.null_relays import Noted, NullRelays
from tests.perf.parts.servers import about
from tests.perf.parts.sizes import size
from tests.servers.postgres import Postgres

ROWS = size("ROWS", 200_000)
BATCH = 1000
RELAYS = [number for number in (1, 2, 4, 8) if number <= size("RELAYS", 8)]
_HOT = partition_of("hot")
_NEIGHBOURS = [key for key in (f"key-{number}" for number in range(100_000)) if partition_of(key) == _HOT][:1000]


def neighbours(number: int) -> str:
    """Every message has a key of one and the same partition."""
    return _NEIGHBOURS[number % len(_NEIGHBOURS)]


WAYS: Mapping[str, Key] = {
    "keys": backlog.a_thousand_keys,
    "no_keys": backlog.no_keys,
    "hot_key": backlog.one_key,
    "one_partition": neighbours,
}


def run(*, pairs: int) -> dict[str, Any]:
    """Let every number of relays work on every kind of backlog, alternating, each time in a new database."""
    rates: dict[str, list[float]] = defaultdict(list)
    with Postgres() as postgres:
        for _ in range(pairs):
            for way, key in WAYS.items():
                for relays in RELAYS if way != "one_partition" else RELAYS[:1]:
                    rates[f"{way}_{relays}_per_s"].append(_rate(postgres, key, relays))
        told = about(postgres)
    medians = {name: round(statistics.median(each), 1) for name, each in rates.items()}
    ratios = {f"{way}_ratio_{more}_to_1": _ratio(medians, way, more, 1) for way in ("keys", "no_keys") for more in RELAYS[1:]}
    if 8 in RELAYS:
        ratios |= {f"{way}_ratio_8_to_4": _ratio(medians, way, 8, 4) for way in ("keys", "no_keys")}
    ratios["hot_key_ratio_to_one_partition"] = round(medians["hot_key_1_per_s"] / medians["one_partition_1_per_s"], 2)
    return {"rows": ROWS, "batch_size": BATCH, "payload_bytes": backlog.PAYLOAD_BYTES, **told, **medians, **ratios}


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Draw the rates over the number of relays."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 4)).subplots()
    for way in ("keys", "no_keys", "hot_key"):
        axes.plot(RELAYS, [results[f"{way}_{number}_per_s"] for number in RELAYS], marker="o", label=way)
    axes.set(xlabel="relays", ylabel="messages per second", ylim=(0, None), xticks=RELAYS)
    axes.legend()
    axes.figure.savefig(path, bbox_inches="tight")


def _rate(postgres: Postgres, key: Key, number: int) -> float:
    with backlog.database(postgres) as url, NullRelays(url, number, batch_size=BATCH) as relays:
        relays.wait_until_ready()
        with backlog.filling(url, ROWS, key=key):
            pass
        seconds = relays.seconds_for(ROWS)
        _check(relays.noted(), key)
        if left := backlog.left(url):
            raise RuntimeError(f"{left} messages are left in the table")
    return ROWS / seconds


def _check(noted: Noted, key: Key) -> None:
    """Raise unless every message was published once and those of a key in their order: else a run has no speed."""
    ids = [each for _, batch in noted for each in batch]
    if sorted(ids) != list(range(1, ROWS + 1)):
        raise RuntimeError(f"of {ROWS} messages {ROWS - len(set(ids))} were lost and {len(ids) - len(set(ids))} doubled")
    last: dict[str, int] = {}
    for each in ids:
        own = key(each - 1)
        if own is not None:
            if each < last.get(own, 0):
                raise RuntimeError(f"message {each} of key {own!r} came after {last[own]}")
            last[own] = each


def _ratio(rates: Mapping[str, float], way: str, more: int, fewer: int) -> float:
    return round(rates[f"{way}_{more}_per_s"] / rates[f"{way}_{fewer}_per_s"], 2)
