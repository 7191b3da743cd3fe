"""PgQueuer: asyncpg driver, uvloop, batches of 500 (its best; the default of 10 drains a fifth).

fill TASKS               makes the tables, enqueues a backlog
work                     drains it
serve                    as work, and writes down how long after its call each of trickle's tasks starts
trickle RATE SECONDS     enqueues one by one, so many a second
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta

import asyncpg
import uvloop
from barrier import DATABASE_URL, FILL_BATCH, FOLDER, note_start, stop_event, wait_for_go
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


async def trickle(rate: float, seconds: float) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect(DATABASE_URL)))
    tasks = round(rate * seconds)
    began, used = time.perf_counter(), time.process_time()
    for number in range(tasks):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        await queries.enqueue("noop", json.dumps({"at": time.time_ns() // 1000}).encode(), 0)
    print(json.dumps({"tasks": tasks, "cpu_seconds": time.process_time() - used}))


async def work(*, writes_waits: bool = False) -> None:
    queue = PgQueuer(AsyncpgDriver(await asyncpg.connect(DATABASE_URL)))
    waits = (FOLDER / "waits").open("w", buffering=1) if writes_waits else None

    @queue.entrypoint("noop")
    async def noop(job):  # type: ignore[no-untyped-def]
        note_start()
        payload = json.loads(job.payload)
        if waits is not None and "at" in payload:
            waits.write(f"{time.time_ns() // 1000 - payload['at']}\n")

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
    match sys.argv[1:]:
        case ["work"]:
            uvloop.run(work())
        case ["serve"]:
            uvloop.run(work(writes_waits=True))
        case ["trickle", rate, seconds]:
            uvloop.run(trickle(float(rate), float(seconds)))
        case ["fill", tasks]:
            uvloop.run(fill(int(tasks)))
