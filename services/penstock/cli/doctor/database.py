"""The look at Postgres: can it be reached, may this role use it, will it keep what it is given; and the invariants."""

import asyncio
import re
import time
from typing import NamedTuple

import asyncpg

from penstock.cli.doctor.findings import Level, Report
from penstock.cli.run import PROCESSES
from penstock.db.migrate import RIGHTS, head_revision, is_needed, revisions
from penstock.db.pool import Store, open_store
from penstock.db.pooler import is_direct
from penstock.db.replica import Replica, open_replica
from penstock.db.session import Session, Translated
from penstock.db.statements import SQL
from penstock.limits.reported import list_announced
from penstock.protocol.errors import PenstockError
from penstock.protocol.schema import renamed
from penstock.runtime.logs import printable
from penstock.runtime.periodic import is_set_within
from penstock.settings.model import Settings

LOOKED_AT = 100_000  # live tasks, and as many settled ones
_SHOWN = 3
_REPORT = "this is a bug: report it with these ids and the logs of the time"


class Invariant(NamedTuple):
    """What invariants.sql says of a statement."""

    statement: str
    holds: str
    fix: str = _REPORT
    level: Level = "error"


_MEMBER = re.compile(r"^-- (Holds|Fix|Level): (.*)$", re.MULTILINE)
_SAID = {name: _MEMBER.findall(text.replace("{report}", _REPORT)) for name, text in SQL.items()}
INVARIANTS = [Invariant(name, **{key.lower(): text for key, text in said}) for name, said in _SAID.items() if said]


async def examine_stored(settings: Settings, report: Report) -> None:
    """The invariants, over a connection of its own. No finding where no database is set."""
    if settings.database_url is None:
        return
    try:
        async with open_store(settings, "penstock-doctor", pool_size=1) as store, store.session() as session:
            await examine_invariants(session, report, settings)
    except PenstockError as exc:
        report("error", "invariants", str(exc).splitlines()[0], "see the findings about the database")


async def examine_invariants(session: Session, report: Report, settings: Settings) -> None:
    """One finding for each invariant."""
    ages = settings.stale_after_seconds, settings.untaken_after_seconds
    for statement, holds, fix, level in INVARIANTS:
        found = await session.fetch(statement, LOOKED_AT, *(ages if statement == "find_work_overdue" else ()))
        seen = [printable(row["seen"], one_line=True) for row in found]
        more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
        broken = f"not so: {'; '.join(seen[:_SHOWN])}{more}"
        report.judge(holds, "so it is", (bool(seen), level, broken, renamed(fix, settings.database_schema)))
    if await session.value("count_live_up_to", LOOKED_AT) == LOOKED_AT:
        report("note", "invariants", f"only the {LOOKED_AT} oldest live tasks were read", "look again when fewer wait")


OLDEST, NEWEST = 14, 18  # major versions that the tests have seen, or that are promised
_LONG_TRANSACTION_SECONDS = 300
_IDLE_SECONDS = 60  # so often, at least, an idle process uses each of its connections
_NOT_SESSION = (
    "set PENSTOCK_DATABASE_POOLER=transaction, or leave it unset; docs/postgres.md, Poolers, names what the role needs "
    "for a pooler in session mode"
)
_GRANT = "run `penstock migrate --grant ROLE` as the owner of the schema, with the role of PENSTOCK_DATABASE_URL"


