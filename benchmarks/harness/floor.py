"""The floor of trickle: the exchanges of a single task with nothing else, by four processes of a few lines each.

    python -m benchmarks.harness.floor api 4711

The same statements on the same schema, the same calls to SQS over the same client, the same HTTP server and event loop:
what a task costs here is what its way through Postgres, SQS and processes that sleep costs. Nothing is checked, no
attempt is tried again, and a message that is lost stays lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvicorn

from benchmarks.harness.actions import CLOCK, now_us
from benchmarks.harness.connections import Connections
from benchmarks.harness.measure import Process, percentiles_ms, read_process
from benchmarks.harness.producers import LATENCY_CONNECTIONS, call_steadily
from benchmarks.harness.rig import Bench
from penstock.brokers.base import Message, Outgoing, Queue
from penstock.brokers.opening import create_queues, open_transport
from penstock.db.migrate import upgrade
from penstock.db.notify import CHANNEL, DUE
from penstock.db.pool import PLANNING
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from penstock.local.service import free_port
from penstock.local.sqs import REGION, EmbeddedSqs
from penstock.local.stack import DATABASE
from penstock.protocol.errors import StackError
from penstock.protocol.task import BEGINNING, PRIORITY_MAX, PRIORITY_MIN
from penstock.runtime.loop_thread import new_loop
from penstock.settings.model import Settings, load_settings

_PROCESSES = ("api", "scheduler", "worker", "resulter")
_AFTERWARDS_SECONDS = 2.0
_READY = b"ready\n"
_DELETED_AT_ONCE = 10
# All priorities, as the columns of a claim: the one of these tasks alone, those above and below it together.
_STRETCHES = [[1, 0, PRIORITY_MIN], [PRIORITY_MAX, 0, -1], [BEGINNING.run_at] * 3, [BEGINNING.id] * 3]


class _Params(msgspec.Struct):
    action: str
    payload: msgspec.Raw


class _Request(msgspec.Struct):
    id: int
    params: _Params


class _Task(msgspec.Struct):
    """A task in a message; as a result, with the start of its handler."""

    id: int
    claim: int
    at_us: int = 0


async def _api(settings: Settings, port: int) -> None:
    pool = await _pool(settings)

    async def answer(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        body = (await receive())["body"]
        request = msgspec.json.decode(body, type=_Request)
        payload = bytes(request.params.payload).decode()
        columns = [[request.params.action], [payload], [None], [None], [0], [10], [None]]
        ((task_id, _),) = await pool.fetch(SQL["enqueue_task_and_notify"], *columns, CHANNEL, DUE)
        said = msgspec.json.encode({"jsonrpc": "2.0", "result": {"id": task_id}, "id": request.id})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    config = uvicorn.Config(answer, lifespan="off", access_log=False, log_config=None, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port)) as listener:
        _say_ready()
        await server.serve(sockets=[listener])


async def _scheduler(settings: Settings, _port: int) -> None:
    pool = await _pool(settings)
    woken = asyncio.Event()
    listening = await asyncpg.connect(settings.require_database_url)
    await listening.add_listener(CHANNEL, lambda *_: woken.set())
    queue = _queue(settings, "outbound")
    sent: list[int] = []
    _say_ready()
    while True:
        await woken.wait()
        woken.clear()
        rows = await pool.fetch(SQL["claim_ready_tasks"], 100, None, *_STRETCHES, 0.0, sent)
        if rows:
            sent = [rows[0]["claim"]]
            tasks = [_Task(row["id"], row["claim"]) for row in rows]
            await queue.send([Outgoing(msgspec.json.encode(task).decode()) for task in tasks])


async def _worker(settings: Settings, _port: int) -> None:
    results = _queue(settings, "results")

    async def handle(tasks: Sequence[_Task]) -> None:
        for task in tasks:
            task.at_us = now_us()
        await results.send([Outgoing(msgspec.json.encode(task).decode()) for task in tasks])

    await _consume(_queue(settings, "outbound"), handle)


async def _resulter(settings: Settings, _port: int) -> None:
    pool = await _pool(settings)

    async def handle(tasks: Sequence[_Task]) -> None:
        columns = [
            [task.id for task in tasks], [task.claim for task in tasks], [str(task.at_us) for task in tasks],
            ["floor"] * len(tasks),
        ]  # fmt: skip
        await pool.fetch(SQL["finish_few_tasks"], *columns)

    await _consume(_queue(settings, "results"), handle)


async def _consume(queue: Queue, handle: Callable[[Sequence[_Task]], Coroutine[Any, Any, None]]) -> None:
    done: list[Message] = []
    _say_ready()
    while True:
        messages = await queue.receive(wait_seconds=20, visibility_seconds=60)
        if messages:
            await handle([msgspec.json.decode(message.body, type=_Task) for message in messages])
            done += messages
        if len(done) >= _DELETED_AT_ONCE:
            await queue.delete(done)
            done.clear()


async def _pool(settings: Settings) -> asyncpg.Pool[Any]:
    async def keep(_connection: object) -> None:
        """As of Penstock's own pools: nothing is left behind that a reset would have to undo."""

    return await asyncpg.create_pool(
        settings.require_database_url, min_size=1, max_size=4, server_settings=PLANNING, reset=keep
    )


