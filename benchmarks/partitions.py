"""What claims, results and vacuum cost where ``penstock.task`` is divided into hash partitions.

``python benchmarks/partitions.py --tasks 30000 --partitions 1 4 16`` enqueues, claims and settles tasks with the
statements of the processes, in one process, and prints the CPU time of the server by kind of statement, once plans are
kept. Then as many tasks leave their dead rows, which one vacuum a partition removes, all at once. 1 is the undivided
table. docs/postgres.md has figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.db.migrate import upgrade
from penstock.db.partitions import partition_tasks
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.task import NewTask
from penstock.tasks import claim, enqueue, settle

_CLAIM, _SETTLE = 500, 100  # tasks of a statement


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
    for _ in range(10):  # a plan is kept from the sixth run on
        await run(store, _CLAIM, _SETTLE)
        await run(store, 1, 1)
    meter.note("rest")
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
    await vacuum(url)  # a claim begins at the front here, and a scheduler's behind what it claimed last
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


async def vacuum(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("vacuum penstock.task")
    await connection.close()


async def run(store: Store, tasks: int, at_once: int) -> None:
    """Enqueue, claim and settle so many tasks."""
    async with store.session() as session:
        await enqueue.enqueue(session, [NewTask("a", '{"n": 1}')] * tasks)
    async with store.transaction() as session:
        batch = await claim.claim(session, tasks)
    assert batch is not None
    await confirmed(store, batch.id)
    for first in range(0, tasks, at_once):
        await finish(store, batch.id, [task.id for task in batch.tasks[first : first + at_once]])


async def measure_vacuum(url: str, tasks: int) -> dict[str, float]:
    """Dead rows a second: of all vacuums together, one a table, and of one vacuum that goes from table to table."""
    connection = await asyncpg.connect(url)
    rows = await connection.fetch(
        "select c.oid::regclass::text from pg_class c where relnamespace = 'penstock'::regnamespace and relkind = 'r'"
        " and (oid = 'penstock.task'::regclass or oid in (select relid from pg_partition_tree('penstock.task')))"
    )
    tables = [table for (table,) in rows]
    for table in tables:
        await connection.execute(f"alter table {table} set (autovacuum_enabled = off)")
    connections = [connection, *[await asyncpg.connect(url) for _ in tables[1:]]]
    store = Store(url, pool_size=2)
    rates = {}
    for what, workers in (("vacuum by one", connections[:1]), ("vacuum by all", connections)):
        for _ in range(tasks // 1000):
            await run(store, 1000, 1000)

        async def clean(place: int, workers: list[Any] = workers) -> None:
            for table in tables[place :: len(workers)]:
                await workers[place].execute(f"vacuum {table}")

        began = time.perf_counter()
        await asyncio.gather(*map(clean, range(len(workers))))
        rates[what] = 2 * tasks / (time.perf_counter() - began)
    await store.close()
    for each in connections:
        await each.close()
    return rates


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
        server = EmbeddedPostgres(Path(folder), options={"fsync": "off", "max_locks_per_transaction": "400"})
        server.start()
        try:
            for number in range(given.repeat):
                for count in given.partitions:
                    name = f"trial_{number}_{count}"
                    server.create_database(name)
                    upgrade(server.dsn(name))
                    asyncio.run(partition_tasks(server.dsn(name), count, report=lambda _: None))
                    measured = asyncio.run(measure(server.dsn(name), given.tasks))
                    found[count].append(measured | asyncio.run(measure_vacuum(server.dsn(name), given.tasks)))
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
