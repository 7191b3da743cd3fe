"""The rig of a benchmark: a stack of its own, a connection to watch it, its processes to read, pause and profile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from rich.progress import Progress

from benchmarks.harness.actions import APP, STARTS
from benchmarks.harness.measure import Pages, Usage, cost, read_usage, seconds_to_look, work_by_name
from benchmarks.harness.profile import Profiler
from penstock.brokers.sqs import SqsTransport
from penstock.db.pool import Store
from penstock.local.children import Output
from penstock.local.stack import DATABASE, Stack
from penstock.protocol.errors import StackError
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings
from tests import postgres_versions

STUCK_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_QUEUES = ("inbound", "outbound", "results")


@dataclass(frozen=True)
class Options:
    """Options of a scenario.

    tasks: how many. workers, schedulers: processes. seconds: how long, for scenarios that last. rates: enqueues a
    second. rows: how many rows are to be in the way. sqs_endpoint_url: instead of the embedded SQS. pooler: whether
    PgBouncer stands before Postgres. profile: folder for profiles. peers: measure other task queues too, where the
    scenario does.
    """

    tasks: int
    workers: int = 1
    schedulers: int = 1
    seconds: float = 10.0
    rates: tuple[float, ...] = ()
    rows: int = 0
    sqs_endpoint_url: str | None = None
    pooler: bool = False
    profile: Path | None = None
    peers: bool = True


@dataclass
class Bench:
    """What every scenario is given: its options, and where to show how far it is.

    rigs: where its rigs come from. settings: what the processes run with, once a rig is up.
    """

    name: str
    options: Options
    progress: Progress
    rigs: Rigs
    settings: Settings | None = None

    def bar(self, text: str, total: int) -> Callable[[int], None]:
        """A new line on the display; the function returned moves it on."""
        line = self.progress.add_task(f"{self.name}: {text}", total=total)
        return lambda count: self.progress.advance(line, count)


@dataclass(frozen=True)
class Served:
    """A database for the run. url: of Postgres itself. used_url: for the processes. pids: by name."""

    url: str
    used_url: str
    pids: Mapping[str, int]


class Rig:
    """A running stack under measurement; made by :func:`rig_up`."""

    def __init__(
        self, bench: Bench, stack: Stack, served: Served, database: asyncpg.Pool[Any], output: Output, folder: Path
    ) -> None:
        self.bench = bench
        self._folder = folder
        self.stack = stack
        self._served = served
        self.database = database
        self.store = Store(served.url, application_name="penstock-bench")
        self._output = output
        self._pages = Pages()
        self._profiler: Profiler | None = None
        self._before: Usage | None = None
        self._paused: dict[str, int] = {}
        self._measurements = 0
        self.began = 0.0
        self._began_ns = 0
        self.work: dict[str, Any] = {}  # by name, of the last measurement

    @property
    def settings(self) -> Settings:
        return self.stack.settings

    @property
    def api(self) -> str:
        url: str = self.stack.state()["api"]
        return url

    def processes(self) -> list[dict[str, Any]]:
        """Those of the stack, as ``penstock ps --json`` prints them, and what serves the database."""
        named = ({"name": name, "pid": pid, "metrics": None} for name, pid in self._served.pids.items())
        return [*self.stack.state()["processes"], *named]

    # Measuring

    async def begin(self) -> None:
        """Take the readings from which the cost is counted, and start the clock."""
        self._before = await read_usage(self.processes(), self.database, self._pages)
        self._measurements += 1
        if self.bench.options.profile is not None:
            prefix = f"{self.bench.name}-{self._measurements}"
            self._profiler = Profiler(self.bench.options.profile, prefix)
            self._profile(lambda name: name not in self._paused)
        self.began, self._began_ns = time.perf_counter(), time.time_ns()

    async def end(self, tasks: int) -> dict[str, Any]:
        """The cost since ``begin``, as for so many tasks. Raises StackError when a process died in between."""
        assert self._before is not None
        if self._profiler is not None:
            await asyncio.to_thread(self._profiler.stop)
            self._profiler = None
        after = await read_usage(self.processes(), self.database, self._pages)
        before, self._before = self._before, None
        self.work = work_by_name(before, after, tasks)
        return cost(before, after, tasks)

    def seconds(self) -> float:
        """Since ``begin``."""
        return time.perf_counter() - self.began

    def seconds_to_first_call(self) -> float | None:
        """From ``begin`` to the first call of a no-op handler; None where a worker had run one before."""
        starts = [int(path.read_text()) for path in self._folder.glob("first.*")]
        return (min(starts) - self._began_ns) / 1e9 if starts and min(starts) >= self._began_ns else None

    def _profile(self, wanted: Callable[[str], bool]) -> None:
        if self._profiler is not None:
            self._profiler.start([entry for entry in self.processes() if wanted(entry["name"])])

    @contextlib.asynccontextmanager
    async def schedulers_paused(self) -> AsyncIterator[None]:
        """Nothing starts inside. ``begin`` may be called as the last thing in it, so that the fill is not counted."""
        schedulers = [entry for entry in self.processes() if entry["name"].startswith("scheduler")]
        await self._pages.keep(schedulers)
        try:
            for entry in schedulers:
                os.kill(entry["pid"], signal.SIGSTOP)
                self._paused[entry["name"]] = entry["pid"]
            yield
        finally:
            paused = dict(self._paused)
            for pid in paused.values():
                os.kill(pid, signal.SIGCONT)
            self._paused.clear()
            self._pages.forget()
        self._profile(lambda name: name in paused)  # only now, since a stopped process cannot be attached to

    # Watching

    async def count(self, *events: str, action: str | None = None) -> int:
        """Tasks that became so, by the counts that Penstock keeps of its own events."""
        counted: int = await self.database.fetchval(
            "select coalesce(sum(count), 0)::bigint from penstock.tally"
            " where event = any($1::text[]) and ($2::text is null or action = $2)",
            list(events), action,
        )  # fmt: skip
        return counted

    async def settled(self) -> int:
        """Tasks that have come to their end since the database was made."""
        return await self.count("SUCCESS", "CRITICAL_ERROR")

    async def wait_count(self, event: str, action: str, total: int) -> None:
        """Wait until so many tasks of an action became so."""
        while await self.count(event, action=action) < total:  # noqa: ASYNC110 (another process does it)
            await asyncio.sleep(_LOOK_SECONDS)

    async def wait_settled(self, total: int, text: str = "settling") -> None:
        """Wait until so many tasks in all have come to their end. Raises StackError when nothing moves for a minute."""
        start = await self.settled()
        advance = self.bench.bar(text, total - start)
        done, began = start, time.monotonic()
        moved = began
        while done < total:
            await asyncio.sleep(seconds_to_look(done - start, total - start, time.monotonic() - began))
            now = await self.settled()
            if now > done:
                advance(now - done)
                done, moved = now, time.monotonic()
            elif time.monotonic() - moved > STUCK_SECONDS:
                raise StackError(
                    f"only {done - start} of {total - start} tasks settled, then nothing moved for {STUCK_SECONDS:g} s;"
                    f" what the processes said last:\n{self.last_words()}"
                )

    async def last_id(self) -> int:
        """The highest task id given out so far; tasks of a measurement lie above the one before it."""
        last: int = await self.database.fetchval(
            "select case when is_called then last_value else last_value - 1 end from penstock.task_id_seq"
        )
        return last

    async def settle_disk(self, table: str) -> None:
        """Clean up after a bulk load and write it out, so that neither happens within the measurement."""
        await self.database.execute(f"vacuum (analyze) penstock.{table}", timeout=600)
        await self.database.execute("checkpoint", timeout=600)

    def last_words(self) -> str:
        """The last lines of every process that has said anything."""
        names: Sequence[str] = [entry["name"] for entry in self.processes()]
        said = ((name, self._output.recent(name)) for name in names)
        return "\n".join(f"{name}:\n{lines}" for name, lines in said if lines) or "nothing"

    async def close(self) -> None:
        if self._profiler is not None:
            await asyncio.to_thread(self._profiler.stop)
        await self.store.close()
        await self.database.close()


class Rigs:
    """Brings up rigs; where they are shared, each stays until ``close`` for all who want the same processes."""

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._held = contextlib.AsyncExitStack()
        self._kept: dict[tuple[int, int], Rig] = {}

    @contextlib.asynccontextmanager
    async def take(self, bench: Bench, workers: int, schedulers: int) -> AsyncIterator[Rig]:
        if not self._shared:
            async with _new_rig(bench, workers, schedulers) as rig:
                yield rig
            return
        kept = self._kept.get((workers, schedulers))
        if kept is None:
            kept = await self._held.enter_async_context(_new_rig(bench, workers, schedulers))
            self._kept[workers, schedulers] = kept
        kept.bench = bench
        yield kept

    async def close(self) -> None:
        await self._held.aclose()


@contextlib.asynccontextmanager
async def rig_up(bench: Bench, *, workers: int | None = None, schedulers: int | None = None) -> AsyncIterator[Rig]:
    """A running stack; its counts may not begin at nothing, since it may be shared.

    workers, schedulers: None takes those of the options. PENSTOCK_* settings of the caller apply.
    """
    options = bench.options
    wanted = options.workers if workers is None else workers, options.schedulers if schedulers is None else schedulers
    async with bench.rigs.take(bench, *wanted) as rig:
        bench.settings = rig.settings
        yield rig


@contextlib.asynccontextmanager
async def _new_rig(bench: Bench, workers: int, schedulers: int) -> AsyncIterator[Rig]:
    """Bring up a stack in a folder of its own, and take everything down again."""
    outside = bench.options.sqs_endpoint_url
    line = bench.progress.add_task(f"{bench.name}: starting", total=None)
    async with contextlib.AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        served = held.enter_context(_database(folder, pooler=bench.options.pooler))
        held.enter_context(_environment({**_variables(outside, served), STARTS: str(folder)}))
        output = Output(held.enter_context((folder / "bench.log").open("wb")), colour=False)
        stack = Stack(
            folder, port=0, workers=workers, schedulers=schedulers, apps=[APP], database_url=served.used_url,
            sqs_endpoint_url=outside, output=output,
        )  # fmt: skip
        async with contextlib.AsyncExitStack() as running:
            running.push_async_callback(stack.stop)
            await stack.start()
            bench.progress.remove_task(line)
            database = await asyncpg.create_pool(served.url, min_size=1, max_size=4, reset=_no_reset)
            rig = Rig(bench, stack, served, database, output, folder)
            try:
                yield rig
            finally:
                await rig.close()
                queues = stack.state()["queues"] if outside else {}
        await _delete_queues(stack.settings, queues)


@contextlib.contextmanager
def _database(folder: Path, *, pooler: bool) -> Iterator[Served]:
    """A database on a server of the version that PG names. pooler: the processes reach it through PgBouncer."""
    server = postgres_versions.server(folder / "postgres")
    server.start()
    with contextlib.ExitStack() as held:
        held.callback(server.stop)
        server.create_database(DATABASE)
        url = used_url = server.dsn(DATABASE)
        assert server.pid is not None
        pids = {"postgres": server.pid}
        if pooler:
            from tests.pgbouncer import pgbouncer_before, through

            before = held.enter_context(pgbouncer_before(server.dsn(), default_pool_size="40", server_round_robin="0"))
            pids["pgbouncer"] = before.pid
            used_url = through(url, before.port)
        yield Served(url, used_url, pids)


async def _no_reset(_connection: Any) -> None:
    """Nothing that these statements do outlives them, so the round trip is saved."""


def _variables(sqs_endpoint_url: str | None, served: Served) -> Mapping[str, str]:
    found = {"PENSTOCK_API_KEYS": "", "PENSTOCK_HTTP_HOST": "127.0.0.1", "PENSTOCK_DATABASE_LISTEN_URL": ""}
    if served.used_url != served.url:  # as recommended: wake-ups pass the pooler
        found["PENSTOCK_DATABASE_LISTEN_URL"] = served.url
    found["PENSTOCK_LOG_LEVEL"] = os.environ.get("PENSTOCK_LOG_LEVEL", "warning")
    if sqs_endpoint_url:
        # What an earlier run has left in queues of the same name would be taken for this run's.
        run = secrets.token_hex(4)
        found |= {f"PENSTOCK_{name.upper()}_QUEUE": f"penstock-bench-{run}-{name}" for name in _QUEUES}
    return found


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def _delete_queues(settings: Settings, queues: Mapping[str, str]) -> None:
    if not queues:
        return
    transport = SqsTransport(settings)
    try:
        client = await transport.client()
        for url in queues.values():
            await client.delete_queue(QueueUrl=url)
            await client.delete_queue(QueueUrl=url + DEAD_LETTER_SUFFIX)
    finally:
        await transport.close()
