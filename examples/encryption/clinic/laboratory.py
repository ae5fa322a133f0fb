"""Terminal 1: send a finding to the ward. `python -m clinic.laboratory S-1 "..."`."""

from __future__ import annotations

import sys

import outbox
from clinic.database import sessions
from clinic.sealed import HEADER, sealed


def main() -> None:
    sample, text = sys.argv[1:]
    with sessions.begin() as session:
        event = sealed("findings.ready", {"sample": sample, "text": text}, key=sample)
        outbox.enqueue(session, event)
    print(f"sent  {sample}  sealed with {(event.headers or {})[HEADER]}")


if __name__ == "__main__":
    main()
