"""Terminal 3: read the findings. `outbox-consume clinic.ward:inbox`."""

from __future__ import annotations

from sqlalchemy.orm import Session

import outbox
from clinic.database import Filed, sessions
from clinic.sealed import HEADER, opened

inbox = outbox.Inbox("ward", sessions=sessions)


@inbox.transactional("findings.*")
def file_finding(session: Session, message: outbox.Message) -> None:
    finding = opened(message)
    session.add(Filed(sample=finding["sample"], read_with=message.headers[HEADER], length=len(finding["text"])))
