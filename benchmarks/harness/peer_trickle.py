"""PgQueuer at a steady low rate, measured as trickle measures Penstock: worker, producer and Postgres."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Process, percentiles_ms, read_process
from benchmarks.harness.rig import STUCK_SECONDS, Bench
from benchmarks.peer_venv import SCRIPTS, make_venv
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import StackError

_DATABASE = "peer"
_AFTERWARDS_SECONDS = 2.0  # its completions are buffered


async def trickle_pgqueuer(bench: Bench, rate: float, seconds: float) -> dict[str, Any]:
    """CPU per task above idle, its producer included, and the time from the call to the handler's start."""
    python = await asyncio.to_thread(make_venv)
    line = bench.progress.add_task(f"{bench.name}: PgQueuer at {rate:g} a second", total=None)
    async with contextlib.AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="penstock-trickle-")))
        postgres = EmbeddedPostgres(folder / "postgres")
        held.callback(postgres.stop)
        await asyncio.to_thread(postgres.start)
        await asyncio.to_thread(postgres.create_database, _DATABASE)
        environment = os.environ | {
            "PEER_DATABASE_URL": postgres.dsn(_DATABASE), "PEER_SQS_URL": "", "PEER_FOLDER": str(folder),
            "PYTHONPATH": str(SCRIPTS),
        }  # fmt: skip
        script = (str(python), str(SCRIPTS / "peer_pgqueuer.py"))
        await _run(*script, "fill", "100", environment=environment)  # the tables, and a warm-up
        worker = await held.enter_async_context(_worker(*script, "serve", environment=environment))
        await _ready(folder, worker)
        (folder / "go").touch()
        await asyncio.sleep(_AFTERWARDS_SECONDS)

        def used(before: dict[str, Process]) -> dict[str, float]:
            return {name: one.cpu_seconds - before[name].cpu_seconds for name, one in read().items()}

        def read() -> dict[str, Process]:
            assert postgres.pid is not None
            return {
                "worker": read_process(worker.pid, children=False),
                "postgres": read_process(postgres.pid, children=True),
            }

        loop = asyncio.get_running_loop()
        before, began = read(), loop.time()
        await asyncio.sleep(seconds / 2)
        idle = {name: cpu / (loop.time() - began) for name, cpu in used(before).items()}
        before, began = read(), loop.time()
        produced = json.loads(await _run(*script, "trickle", f"{rate}", f"{seconds}", environment=environment))
        await asyncio.sleep(_AFTERWARDS_SECONDS)
        took = loop.time() - began
        cpu = {name: all_of_it - idle[name] * took for name, all_of_it in used(before).items()}
        waits = [int(text) / 1e6 for text in (folder / "waits").read_text("ascii").split()]
    bench.progress.remove_task(line)
    tasks = produced["tasks"]
    if len(waits) != tasks:
        raise StackError(f"PgQueuer has started {len(waits)} of {tasks} tasks")
    cpu["producer"] = produced["cpu_seconds"]
    by_process = {name: round(one / tasks * 1e3, 3) for name, one in cpu.items()}
    return {
        "tasks": tasks,
        "idle_cpu_percent_of_a_core": {name: round(share * 100, 3) for name, share in idle.items()},
        "cpu_ms": round(sum(by_process.values()), 3),
        "cpu_ms_by_process": by_process,
        "call_to_handler_start_ms": percentiles_ms(waits),
    }


@contextlib.asynccontextmanager
async def _worker(*command: str, environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    worker = await asyncio.create_subprocess_exec(*command, env=environment, stdout=sys.stderr)
    try:
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(15):
                await worker.wait()
        except TimeoutError:
            worker.kill()
            await worker.wait()


async def _ready(folder: Path, worker: asyncio.subprocess.Process) -> None:
    """Wait until the worker waits for the start. Raises StackError."""
    for _ in range(round(STUCK_SECONDS / 0.05)):
        if (folder / f"ready.{worker.pid}").exists():
            return
        if worker.returncode is not None:
            break
        await asyncio.sleep(0.05)
    raise StackError("the worker of PgQueuer did not get ready; its output is above")


async def _run(*command: str, environment: dict[str, str]) -> bytes:
    done = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    printed, _ = await done.communicate()
    if done.returncode:
        raise StackError(f"{' '.join(command[1:])} failed; its output is above")
    return printed
