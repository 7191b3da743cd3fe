"""A trial: what claims and results cost where ``penstock.task`` is divided into hash partitions by id.

``python benchmarks/partitions.py --tasks 30000 --partitions 1 4 16`` enqueues, claims and settles tasks with the
statements of the processes, in one process, and prints the CPU time of the server by kind of statement. 1 is the table
of the migration. Decision 055 has figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.db.migrate import upgrade
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.task import NewTask
from penstock.tasks import claim, enqueue, settle

_OPTIONS = """fillfactor = 85, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000"""
_CLAIM, _SETTLE = 500, 100  # tasks of a statement


def divide(server: EmbeddedPostgres, database: str, partitions: int) -> None:
    """Replace the empty table by one of so many partitions."""
    server.execute("create table penstock.divided (like penstock.task including all) partition by hash (id)", database)
    server.execute("drop table penstock.task", database)
    server.execute("alter table penstock.divided rename to task", database)
    for remainder in range(partitions):
        bounds = f"with (modulus {partitions}, remainder {remainder}) with ({_OPTIONS})"
        part = f"create table penstock.task_part_{remainder} partition of penstock.task for values {bounds}"
        server.execute(part, database)


class Meter:
    """CPU milliseconds of the one connection's backend, by what it did."""

    def __init__(self, pid: int) -> None:
        self._backend = psutil.Process(pid)
        self.spent: dict[str, float] = {}
        self._last = self._used()

    def _used(self) -> float:
        times = self._backend.cpu_times()
        return (times.user + times.system) * 1000

    def note(self, what: str) -> None:
        used = self._used()
        self.spent[what] = self.spent.get(what, 0.0) + used - self._last
        self._last = used


async def measure(url: str, tasks: int) -> dict[str, float]:
    """CPU microseconds of the server a task, by statement; ``one`` are statements of one task each."""
    store = Store(url, pool_size=2)
    async with store.session() as session:
        meter = Meter(await session.value("read_backend"))
    singles = min(500, tasks // 10)
    for _ in range(tasks // 1000):
        async with store.session() as session:
            await enqueue.enqueue(session, [NewTask("a", '{"n": 1}')] * 1000)
    meter.note("enqueue")
    settled = 0
    while settled < tasks:
        async with store.transaction() as session:
            dispatch = await claim.claim(session, _CLAIM)
        assert dispatch is not None
        await confirmed(store, dispatch.id)
        meter.note("claim")
        for first in range(0, len(dispatch.tasks), _SETTLE):
            ids = [task.id for task in dispatch.tasks[first : first + _SETTLE]]
            settled += await finish(store, dispatch.id, ids)
        meter.note("settle")
    async with store.session() as session:
        await enqueue.enqueue(session, [NewTask("a", '{"n": 1}')] * singles)
    meter.note("rest")
    for _ in range(singles):
        async with store.transaction() as session:
            dispatch = await claim.claim(session, 1)
        assert dispatch is not None
        await confirmed(store, dispatch.id)
        meter.note("claim one")
        await finish(store, dispatch.id, [dispatch.tasks[0].id])
        meter.note("settle one")
    await store.close()
    many = {what: 1000 * meter.spent[what] / tasks for what in ("enqueue", "claim", "settle")}
    return many | {what: 1000 * meter.spent[what] / singles for what in ("claim one", "settle one")}


async def confirmed(store: Store, claimed: int) -> None:
    async with store.session() as session:
        await claim.confirm(session, claimed)


async def finish(store: Store, claimed: int, ids: Sequence[int]) -> int:
    async with store.transaction() as session:
        return await settle.finish(session, {(task_id, claimed): '{"ok": true}' for task_id in ids})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=30_000)
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {count: [] for count in given.partitions}
    with tempfile.TemporaryDirectory(prefix="penstock-partitions-", dir="/dev/shm") as folder:
        Path(folder).chmod(0o755)
        server = EmbeddedPostgres(Path(folder), options={"fsync": "off"})
        server.start()
        try:
            for number in range(given.repeat):
                for count in given.partitions:
                    name = f"trial_{number}_{count}"
                    server.create_database(name)
                    upgrade(server.dsn(name))
                    if count > 1:
                        divide(server, name, count)
                    found[count].append(asyncio.run(measure(server.dsn(name), given.tasks)))
                    server.drop_database(name)
        finally:
            server.stop()
    report: dict[int, Any] = {
        count: {what: round(statistics.median(run[what] for run in runs)) for what in runs[0]}
        for count, runs in found.items()
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
