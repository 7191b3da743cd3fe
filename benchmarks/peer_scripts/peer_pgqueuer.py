"""PgQueuer: asyncpg driver, uvloop, batches of 500 (its best; the default of 10 drains a fifth)."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta

import asyncpg
import uvloop
from barrier import DATABASE_URL, FILL_BATCH, note_start, stop_event, wait_for_go
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

BATCH = 500


async def fill(tasks: int) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect(DATABASE_URL)))
    await queries.install()
    await queries.optimize_autovacuum()
    for first in range(0, tasks, FILL_BATCH):
        payloads = [json.dumps({"n": n}).encode() for n in range(first, min(first + FILL_BATCH, tasks))]
        await queries.enqueue(["noop"] * len(payloads), list(payloads), [0] * len(payloads))


async def work() -> None:
    queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(DATABASE_URL)))

    @queue.entrypoint("noop")
    async def noop(job):  # type: ignore[no-untyped-def]
        note_start()
        json.loads(job.payload)

    stop = stop_event()
    await wait_for_go()
    running = asyncio.create_task(queue.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=5)))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    queue.shutdown.set()
    await asyncio.wait([running], timeout=5)
    if running.done():
        running.result()


if __name__ == "__main__":
    uvloop.run(work() if sys.argv[1] == "work" else fill(int(sys.argv[2])))
