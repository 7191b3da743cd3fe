"""An adapter of Penstock for the harness hardbyte/postgresql-job-queue-benchmarking: JSON lines on standard output.

It starts a stack with `penstock up` on the database that the harness made, enqueues over HTTP in batches at the rate
that the harness asks for, and reports rates, depths and latencies each SAMPLE_EVERY_S. README.md says how to use it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import asyncpg
from hdrh.histogram import HdrHistogram

from benchmarks.neutral.handlers import TIMES
from penstock import AsyncClient

_HERE = Path(__file__).parent
_MANIFEST = json.loads((_HERE / "adapter.json").read_text("utf-8"))
_WINDOW_SECONDS = 30
_HIGHEST_US = 3_600_000_000
_DEPTH = "select count(*) from penstock.task where state in ('SCHEDULED', 'ERROR') and run_at <= now()"
_COMPLETED = "select coalesce(sum(count), 0)::bigint from penstock.tally where event = 'SUCCESS'"


@dataclass(frozen=True)
class Options:
    """What the harness asks for by environment variables."""

    database_url: str
    mode: str
    rate: float
    rate_file: str | None
    batch_max: int
    batch_seconds: float
    target_depth: int
    workers: int
    payload_bytes: int
    sample_seconds: float

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Options:
        if env.get("SCENARIO", "long_horizon") != "long_horizon":
            raise SystemExit(f"SCENARIO {env['SCENARIO']!r} is not supported; there is long_horizon")
        if not env.get("DATABASE_URL"):
            raise SystemExit("DATABASE_URL is not set")
        return cls(
            database_url=env["DATABASE_URL"],
            mode=env.get("PRODUCER_MODE", "fixed"),
            rate=float(env.get("PRODUCER_RATE", "800")),
            rate_file=env.get("PRODUCER_RATE_CONTROL_FILE"),
            batch_max=int(env.get("PRODUCER_BATCH_MAX", "128")),
            batch_seconds=float(env.get("PRODUCER_BATCH_MS", "10")) / 1000,
            target_depth=int(env.get("TARGET_DEPTH", "1000")),
            workers=int(env.get("WORKER_COUNT", "32")),
            payload_bytes=int(env.get("JOB_PAYLOAD_BYTES", "256")),
            sample_seconds=float(env.get("SAMPLE_EVERY_S", "5")),
        )

    def rate_now(self) -> float:
        """The rate of this moment: the harness changes it in a file, for bursts."""
        if self.rate_file is None:
            return self.rate
        try:
            return float(Path(self.rate_file).read_text("utf-8"))
        except (OSError, ValueError):
            return self.rate


class Pace:
    """How many tasks are due, credited by the clock: a slow batch is followed by larger ones."""

    def __init__(self, now: float) -> None:
        self._credit = 0.0
        self._at = now

    def due(self, rate: float, now: float, most: int) -> int:
        """The whole tasks that are due now, at most `most`; the rest stays credited, for a second's worth at most."""
        self._credit = min(self._credit + rate * (now - self._at), max(rate, 1.0))
        self._at = now
        count = min(most, int(self._credit))
        self._credit -= count
        return count


class Latencies:
    """Percentiles of the last 30 seconds in bounded memory: a histogram of three digits for each second."""

    def __init__(self) -> None:
        self._seconds: dict[int, HdrHistogram] = {}

    def add(self, seconds: float, now: float) -> None:
        histogram = self._seconds.get(int(now))
        if histogram is None:
            histogram = self._seconds[int(now)] = HdrHistogram(1, _HIGHEST_US, 3)
            for second in [second for second in self._seconds if second <= now - _WINDOW_SECONDS]:
                del self._seconds[second]
        histogram.record_value(min(_HIGHEST_US, max(1, int(seconds * 1_000_000))))

    def percentiles(self, now: float) -> dict[str, float]:
        """Milliseconds by p50, p95 and p99, zero without a sample."""
        window = HdrHistogram(1, _HIGHEST_US, 3)
        for second, histogram in self._seconds.items():
            if second > now - _WINDOW_SECONDS:
                window.add(histogram)
        return {f"p{rank}": window.get_value_at_percentile(rank) / 1000 for rank in (50, 95, 99)}


@dataclass
class Counts:
    """What the parts of the adapter share."""

    enqueued: int = 0
    target_rate: float = 0.0
    latencies: dict[str, Latencies] = field(
        default_factory=lambda: {name: Latencies() for name in ("producer", "claim", "end_to_end")}
    )


