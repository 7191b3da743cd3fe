"""The look at Postgres: can it be reached, is the schema there, may this role use it, will it keep what it is given."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import asyncpg

from penstock.cli.doctor.findings import Finding, clock_finding
from penstock.db.migrate import head_revision, revisions
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol.errors import PenstockError
from penstock.settings.model import Settings

OLDEST, NEWEST = 14, 18  # major versions that the tests have seen, or that are promised
PROCESSES = ("submitter", "scheduler", "resulter", "supervisor", "api")
_LONG_TRANSACTION_SECONDS = 300
_DIRECT = (
    "connect directly, or by a pooler in session mode: "
    "docs/operations.md, The database, names the settings that the role needs then"
)
_GRANT = "run `penstock migrate --grant ROLE` as the owner of the schema, with the role of PENSTOCK_DATABASE_URL"


async def examine_database(settings: Settings) -> AsyncIterator[Finding]:
    """Findings about Postgres; one alone where it cannot be reached, and a note where none is set."""
    if settings.database_url is None:
        seen = "PENSTOCK_DATABASE_URL is not set"
        yield Finding("note", "database", seen, "right for a worker; all other processes need it")
        return
    store = Store(
        settings.require_database_url,
        pool_size=2,
        statement_timeout_seconds=settings.statement_timeout_seconds,
        application_name="penstock-doctor",
    )
    try:
        if await _shares_connections(store):
            seen = "a pooler in transaction or statement mode stands before Postgres"
            yield Finding("error", "connection pooler", seen, _DIRECT)
            return
        async with store.session() as session:
            yield _of_settings(store.asked, await session.fetch("read_settings_in_force", list(store.asked)))
            async for finding in _examine(session, settings):
                yield finding
    except PenstockError as exc:
        if "unsupported startup parameter" in str(exc):
            yield Finding("error", "connection pooler", str(exc).splitlines()[0], _DIRECT)
            return
        yield Finding(
            "error", "database", str(exc).splitlines()[0],
            "check PENSTOCK_DATABASE_URL, the network between here and there, and that Postgres runs",
        )  # fmt: skip
    finally:
        await store.close()


async def _shares_connections(store: Store) -> bool:
    """Whether a connection changes its server while another one is in a transaction."""
    try:
        async with store.session() as session:
            before = await session.value("read_backend")
            async with store.transaction() as other:
                await other.value("read_backend")
                return bool(before != await session.value("read_backend"))
    except (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        return True  # what this connection has prepared is another server's


def _of_settings(asked: Mapping[str, str], found: Sequence[Any]) -> Finding:
    in_force = {row["name"]: row["setting"] for row in found}
    missing = [f"{name} is {in_force[name]}, not {value}" for name, value in asked.items() if in_force[name] != value]
    if not missing:
        return Finding("ok", "connection settings", "what each connection asks for is in force")
    seen = f"a pooler does not pass on what connections ask for: {'; '.join(missing)}"
    return Finding("error", "connection settings", seen, _DIRECT)


async def _examine(session: Session, settings: Settings) -> AsyncIterator[Finding]:
    before = time.time()
    (server,) = await session.fetch("read_server")
    now = (before + time.time()) / 2
    for finding in _of_server(server):
        yield finding
    yield _of_connections(server, settings)
    yield clock_finding("database clock", server["clock"] - now, "run_at is judged by the database's clock")
    if not server["has_schema"]:
        yield Finding("error", "schema", "there is none", "run `penstock migrate`")
        return
    if not server["may_use_schema"]:
        yield Finding("error", "privileges", "this role may not use the schema penstock", _GRANT)
        return
    missing = await session.fetch("list_missing_privileges")
    yield _of_privileges([(row["name"], row["privilege"]) for row in missing])
    for finding in _of_publications(await session.fetch("list_published_without_identity")):
        yield finding
    for row in await session.fetch("read_open_schema"):
        yield _of_open_schema(row["name"])
    yield _of_revision(await session.value("read_schema_revision"))
    yield _of_oldest_transaction(await session.fetch("read_oldest_transaction"))
    yield _of_processes({row["name"] for row in await session.fetch("list_penstock_connections")})


def _of_server(server: Any) -> Iterator[Finding]:
    major = server["version"] // 10_000
    if major < OLDEST:
        yield Finding("error", "database", f"PostgreSQL {major}", f"upgrade: {OLDEST} to {NEWEST} are supported")
    elif major > NEWEST:
        yield Finding("note", "database", f"PostgreSQL {major}", f"tested up to {NEWEST}; look for a newer Penstock")
    else:
        yield Finding("ok", "database", f"PostgreSQL {major} answers")
    if server["in_recovery"]:
        yield Finding("error", "database role", "it is a standby, and takes no writes", "name the primary in the URL")
    elif server["read_only"]:
        yield Finding(
            "error", "database role", "default_transaction_read_only is on: nothing can be written",
            "set it to off for this role or database; a provider sets it when the disk is full",
        )  # fmt: skip
    if not server["fsync"]:
        yield Finding("warning", "fsync", "off: a crash of the machine may lose everything", "set fsync = on")
    if server["synchronous_commit"] == "off":
        yield Finding(
            "warning", "synchronous_commit", "off: a crash may lose tasks whose acceptance was answered",
            "set synchronous_commit = on for this role or database",
        )  # fmt: skip
    if not server["autovacuum"]:
        yield Finding(
            "warning", "autovacuum", "off: dead rows of the live table slow every claim down", "set autovacuum = on"
        )


def _of_connections(server: Any, settings: Settings) -> Finding:
    room, connected = server["connections"], server["connected"]
    wanted = len(PROCESSES) * settings.database_pool_size
    seen = f"{connected} of {room} connections in use; one of each process may take {wanted}"
    if wanted > room:
        return Finding("error", "connections", seen, "raise max_connections, or lower PENSTOCK_DATABASE_POOL_SIZE")
    if connected > room * 0.8:
        return Finding("warning", "connections", seen, "raise max_connections before a burst finds none")
    return Finding("ok", "connections", seen)


def _of_revision(found: str | None) -> Finding:
    head = head_revision()
    if found == head:
        return Finding("ok", "schema", f"at {found}, the newest that this version knows")
    if found in revisions():
        return Finding("error", "schema", f"at {found}, and {head} is needed", "run `penstock migrate`")
    return Finding(
        "error", "schema", f"at {found}, which this version does not know; its newest is {head}",
        "install the version of Penstock that made it, or a newer one",
    )  # fmt: skip


def _of_privileges(missing: Sequence[tuple[str, str]]) -> Finding:
    if not missing:
        return Finding("ok", "privileges", "this role may read and write every table, and call the functions of upkeep")
    shown = ", ".join(f"{privilege} on {name}" for name, privilege in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return Finding("error", "privileges", f"this role lacks {shown}{more}", _GRANT)


def _of_publications(rows: Sequence[Any]) -> Iterator[Finding]:
    if rows:
        names = ", ".join(row["name"] for row in rows[:3])
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        yield Finding(
            "error", "publications",
            f"{rows[0]['publication']} publishes {names}{more}, which have no replica identity: Postgres refuses their "
            "updates and deletes",
            f"alter table penstock.{rows[0]['name']} replica identity full",
        )  # fmt: skip


def _of_open_schema(name: str) -> Finding:
    return Finding(
        "warning", "enqueue functions",
        f"every role may create in the schema {name}: functions beside penstock_enqueue that calls find first",
        f"revoke create on schema {name} from public",
    )  # fmt: skip


def _of_oldest_transaction(rows: Sequence[Any]) -> Finding:
    if not rows or rows[0]["seconds"] < _LONG_TRANSACTION_SECONDS:
        return Finding("ok", "transactions", "none has been open for long")
    oldest = rows[0]
    return Finding(
        "warning", "transactions",
        f"process {oldest['pid']} ({oldest['name'] or 'without a name'}, {oldest['state']}) has had one open for "
        f"{oldest['seconds'] / 60:.0f} minutes: until it ends, no dead row can be removed",
        f"end it, or select pg_terminate_backend({oldest['pid']}); set idle_in_transaction_session_timeout",
    )  # fmt: skip


def _of_processes(connected: set[str]) -> Finding:
    missing = [name for name in PROCESSES if f"penstock-{name}" not in connected]
    if not missing:
        return Finding("ok", "processes", "every kind that needs the database is connected")
    return Finding(
        "warning", "processes", f"none is connected: {', '.join(missing)}",
        "start at least one of each: `penstock " + missing[0] + "` and so on",
    )  # fmt: skip
