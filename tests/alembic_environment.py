"""Alembic run as users run it, in this repository and in environments made for a test."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
}

INI = """
[alembic]
script_location = %(here)s/migrations
file_template = %%(year)d-%%(slug)s
path_separator = os
"""
ENV = """
import sqlalchemy as sa
from alembic import context
from outbox.tables import attach, metadata

{metadata}

if context.is_offline_mode():
    context.configure(url={url!r}, target_metadata=target_metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    with sa.create_engine({url!r}, poolclass=sa.NullPool).connect() as connection:
        context.configure(connection=connection, target_metadata=target_metadata, include_schemas={include_schemas})
        with context.begin_transaction():
            context.run_migrations()
"""


def run_alembic(*arguments: str, url: str = "", folder: Path = ROOT) -> str:
    """Run `alembic` in a folder and return what it printed; fail with its own words."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    environment = {**os.environ, "PYTHONPATH": path, **({"OUTBOX_DATABASE_URL": url} if url else {})}
    command = [sys.executable, "-W", "error", "-m", "alembic", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_environment(folder: Path, *, url: str, metadata: str, include_schemas: bool = False) -> Path:
    """Write an alembic environment without revisions; `metadata` is the Python that sets `target_metadata`."""
    scripts = folder / "migrations"
    (scripts / "versions").mkdir(parents=True)
    (folder / "alembic.ini").write_text(INI)
    (scripts / "env.py").write_text(ENV.format(url=url, metadata=metadata, include_schemas=include_schemas))
    (scripts / "script.py.mako").write_text((ROOT / "alembic" / "script.py.mako").read_text())
    return folder
