"""Awa: queue-storage engine, filled by COPY; 2,048 worker slots over all processes (its best)."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

import awa
from barrier import DATABASE_URL, FILL_BATCH, note_start, stop_event, wait_for_go

CONNECTIONS = 20


@dataclass
class Noop:
    n: int


async def fill(tasks: int) -> None:
    client = awa.AsyncClient(DATABASE_URL, max_connections=CONNECTIONS)
    await client.migrate()
    # A new installation's first worker would switch to the queue-storage engine; COPY needs it before.
    transaction = await client.transaction()
    await transaction.fetch_one("select awa.storage_auto_finalize_if_fresh('awa') as done")
    await transaction.commit()
    for first in range(0, tasks, FILL_BATCH):
        await client.enqueue_many_copy([Noop(n) for n in range(first, min(first + FILL_BATCH, tasks))], queue="bench")
    await client.close()


async def work(slots: int) -> None:
    client = awa.AsyncClient(DATABASE_URL, max_connections=CONNECTIONS)

    @client.task(Noop, queue="bench")
    async def noop(job):  # type: ignore[no-untyped-def]
        note_start()

    stop = stop_event()
    await wait_for_go()
    await client.start([("bench", slots)])
    await stop.wait()
    await client.shutdown(timeout_ms=2000)
    await client.close()


if __name__ == "__main__":
    asyncio.run(work(int(sys.argv[2])) if sys.argv[1] == "work" else fill(int(sys.argv[2])))
