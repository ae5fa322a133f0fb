"""The database, of the payments and the outbox alike."""

from __future__ import annotations

import os

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

engine = create_engine(os.environ["OUTBOX_DATABASE_URL"])
sessions = sessionmaker(engine)