async def examine_database(settings: Settings, report: Report) -> None:
    """Postgres: one finding alone where it cannot be reached, and a note where none is set."""
    if settings.database_url is None:
        seen = "PENSTOCK_DATABASE_URL is not set"
        report("note", "database", seen, "right for a worker; all other processes need it")
        return
    try:
        async with open_store(settings, "penstock-doctor", pool_size=2) as store:
            await store.open()
            if store.is_pooled:
                await _examine_pooler(store, settings, report)
            elif await _shares_connections(store):
                seen = "one in transaction mode stands before Postgres, and is taken for one in session mode"
                report("error", "connection pooler", seen, _NOT_SESSION)
                return
            async with store.session() as session:
                asked = store.asked
                found = await session.fetch("find_ignored_settings", [*asked], [*asked.values()], _NOT_SESSION)
                report.rows(found, **{"connection settings": "what is asked for is in force"})
                await _examine_server(session, settings, report, is_pooled=store.is_pooled)
                await _examine_announced(session, report)
            if (replica := open_replica(settings, store)) is not None:
                await _examine_replica(replica, settings, report)
                await replica.close()
    except PenstockError as exc:
        seen = str(exc).splitlines()[0]
        if "unsupported startup parameter" in str(exc):
            report("error", "connection pooler", seen, _NOT_SESSION)
        elif "statement pooling mode" in str(exc):
            report("error", "connection pooler", seen, "set its pool_mode to transaction: tasks need transactions")
        elif "'read-write'" in str(exc):
            seen = "no host of PENSTOCK_DATABASE_URL takes writes: each is a standby, read-only or unreachable"
            report("error", "database role", seen, "promote a standby, or name the primary too")
        else:
            fix = "check PENSTOCK_DATABASE_URL, the network between here and there, and that Postgres runs"
            report("error", "database", seen, fix)


async def _examine_announced(session: Session, report: Report) -> None:
    """Whether tasks wait for a worker; nothing where the schema is older, or may not be read."""
    try:
        found = await list_announced(session)
    except PenstockError:
        return
    for action in [action for action in found if action.waiting and not action.workers]:
        seen = "was never announced" if action.seen_at is None else f"was last announced at {action.seen_at}"
        problem = f"no worker runs {action.action}, which {seen}; {action.waiting} tasks wait for one"
        report("warning", "actions", problem, "start workers that have it, or cancel its tasks")
    if running := sum(action.workers > 0 for action in found):
        report("ok", "actions", f"workers announce {running}")


async def _examine_pooler(store: Store, settings: Settings, report: Report) -> None:
    with Translated():
        async with (await store.open()).acquire() as connection:
            found = not await is_direct(connection)
    if found:
        kept = "stay prepared" if store.keeps_statements else "are parsed each time"
        report("ok", "connection pooler", f"in transaction mode: settings go with each transaction, statements {kept}")
    else:
        seen = "none is found, and PENSTOCK_DATABASE_POOLER is transaction: each statement takes more round trips"
        report("warning", "connection pooler", seen, "leave PENSTOCK_DATABASE_POOLER unset, which finds a pooler")
    if settings.database_listen_url is None:
        seen = f"none pass the pooler: schedulers look for tasks every {settings.poll_seconds:g} s"
        fix = "set PENSTOCK_DATABASE_LISTEN_URL to the URL of Postgres itself to start them sooner"
        report("note", "wake-ups", seen, fix)
    else:
        seen = "PENSTOCK_DATABASE_LISTEN_URL receives none"
        try:
            hears = await _hears(store)
        except PenstockError as exc:
            hears, seen = False, f"{seen}: {str(exc).splitlines()[0]}"
        fix = "name the same database there, and Postgres itself, past the pooler"
        report.judge("wake-ups", "PENSTOCK_DATABASE_LISTEN_URL receives them", (not hears, "error", seen, fix))


async def _hears(store: Store) -> bool:
    heard, channel = asyncio.Event(), "penstock_doctor"
    connection = await store.connect()
    try:
        await connection.add_listener(channel, lambda *_: heard.set())
        async with store.session() as session:
            await session.fetch("notify_work", channel, "")
        return await is_set_within(heard, 3.0)
    finally:
        connection.terminate()


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


async def _examine_server(session: Session, settings: Settings, report: Report, *, is_pooled: bool) -> None:
    before = time.time()
    (server,) = await session.fetch("read_server")
    now = (before + time.time()) / 2
    limit, wanted = settings.statement_timeout_seconds, len(PROCESSES) * settings.database_pool_size
    found = await session.fetch("find_server_problems", limit, _IDLE_SECONDS, wanted, is_pooled, OLDEST, NEWEST)
    report.rows(found, timeouts=f"a statement has {limit:g} s, and nothing else ends it earlier")
    report.clock("database clock", server["clock"] - now, "run_at is judged by the database's clock")
    if not server["has_schema"]:
        report("error", "schema", "there is none", "run `penstock migrate`")
    elif not server["may_use_schema"]:
        report("error", "privileges", f"this role may not use the schema {settings.database_schema}", _GRANT)
    else:
        await _examine_privileges(session, report)
        await _examine_schema(session, report)
        found = await session.fetch("find_schema_problems", _LONG_TRANSACTION_SECONDS, PROCESSES, is_pooled)
        connected = "every kind that needs the database is connected"
        report.rows(found, transactions="none has been open for long", processes=connected)


