"""What a worker does when it starts: it tells of settings that go badly with late acknowledgement, and leaves old connections alone."""

from __future__ import annotations

import logging
import threading
from typing import Any

from celery import signals
from sqlalchemy import Engine

from outbox.celery.app import OutboxCelery
from outbox.celery.running import registered

log = logging.getLogger("outbox.celery")


def _on_worker_init(sender: Any, **_: Any) -> None:
    app = sender.app
    if isinstance(app, OutboxCelery) and threading.current_thread() is threading.main_thread():
        app.in_worker = True
    if any(task.app is app for task in registered):
        advise(app.conf)


def _on_worker_process_init(**_: Any) -> None:
    """Leave to the parent process its connections to the database: two processes must not use one."""
    for task in list(registered):
        options: dict[str, Any] = getattr(task.sessions, "kw", {})
        if isinstance(engine := options.get("bind"), Engine):
            engine.dispose(close=False)


def advise(conf: Any) -> None:
    """Log a warning for each setting that costs time or causes needless duplicates, though no work is lost."""
    if conf.worker_prefetch_multiplier != 1:
        log.warning(
            "a worker holds more late-acknowledged tasks than it works on; they wait until it is done or dead: "
            "set worker_prefetch_multiplier = 1",
            extra={"worker_prefetch_multiplier": conf.worker_prefetch_multiplier},
        )
    if not conf.worker_cancel_long_running_tasks_on_connection_loss:
        log.info(
            "a task that runs while the broker's connection is lost is delivered again; "
            "worker_cancel_long_running_tasks_on_connection_loss = True ends it first"
        )


signals.worker_init.connect(_on_worker_init, weak=False)
signals.worker_process_init.connect(_on_worker_process_init, weak=False)