class _Times(asyncio.DatagramProtocol):
    """Times from handlers."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def datagram_received(self, data: bytes, addr: object) -> None:
        now = time.monotonic()
        for start, end in TIMES.iter_unpack(data):
            self._counts.latencies["claim"].add(start, now)
            self._counts.latencies["end_to_end"].add(end, now)


def emit(record: Mapping[str, object]) -> None:
    print(json.dumps({**record, "instance_id": int(os.environ.get("BENCH_INSTANCE_ID", "0"))}), flush=True)


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@asynccontextmanager
async def stack(options: Options, folder: str) -> AsyncIterator[str]:
    """`penstock up` with two workers on the given database; gives the api's URL."""
    env = dict(
        os.environ,
        PENSTOCK_WORKER_CONCURRENCY=str(max(1, options.workers // 2)),
        PENSTOCK_BENCH_SOCKET=f"{folder}/times",
        PYTHONPATH=str(_HERE.parents[1]),
    )
    command = [sys.executable, "-m", "penstock"]
    up = [
        *command, "up", "--detach", "--data-dir", f"{folder}/stack", "--database-url", options.database_url,
        "--app", "benchmarks.neutral.handlers", "--workers", "2",
    ]  # fmt: skip
    await _run(up, env)
    try:
        listed = json.loads(await _run([*command, "ps", "--json", "--data-dir", f"{folder}/stack"], env))
        yield listed["api"]
    finally:
        await _run([*command, "down", "--data-dir", f"{folder}/stack"], env)


async def _run(command: list[str], env: Mapping[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[2:4])} ended with {process.returncode}: {output.decode()}")
    return output.decode()


async def produce(options: Options, counts: Counts, api_url: str, database: asyncpg.Pool) -> None:
    pace = Pace(time.monotonic())
    padding = "x" * max(0, options.payload_bytes - 48)
    async with AsyncClient(api_url) as client:
        while True:
            counts.target_rate = options.rate_now()
            if options.mode == "depth-target":
                count = max(0, min(options.batch_max, options.target_depth - await database.fetchval(_DEPTH)))
            else:
                count = pace.due(counts.target_rate, time.monotonic(), options.batch_max)
            if count:
                began = time.monotonic()
                at = time.time()
                try:
                    await client.enqueue_many(
                        {"action": "bench", "payload": {"at": at, "padding": padding}} for _ in range(count)
                    )
                except Exception as error:
                    print(f"enqueue failed, next try in a moment: {error}", file=sys.stderr)
                    await asyncio.sleep(0.2)
                    continue
                counts.enqueued += count
                counts.latencies["producer"].add((time.monotonic() - began) / count, time.monotonic())
            await asyncio.sleep(options.batch_seconds)


async def sample(options: Options, counts: Counts, database: asyncpg.Pool) -> None:
    every = options.sample_seconds
    await asyncio.sleep(every - time.time() % every)
    enqueued, completed, at = counts.enqueued, await database.fetchval(_COMPLETED), time.monotonic()
    while True:
        await asyncio.sleep(every - time.time() % every)
        try:
            depth, done = await database.fetchval(_DEPTH), await database.fetchval(_COMPLETED)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            print(f"no sample: {error}", file=sys.stderr)
            continue
        now = time.monotonic()
        values = {
            f"{name}_{rank}_ms": (value, _WINDOW_SECONDS)
            for name, latencies in counts.latencies.items()
            for rank, value in latencies.percentiles(now).items()
        }
        values["enqueue_rate"] = ((counts.enqueued - enqueued) / (now - at), every)
        values["completion_rate"] = ((done - completed) / (now - at), every)
        if os.environ.get("BENCH_INSTANCE_ID", "0") == "0":
            values["queue_depth"] = (depth, 0)
            values["producer_target_rate"] = (counts.target_rate, 0)
        for metric, (value, window) in values.items():
            emit({
                "t": _utc(), "system": _MANIFEST["system"], "kind": "adapter", "subject_kind": "adapter", "subject": "",
                "metric": metric, "value": round(value, 3), "window_s": window,
            })  # fmt: skip
        enqueued, completed, at = counts.enqueued, done, now


async def main() -> None:
    options = Options.read(os.environ)
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        loop = asyncio.get_running_loop()
        running = asyncio.current_task()
        assert running is not None
        for stop in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(stop, running.cancel)
        await loop.create_datagram_endpoint(lambda: _Times(counts), local_addr=f"{folder}/times", family=socket.AF_UNIX)
        with suppress(asyncio.CancelledError):
            async with (
                stack(options, folder) as api_url,
                asyncpg.create_pool(options.database_url, min_size=1, max_size=2) as database,
            ):
                emit({
                    "kind": "descriptor", "system": _MANIFEST["system"], "event_tables": _MANIFEST["event_tables"],
                    "extensions": _MANIFEST["extensions"], "version": version("penstock"),
                    "schema_version": await database.fetchval("select version_num from penstock.alembic_version"),
                    "db_name": options.database_url.rsplit("/", 1)[-1], "started_at": _utc(),
                })  # fmt: skip
                async with asyncio.TaskGroup() as group:
                    group.create_task(produce(options, counts, api_url, database), name="produce")
                    group.create_task(sample(options, counts, database), name="sample")


if __name__ == "__main__":
    asyncio.run(main())
