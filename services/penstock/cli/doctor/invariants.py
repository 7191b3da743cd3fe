"""What must hold in every snapshot of the database, while all processes run. Reads a bounded number of rows."""

from typing import NamedTuple

from penstock.cli.doctor.findings import Level, Report
from penstock.db.opening import open_store
from penstock.db.session import Session
from penstock.protocol.errors import PenstockError
from penstock.runtime.logs import printable
from penstock.settings.model import Settings

LOOKED_AT = 100_000  # live tasks, and as many settled ones
_SHOWN = 3
_REPORT = "this is a bug: report it with these ids and the logs of the time"


class _Invariant(NamedTuple):
    """holds: shown as long as the statement finds nothing. fix: for what it finds."""

    holds: str
    statement: str
    fix: str = _REPORT
    level: Level = "error"


INVARIANTS = (
    _Invariant(
        "a task is live or has one final record", "find_tasks_settled_twice",
        f"compare the records with `penstock task`; after a restore, see docs/operations.md; else {_REPORT}",
    ),
    _Invariant("attempts stay within their limit", "find_attempts_beyond_limit"),
    _Invariant(
        "every claim has a token of its own", "find_sequences_behind",
        "stop the schedulers and raise the sequence: select setval('penstock.claim_seq', greatest((select max(claim) "
        "from penstock.task), (select max(claim) from penstock.task_history)) + 1000); likewise task_id_seq, by id",
    ),
    _Invariant("one task of an ordering key runs", "find_keys_run_twice"),
    _Invariant("tasks of an ordering key run in order", "find_keys_out_of_order"),
    _Invariant("an ordering key is taken while its task runs", "find_keys_without_head"),
    _Invariant(
        "an ordering key moves on", "find_keys_that_stand_still",
        f"`penstock cancel` the task to have the next one looked at; {_REPORT}",
    ),
    _Invariant("a unique key is taken while its task is live", "find_unique_keys_free"),
    _Invariant(
        "one live task has a unique key", "find_unique_keys_shared",
        f"right if they were enqueued with a time for unique; else {_REPORT}", "note",
    ),
    _Invariant("no limit is exceeded", "find_limits_exceeded"),
    _Invariant(
        "a task that waits has an event to wait for", "find_waits_without_end",
        f"`penstock cancel`, then `penstock retry` the task; {_REPORT}",
    ),
    _Invariant(
        "a limited task waits at a gate", "find_gates_missing", f"`penstock reschedule` the task; {_REPORT}",
    ),
    _Invariant(
        "a workflow moves on", "find_workflows_astray", f"`penstock workflow cancel` it, then retry it; {_REPORT}"
    ),
    _Invariant(
        "nothing is overdue", "find_work_overdue",
        "is a supervisor running, and a resulter? See their logs for duties that fail", "warning",
    ),
)  # fmt: skip


async def examine_stored(settings: Settings, report: Report) -> None:
    """The invariants, over a connection of its own. No finding where no database is set."""
    if settings.database_url is None:
        return
    store = open_store(settings, "penstock-doctor", pool_size=1)
    try:
        async with store.session() as session:
            await examine_invariants(session, report, stale_after_seconds=settings.stale_after_seconds)
    except PenstockError as exc:
        report("error", "invariants", str(exc).splitlines()[0], "see the findings about the database")
    finally:
        await store.close()


async def examine_invariants(session: Session, report: Report, *, stale_after_seconds: float) -> None:
    """One finding for each invariant."""
    for holds, statement, fix, level in INVARIANTS:
        args = (LOOKED_AT, stale_after_seconds) if statement == "find_work_overdue" else (LOOKED_AT,)
        seen = [printable(row["seen"], one_line=True) for row in await session.fetch(statement, *args)]
        if seen:
            more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
            report(level, holds, f"not so: {'; '.join(seen[:_SHOWN])}{more}", fix)
        else:
            report("ok", holds, "so it is")
    if await session.value("count_live_up_to", LOOKED_AT) == LOOKED_AT:
        report("note", "invariants", f"only the {LOOKED_AT} oldest live tasks were read", "look again when fewer wait")
