"""Upgrade and downgrade of the schema, by Alembic with the migrations that ship with the package."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from penstock.protocol.errors import Unavailable

# A statement that waits for a table's lock blocks every later one, so it must not wait for long.
LOCK_SECONDS = 2.0
TRIES = 30
_LOCK_NOT_AVAILABLE = "55P03"
_PACKAGE = Path(__file__).parents[1]


def migrations_path() -> Path:
    """In an installed wheel, or at the top of a checkout."""
    shipped = _PACKAGE / "migrations"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1] / "migrations"


def _config(
    database_url: str | None = None, output: StringIO | None = None, lock_seconds: float = LOCK_SECONDS
) -> Config:
    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    # For the table definitions beside the migrations, which only Alembic reads.
    config.set_main_option("prepend_sys_path", str(migrations_path()).replace("%", "%%"))
    # Not by set_main_option: a password may hold %, and the URL must not appear in a config dump.
    config.attributes["url"] = database_url
    config.attributes["lock_seconds"] = lock_seconds
    return config


def upgrade(
    database_url: str, revision: str = "head", *, lock_seconds: float = LOCK_SECONDS, tries: int = TRIES
) -> None:
    """Run the migrations up to ``revision``; doing so again changes nothing. Must not run inside an event loop.

    A lock that is not granted within ``lock_seconds`` is requested again after a pause as long, ``tries`` times in all;
    what was migrated by then stays. Raises Unavailable after the last of them, and for a database at a revision that
    this version does not know.
    """
    _run(command.upgrade, database_url, revision, lock_seconds, tries)


def downgrade(database_url: str, revision: str, *, lock_seconds: float = LOCK_SECONDS, tries: int = TRIES) -> None:
    """Undo the migrations down to ``revision`` (``base``: all), with their tables; otherwise as ``upgrade``."""
    _run(command.downgrade, database_url, revision, lock_seconds, tries)


async def _read_revision(database_url: str) -> str | None:
    """The revision that a database is at, None for one without our schema."""
    connection = await asyncpg.connect(database_url)
    try:
        found: str | None = await connection.fetchval("select version_num from penstock.alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return None
    finally:
        await connection.close()
    return found


def _run(
    migrate: Callable[[Config, str], None], database_url: str, revision: str, lock_seconds: float, tries: int
) -> None:
    found = asyncio.run(_read_revision(database_url))
    if found is not None and found not in revisions():
        raise Unavailable(
            f"the database is at revision {found!r}, which this version does not know: if a newer version migrated it, "
            "run that one; if one before the first release did, let its tasks finish, and migrate an empty database"
        )
    for left in reversed(range(tries)):
        try:
            return migrate(_config(database_url, lock_seconds=lock_seconds), revision)
        except DBAPIError as exc:
            if getattr(exc.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            if not left:
                raise Unavailable(
                    f"other transactions kept a table locked over {tries} tries of {lock_seconds:g} s each; look for "
                    "old ones in pg_stat_activity, end them and run it again"
                ) from exc
        time.sleep(lock_seconds)


def upgrade_sql(revision: str = "head") -> str:
    """The SQL of an upgrade of an empty database."""
    output = StringIO()
    command.upgrade(_config(output=output), revision, sql=True)
    return output.getvalue()


def head_revision() -> str:
    return ScriptDirectory.from_config(_config()).get_current_head() or "base"


def revisions() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