async def _examine_replica(replica: Replica, settings: Settings, report: Report) -> None:
    """Whether the api may read from it, and how long it takes to show what the primary has now."""
    limit = settings.database_read_max_age_seconds
    try:
        began = await replica.note_position()
        while True:
            async with replica.dated_session() as (session, as_of):
                waited = time.monotonic() - began
                if as_of >= began or waited > limit:
                    server = (await session.fetch("read_server"))[0]
                    break
            await asyncio.sleep(0.05)
    except PenstockError as exc:
        fix = "name a streaming replica that runs, or unset it: until then all reads go to the primary"
        report("warning", "read replica", str(exc).splitlines()[0], fix)
    else:
        report.judge(
            "read replica", f"it follows the primary within {max(waited, 0.1):.1f} s",
            (as_of < began, "warning", f"it lags by more than {limit:g} s, so all reads go to the primary",
             "look for long queries on it, a slow network or disk, or raise PENSTOCK_DATABASE_READ_MAX_AGE_SECONDS"),
            (not server["may_use_schema"], "error", "this role may not use the schema there", _GRANT),
        )  # fmt: skip


async def _examine_schema(session: Session, report: Report) -> None:
    found, head = await session.value("read_schema_revision"), head_revision()
    is_known = found in revisions()
    report.judge(
        "schema", f"at {found}, the newest that this version knows",
        (is_known and found != head, "error", f"at {found}, and {head} is needed", "run `penstock migrate`"),
        (not is_known, "error", f"at {found}, which this version does not know; its newest is {head}",
         "install the version of Penstock that made it, or a newer one"),
    )  # fmt: skip
    if await session.fetch("drop_unfinished_division"):
        seen = "`penstock partition-tasks` has not ended: from its bound of ids on, no task could be stored"
        report("warning", "partitions", seen, "run it again, with 1 to take back what it has begun")
    elif ranges := await session.fetch("list_ranges"):
        older = sum(row["partitions"] for row in ranges[:-1])
        seen = f"new tasks go to {ranges[-1]['partitions']} tables, older ones are in {older} others"
        report("ok", "partitions", seen)


async def _examine_privileges(session: Session, report: Report) -> None:
    """An error if a process that connects as this role lacks a right, or if no process could run as it."""
    missing = [(row["name"], row["privilege"]) for row in await session.fetch("list_missing_privileges")]
    lacking = {process: [right for right in missing if is_needed(process, *right)] for process in RIGHTS}
    able = [process for process, rights in lacking.items() if not rights]
    connections = await session.fetch("list_penstock_connections")
    own = {row["name"].removeprefix("penstock-") for row in connections if row["is_own"]}
    broken = [process for process in RIGHTS if process in own and lacking[process]]
    wanting = broken or [process for process in PROCESSES if lacking[process]]
    if not wanting:
        report("ok", "privileges", f"this role may run {', '.join(able)}")
        return
    # Of those that lack anything, one that runs as this role, else the one that lacks least.
    process = min(wanting, key=lambda name: len(lacking[name]))
    rights = [f"{privilege} on {name}" for name, privilege in lacking[process]]
    more = f" and {len(rights) - 3} more" if len(rights) > 3 else ""
    seen = f"as {process} this role lacks {', '.join(rights[:3])}{more}"
    if able and not broken:
        seen = f"this role may run {', '.join(able)}; {seen}"
    role = await session.value("read_role")
    # The printed grants take all other rights from the role.
    served = " ".join(f"--process {name}" for name in RIGHTS if name in own or name in able or name == process)
    report(
        "note" if able and not broken else "error", "privileges", seen,
        f"run as the owner of the schema what `penstock grants --role {role} {served}` prints, naming every process "
        f"that runs as this role, or `penstock migrate --grant {role}` if all processes share the role",
    )  # fmt: skip