def _queue(settings: Settings, label: str) -> Queue:
    name = {"outbound": settings.outbound_queue, "results": settings.results_queue}[label]
    return open_transport(settings).queue(name, label=label)


def _say_ready() -> None:
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()


async def trickle_floor(bench: Bench, rate: float, seconds: float) -> dict[str, Any]:
    """CPU per task above idle, the embedded SQS and the producer apart, and the time to the handler's start."""
    line = bench.progress.add_task(f"{bench.name}: the floor at {rate:g} a second", total=None)
    async with contextlib.AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="penstock-floor-")))
        postgres, sqs = EmbeddedPostgres(folder / "postgres"), EmbeddedSqs(folder / "sqs")
        for service in (postgres, sqs):
            held.callback(service.stop)
            await asyncio.to_thread(service.start)
        await asyncio.to_thread(postgres.create_database, DATABASE)
        url = postgres.dsn(DATABASE)
        await asyncio.to_thread(upgrade, url)
        environment = {
            "PENSTOCK_DATABASE_URL": url, "PENSTOCK_SQS_ENDPOINT_URL": sqs.url, "PENSTOCK_AWS_REGION": REGION,
            "PENSTOCK_SQS_ACCESS_KEY": f"{sqs.access_key_id}:penstock",
        }  # fmt: skip
        await create_queues(
            load_settings(
                database_url=url, sqs_endpoint_url=sqs.url, aws_region=REGION,
                sqs_access_key=environment["PENSTOCK_SQS_ACCESS_KEY"],
            )
        )  # fmt: skip
        port = free_port()
        pids = {name: await held.enter_async_context(_process(name, port, environment)) for name in _PROCESSES}
        assert postgres.pid is not None
        assert sqs.pid is not None
        services = {"postgres": postgres.pid, "sqs": sqs.pid}

        def read() -> dict[str, Process]:
            own = {name: read_process(pid, children=False) for name, pid in pids.items()}
            return own | {name: read_process(pid, children=True) for name, pid in services.items()}

        def used(before: dict[str, Process]) -> dict[str, float]:
            return {name: one.cpu_seconds - before[name].cpu_seconds for name, one in read().items()}

        loop = asyncio.get_running_loop()
        database = await asyncpg.connect(url)
        held.push_async_callback(database.close)
        async with Connections(f"http://127.0.0.1:{port}", LATENCY_CONNECTIONS) as connections:
            await call_steadily(connections, tasks=100, per_second=100.0)
            await asyncio.sleep(_AFTERWARDS_SECONDS)
            before, began = read(), loop.time()
            await asyncio.sleep(seconds / 2)
            idle = {name: cpu / (loop.time() - began) for name, cpu in used(before).items()}
            before, began = read(), loop.time()
            calls = await call_steadily(connections, tasks=round(rate * seconds), per_second=rate)
            await asyncio.sleep(_AFTERWARDS_SECONDS)
            took = loop.time() - began
            cpu = {name: all_of_it - idle[name] * took for name, all_of_it in used(before).items()}
        waits = await database.fetch(
            "select (result::text)::bigint - (payload ->> 'at')::bigint as us from penstock.task_history"
            " where action = $1 and id = any($2::bigint[]) order by id",
            CLOCK,
            [call.task_id for call in calls],
        )
    bench.progress.remove_task(line)
    if len(waits) != len(calls):
        raise StackError(f"the floor has settled {len(waits)} of {len(calls)} tasks")
    by_process = {name: round(one / len(calls) * 1e3, 3) for name, one in cpu.items()}
    return {
        "tasks": len(calls),
        "idle_cpu_percent_of_a_core": {name: round(share * 100, 3) for name, share in idle.items()},
        "cpu_ms": round(sum(ms for name, ms in by_process.items() if name != "sqs"), 3),
        "sqs_cpu_ms": by_process.pop("sqs"),
        "cpu_ms_by_process": by_process,
        "call_to_handler_start_ms": percentiles_ms([row["us"] / 1e6 for row in waits]),
    }


@contextlib.asynccontextmanager
async def _process(name: str, port: int, environment: dict[str, str]) -> AsyncIterator[int]:
    """One of the processes; its process id, once it is ready. Raises StackError."""
    command = (sys.executable, "-m", "benchmarks.harness.floor", name, str(port))
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        if await process.stdout.readline() != _READY:
            raise StackError(f"the {name} of the floor does not start; its output is above")
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main() -> None:
    """One process."""
    run = {"api": _api, "scheduler": _scheduler, "worker": _worker, "resulter": _resulter}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.floor", description=main.__doc__)
    parser.add_argument("name", choices=run)
    parser.add_argument("port", type=int, help="of the api")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run[args.name](load_settings(), args.port))


if __name__ == "__main__":
    main()
