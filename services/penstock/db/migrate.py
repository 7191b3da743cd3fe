"""The schema: upgrade and downgrade by Alembic with the migrations of the package; grants for the processes' roles."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.exc import DBAPIError

from penstock.db.connecting import Passwords, connect
from penstock.db.session import Translated
from penstock.db.statements import SQL
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.schema import DEFAULT, renamed
from penstock.protocol.spelling import did_you_mean

# A statement that waits for a table's lock blocks every later one, so it must not wait for long.
LOCK_SECONDS = 2.0
_PACKAGE = Path(__file__).parents[1]
_GRANTED = {"tables": "select, insert, update, delete", "sequences": "usage, select", "functions": "execute"}
LOCK = "hashtext('penstock migrate')"  # the advisory lock of those that change tables

# The rights that each process needs are those of the statements that its modules name, which
# tests/integration/test_roles.py finds and compares; by the letters of Postgres's own lists of rights.
PRIVILEGES = {"r": "select", "a": "insert", "w": "update", "d": "delete", "U": "usage", "X": "execute"}
_HEAD, *_ROWS = (line.split() for line in Path(__file__).with_name("rights.txt").read_text("utf-8").splitlines()[1:])
RIGHTS = {
    process: {row[0]: row[place] for row in _ROWS if row[place] != "-"} for place, process in enumerate(_HEAD) if place
}
"""By process: the letters of each table, sequence and function. A partition goes by its root, or else by PARTITIONS."""
RIGHTS["clockwork-source"] = RIGHTS["kafka-source"]
PARTITIONS = {"supervisor": "rd"}  # which takes expired records from them one by one
_PARTITION = re.compile(r"task_(success|critical_error|cancelled)(_.*)?")
_KINDS = {"U": "sequence ", "X": "function "}


def migrations_path() -> Path:
    """In an installed wheel, or at the top of a checkout."""
    shipped = _PACKAGE / "migrations"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1] / "migrations"


def _config(output: StringIO | None = None, **attributes: Any) -> Config:
    """attributes: what ``migrations/env.py`` reads."""
    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    # For the table definitions beside the migrations, which only Alembic reads.
    config.set_main_option("prepend_sys_path", str(migrations_path()).replace("%", "%%"))
    config.attributes.update({"schema": DEFAULT, "lock_seconds": LOCK_SECONDS} | attributes)
    return config


def _migrate(
    run: Callable[[Config, str], None],
    database_url: str,
    revision: str = "head",
    *,
    passwords: Passwords | None = None,
    schema: str = DEFAULT,
    lock_seconds: float = LOCK_SECONDS,
    tries: int = 30,
) -> None:
    """Run migrations up or down to ``revision``; doing so again changes nothing. Must not run inside an event loop.

    A lock that is not granted within ``lock_seconds`` is requested again after a pause as long, ``tries`` times in all;
    what was migrated by then stays. Raises Unavailable after the last of them, and for a database at a revision that
    this version does not know.
    """
    connect_to_it = connector(database_url, passwords, schema)
    found = asyncio.run(_read_revision(connect_to_it))
    if found is not None and found not in revisions():
        raise Unavailable(
            f"the database is at revision {found!r}, which this version does not know: if a newer version migrated it, "
            "run that one; if one before the first release did, let its tasks finish, and migrate an empty database"
        )
    for left in reversed(range(tries)):
        try:
            return run(_config(connect=connect_to_it, schema=schema, lock_seconds=lock_seconds), revision)
        except DBAPIError as exc:
            if getattr(exc.orig, "sqlstate", None) != "55P03":  # lock_not_available
                raise
            if not left:
                raise Unavailable(
                    f"other transactions kept a table locked over {tries} tries of {lock_seconds:g} s each; look for "
                    "old ones in pg_stat_activity, end them and run it again"
                ) from exc
        time.sleep(lock_seconds)


upgrade = partial(_migrate, command.upgrade)
downgrade = partial(_migrate, command.downgrade)  # with their tables; the revision ``base`` is an empty schema


def connector(
    database_url: str, passwords: Passwords | None = None, schema: str = DEFAULT
) -> Callable[[], Awaitable[Any]]:
    """Makes connections without named statements, so that a pooler may stand between."""
    return partial(connect, database_url, passwords=passwords, schema=schema, statement_cache_size=0)


async def _read_revision(connect_to_it: Callable[[], Awaitable[Any]]) -> str | None:
    connection = await connect_to_it()
    try:
        found: str | None = await connection.fetchval("select version_num from penstock.alembic_version")
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return None
    finally:
        await connection.close()
    return found


def upgrade_sql(revision: str = "head", *, schema: str = DEFAULT) -> str:
    """The SQL of an upgrade of an empty database."""
    output = StringIO()
    command.upgrade(_config(output=output, schema=schema), revision, sql=True)
    return renamed(output.getvalue(), schema)


def head_revision() -> str:
    return ScriptDirectory.from_config(_config()).get_current_head() or "base"


def revisions() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


async def grant(database_url: str, role: str, *, passwords: Passwords | None = None, schema: str = DEFAULT) -> None:
    """Grant a role the rights of the processes, also on later tables; doing so again changes nothing.

    Raises Refused for an unknown role and for one with the rights of the schema's owner.
    """
    with Translated():
        connection = await connector(database_url, passwords, schema)()
        try:
            async with connection.transaction():
                await _grant(connection, role, schema)
        finally:
            await connection.close()


async def _grant(connection: asyncpg.Connection, role: str, schema: str) -> None:
    await connection.execute(SQL["lock_migrations"])
    found = await connection.fetchrow(SQL["read_grantee"], role)
    if found is None:
        raise Refused(f"there is no role {role!r}: create it first, `create role ... login password ...`")
    if found["owns"]:
        raise Refused(f"the role {role!r} has the rights of {found['owner']}, which owns the schema: name another one")
    name = found["name"]
    statements = [f"grant usage on schema {schema} to {name}"]
    statements += [f"grant {rights} on all {kind} in schema {schema} to {name}" for kind, rights in _GRANTED.items()]
    statements.append(f"revoke insert, update, delete on {schema}.alembic_version from {name}")
    for (creator,) in await connection.fetch(SQL["list_table_creators"]):
        later = f"alter default privileges for role {creator} in schema {schema}"
        statements += [f"{later} grant {rights} on {kind} to {name}" for kind, rights in _GRANTED.items()]
    for statement in statements:
        await asyncpg.Connection.execute(connection, statement)  # not renamed: the role may be called penstock_app


def is_needed(process: str, name: str, privilege: str) -> bool:
    """Whether a process needs ``SELECT`` or another privilege on a table, sequence or function."""
    in_history = _PARTITION.fullmatch(name) is not None
    letters = PARTITIONS.get(process, "") if in_history else RIGHTS[process].get(name, "")
    return privilege.lower() in [PRIVILEGES[letter] for letter in letters]


def grants(role: str, processes: Sequence[str], *, schema: str = DEFAULT) -> list[str]:
    """The owner's statements that give a role what these processes need, and take what it had. Raises Refused."""
    if "worker" in processes:
        raise Refused("a worker needs no role: it has no connection to Postgres")
    for process in processes:
        if process not in RIGHTS:
            raise Refused(f"unknown process {process!r}{did_you_mean(process, RIGHTS)} (one of {', '.join(RIGHTS)})")
    name = '"' + role.replace('"', '""') + '"'
    as_text = name.replace("'", "''")
    later = f"alter default privileges in schema {schema}"
    statements = [f"revoke all on all {kind} in schema {schema} from {name}" for kind in _GRANTED]
    statements += [f"{later} revoke all on {kind} from {name}" for kind in _GRANTED]
    statements += [f"grant usage on schema {schema} to {name}", f"grant select on {schema}.alembic_version to {name}"]
    for letter, privilege in PRIVILEGES.items():
        things = {thing for process in processes for thing, letters in RIGHTS[process].items() if letter in letters}
        if things:
            listed = ", ".join(f"{schema}.{thing}" for thing in sorted(things))
            statements.append(f"grant {privilege} on {_KINDS.get(letter, '')}{listed} to {name}")
    for letters in {PARTITIONS[process] for process in processes if process in PARTITIONS}:
        privileges = ", ".join(PRIVILEGES[letter] for letter in letters)
        statements += [
            f"{later} grant {privileges} on tables to {name}",  # the partitions of days to come
            "do $penstock$ declare part regclass; begin "
            f"for part in select relid from pg_partition_tree('{schema}.task_history') where level > 0 loop "
            f"execute format('grant {privileges} on %s to %s', part, '{as_text}'); end loop; end $penstock$",
        ]
    return statements
