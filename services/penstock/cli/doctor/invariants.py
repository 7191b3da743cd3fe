"""What must hold in every snapshot of the database, while all processes run. Reads a bounded number of rows."""

import re
from typing import NamedTuple

from penstock.cli.doctor.findings import Level, Report
from penstock.db.opening import open_store
from penstock.db.session import Session
from penstock.db.statements import SQL
from penstock.protocol.errors import PenstockError
from penstock.protocol.schema import DEFAULT, renamed
from penstock.runtime.logs import printable
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
            await examine_invariants(
                session, report, stale_after_seconds=settings.stale_after_seconds,
                untaken_after_seconds=settings.untaken_after_seconds, schema=settings.database_schema,
            )  # fmt: skip
    except PenstockError as exc:
        report("error", "invariants", str(exc).splitlines()[0], "see the findings about the database")


async def examine_invariants(
    session: Session, report: Report, *, stale_after_seconds: float, untaken_after_seconds: float = 0.0,
    schema: str = DEFAULT,
) -> None:  # fmt: skip
    """One finding for each invariant. untaken_after_seconds: for which a task may wait for a worker in its queue."""
    overdue = LOOKED_AT, stale_after_seconds, untaken_after_seconds
    for statement, holds, fix, level in INVARIANTS:
        args = overdue if statement == "find_work_overdue" else (LOOKED_AT,)
        seen = [printable(row["seen"], one_line=True) for row in await session.fetch(statement, *args)]
        if seen:
            more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
            report(level, holds, f"not so: {'; '.join(seen[:_SHOWN])}{more}", renamed(fix, schema))
        else:
            report("ok", holds, "so it is")
    if await session.value("count_live_up_to", LOOKED_AT) == LOOKED_AT:
        report("note", "invariants", f"only the {LOOKED_AT} oldest live tasks were read", "look again when fewer wait")
