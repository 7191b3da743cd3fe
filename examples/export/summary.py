"""What a run of the demo came to: the figures, read from the tables, and whether all is as it should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg

_SHOWN = 10
_BAR = 40

_OVERALL = """
with took as (
    select extract(epoch from finished_at - created_at) as latency,
           extract(epoch from finished_at - min(created_at) over ()) as since_first
    from penstock.task_history
)
select max(since_first)::float8 as seconds,
       percentile_cont(0.95) within group (order by since_first) as most_seconds,
       percentile_cont(array[0.5, 0.95, 0.99]) within group (order by latency) as latency_seconds
from took
"""
_STATES = """
select state::text as state, count(*) as count from penstock.task group by 1
union all
select state::text, count(*) from penstock.task_history group by 1
"""
_ATTEMPTS = "select attempts, count(*) as count from penstock.task_history group by 1 order by 1"
_UNSETTLED = """
select id, state::text as state, attempts, payload ->> 'objectID' as object_id,
       failures -> -1 -> 'error' ->> 'message' as reason
from penstock.task
union all
select id, state::text, attempts, payload ->> 'objectID', failures -> -1 -> 'error' ->> 'message'
from penstock.task_history where state <> 'SUCCESS'
order by id limit $1
"""
_FOUND_WRITTEN = "select count(*) from penstock.task_history where (result ->> 'written') = 'false'"
_REJECTED = "select source, reason from penstock.rejected order by id limit $1"
# An object is exported once when its row is there and the ledger has one INSERT of it and nothing else.
_EXPORTS = """
with ledger as (
    select object_id, count(*) as writes, bool_and(operation = 'INSERT') as only_inserted
    from t_export_ledger group by object_id
), each as (
    select object.id, exported.object_id is not null as exported, coalesce(ledger.writes, 0) as writes,
           coalesce(ledger.only_inserted, true) as only_inserted
    from t_object object
    left join t_exported_object exported on exported.object_id = object.id
    left join ledger on ledger.object_id = object.id
)
select count(*) as objects, count(*) filter (where exported and writes = 1 and only_inserted) as once,
       count(*) filter (where not exported) as missing,
       count(*) filter (where writes > 1 or not only_inserted) as again,
       (select count(*) from t_exported_object) as rows
from each
"""


@dataclass(frozen=True)
class Summary:
    """One run.

    expected: objects fed. seconds: from the first task's creation to the last one's end. most_seconds: to the end of
    95 % of them. latency_seconds: from created to finished, the 50th, 95th and 99th percentile.
    """

    expected: int
    states: Mapping[str, int]
    attempts: Mapping[int, int]
    seconds: float
    most_seconds: float
    latency_seconds: Sequence[float]
    objects: int
    rows: int
    once: int
    missing: int
    again: int
    found_written: int
    rejected: Sequence[str] = ()
    unsettled: Sequence[str] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What keeps this run from being a success, empty when nothing does."""
        found = []
        succeeded = self.states.get("SUCCESS", 0)
        if succeeded != self.expected:
            found.append(f"{succeeded} of {self.expected} tasks are SUCCESS")
        others = {state: count for state, count in self.states.items() if state != "SUCCESS" and count}
        if others:
            found.append("other tasks: " + ", ".join(f"{count} {state}" for state, count in sorted(others.items())))
        if self.once != self.expected or self.objects != self.expected:
            found.append(f"{self.once} of {self.expected} records were exported exactly once")
        if self.missing:
            found.append(f"{self.missing} records were not exported")
        if self.again:
            found.append(f"{self.again} records were written more than once")
        if self.rows != self.once:
            found.append(f"{self.rows} rows are in t_exported_object where {self.once} belong")
        if self.rejected:
            found.append("messages were rejected")
        return found


async def summarize(
    connection: asyncpg.Connection[Any],
    exports_connection: asyncpg.Connection[Any],
    expected: int,
    state: Mapping[str, Any] | None,
) -> Summary:
    """Read the figures of two databases that this run had to itself. state: what `penstock ps --json` prints."""
    overall = await connection.fetchrow(_OVERALL)
    states: dict[str, int] = {}
    for row in await connection.fetch(_STATES):
        states[row["state"]] = states.get(row["state"], 0) + row["count"]
    exports = await exports_connection.fetchrow(_EXPORTS)
    assert overall is not None
    assert exports is not None
    return Summary(
        expected=expected,
        states=states,
        attempts={row["attempts"]: row["count"] for row in await connection.fetch(_ATTEMPTS)},
        seconds=overall["seconds"] or 0.0,
        most_seconds=overall["most_seconds"] or 0.0,
        latency_seconds=overall["latency_seconds"] or (0.0, 0.0, 0.0),
        objects=exports["objects"],
        rows=exports["rows"],
        once=exports["once"],
        missing=exports["missing"],
        again=exports["again"],
        found_written=await connection.fetchval(_FOUND_WRITTEN),
        rejected=[f"{row['source']}: {row['reason']}" for row in await connection.fetch(_REJECTED, _SHOWN)],
        unsettled=[_described(row) for row in await connection.fetch(_UNSETTLED, _SHOWN)],
        restarts={
            entry["name"]: entry["restarts"] for entry in (state or {}).get("processes", ()) if entry["restarts"]
        },
    )


def lines_of(summary: Summary) -> Iterator[str]:
    """The summary as text, one fact a line."""
    yield _line("states", ", ".join(f"{count:,} {state}" for state, count in sorted(summary.states.items())) or "none")
    most = max(summary.attempts.values(), default=1)
    for number, (attempts, count) in enumerate(summary.attempts.items()):
        bar = "#" * max(1, round(_BAR * count / most))
        yield _line("attempts" if number == 0 else "", f"{attempts:>2}  {count:>9,}  {bar}")
    settled = sum(summary.attempts.values())
    if summary.seconds:
        rate = settled / summary.seconds
        yield _line("throughput", f"{rate:,.0f} tasks/s: {settled:,} settled in {summary.seconds:.1f} s")
        yield _line("", f"95 % of them in {summary.most_seconds:.1f} s, before the last retries")
    p50, p95, p99 = summary.latency_seconds
    yield _line("latency", f"p50 {p50:.2f} s, p95 {p95:.2f} s, p99 {p99:.2f} s, from created to finished")
    yield _line("exported", f"{summary.once:,} of {summary.expected:,} records exactly once")
    if summary.found_written:
        yield _line("", f"{summary.found_written:,} times a later attempt found its row written, and left it")
    if summary.restarts:
        restarts = (f"{name} {count}" for name, count in sorted(summary.restarts.items()))
        yield _line("restarted", ", ".join(restarts))
    for number, problem in enumerate(summary.problems):
        yield _line("wrong" if number == 0 else "", problem)
    for label, entries in (("unsettled", summary.unsettled), ("rejected", summary.rejected)):
        for number, entry in enumerate(entries):
            yield _line(label if number == 0 else "", entry)


def _described(row: asyncpg.Record) -> str:
    reason = row["reason"] or "no attempt has failed"
    what = f"task {row['id']} (object {row['object_id']})"
    return f"{what} is {row['state']} after {row['attempts']} attempts: {reason[:200]}"


def _line(label: str, text: str) -> str:
    return f"{label:<12}{text}"
