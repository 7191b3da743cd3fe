"""Handlers in child processes: what crosses the boundary, and the outcome of a task whose child ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.protocol.message_attributes import encode_tenants
from penstock.protocol.output import decode_entries
from penstock.protocol.reports import Failed, Output, Stepped, Succeeded, Suspended
from penstock.protocol.requests import encode_call, join_batch
from penstock.runtime.periodic import Pauses
from penstock.runtime.tracing import active
from penstock.runtime.tracing.spans import Spans
from penstock.settings.model import Settings
from penstock.worker.handlers.actions import REGISTRY, Registry, load_app
from penstock.worker.handlers.lifespan import LIFESPANS
from penstock.worker.process import Worker
from penstock.worker.processes.channel import Child, Ended, frame
from penstock.worker.processes.pool import ProcessPool
from tests.claims import claim_id, pack_id
from tests.docs_blocks import all_blocks
from tests.integration.worker.test_worker import Bench, eventually, running

MEMORY_BYTES = 256 * 2**20
APP = "tests.integration.worker.process_app"


@pytest.fixture(scope="module", autouse=True)
def _only_here() -> Iterator[None]:
    """The handlers of the module, for the tests of this file alone: one asks for a lifespan that others do not have."""
    handlers, lifespans = dict(REGISTRY), dict(LIFESPANS)
    load_app(APP)
    yield
    for table, before in ((REGISTRY, handlers), (LIFESPANS, lifespans)):
        table.clear()
        table.update(before)  # type: ignore[arg-type]


@pytest.fixture
def database_url() -> str:
    """No test here touches Postgres."""
    return "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
def bench(outbound: SqsQueue, results: SqsQueue, settings: Settings) -> Bench:
    return Bench(outbound, results, settings, REGISTRY)


@asynccontextmanager
async def working(
    bench: Bench, registry: Registry = REGISTRY, apps: Sequence[str] = (APP,), **changes: Any
) -> AsyncIterator[Worker]:
    """A worker with two children that takes what comes."""
    settings = bench.settings.model_copy(update={"worker_processes": 2, **changes})
    worker = Worker(
        outbound=bench.outbound, results=bench.results, settings=settings, registry=registry, apps=apps,
    )  # fmt: skip

    async def take() -> None:
        while True:
            await worker.run_once()

    async with running(worker):
        taking = asyncio.create_task(take())
        try:
            yield worker
            await asyncio.wait_for(worker.settle(), 30)
            assert (await bench.outbound.depth()).total == 0
        finally:
            taking.cancel()


async def send(bench: Bench, *calls: tuple[str, dict[str, Any]], first: int = 1) -> None:
    """Each in a message of its own."""
    report = await bench.outbound.send(
        [Outgoing(encode_call(n, 1, name, json.dumps(params))) for n, (name, params) in enumerate(calls, first)]
    )
    assert report.failed == []


def error_of(outcome: Any) -> dict[str, Any]:
    assert isinstance(outcome, Failed), outcome
    data: dict[str, Any] = json.loads(outcome.error)["data"]
    return data


def result_of(outcome: Any) -> Any:
    assert isinstance(outcome, Succeeded), outcome
    return json.loads(outcome.result)


async def test_a_child_that_has_settled_its_task_sends_no_result(bench: Bench) -> None:
    await send(bench, ("record", {"holds": True}), ("record", {"holds": False}), ("plain", {"number": 3}))
    async with working(bench):
        outcomes = await bench.outcomes(1)
    assert outcomes.keys() == {3}


async def test_what_children_log_and_emit_is_reported_also_before_a_crash(bench: Bench) -> None:
    await send(bench, ("write", {}), ("write", {"crashes": True}))
    async with working(bench):
        await bench.outcomes(2)
    for task_id in (1, 2):
        parts = [one for one in bench.reports if isinstance(one, Output) and one.task_id == task_id]
        entries = [entry for part in parts for entry in decode_entries(part.entries)]
        assert [entry.text or bytes(entry.chunk) for entry in entries] == ["logged", b'{"chunk":true}', "printed"]
        assert [part.number for part in parts] == [1_000_001 + place for place in range(len(parts))]


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 96 MiB, of either version; skipped where none can be made."""
    root, limit = Path("/sys/fs/cgroup"), "memory.max"
    if (root / "memory").is_dir():
        root, limit = root / "memory", "memory.limit_in_bytes"
    group = root / f"penstock-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(96 * 2**20), "ascii")
    except OSError as exc:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {exc}")
    yield group
    with suppress(OSError):
        group.rmdir()


async def test_a_child_that_the_kernel_kills_for_its_memory_fails_its_task_with_its_peak(
    bench: Bench, memory_group: Path
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("plain", {"number": n}) for n in range(4)]
    calls.insert(1, ("exhaust_group", {"members": str(memory_group / "cgroup.procs")}))
    await send(bench, *calls)
    async with working(bench):
        outcomes = await bench.outcomes(5)
    error = error_of(outcomes[2])
    assert (error["type"], error["signal"]) == ("ProcessDied", "SIGKILL")
    assert 48 * 2**20 < error["peak_rss_bytes"] < 300 * 2**20
    assert "SIGKILL, peak RSS" in error["message"]
    assert all(isinstance(outcome, Succeeded) for task_id, outcome in outcomes.items() if task_id != 2)


async def test_faults_are_injected_in_children_too(bench: Bench) -> None:
    await send(bench, *(("plain", {"number": n}) for n in range(3)))
    async with working(bench, chaos_handler=1.0):
        outcomes = await bench.outcomes(3)
    assert {error_of(outcome)["type"] for outcome in outcomes.values()} == {"InjectedFault"}


async def test_children_that_crash_hang_and_exhaust_memory_fail_their_own_task_alone(bench: Bench) -> None:
    bad = [
        ("segfault", {}), ("leave", {"code": 7}), ("hang", {}), ("exhaust", {}), ("hang_on_loop", {}), ("sleep", {}),
    ]  # fmt: skip
    calls = [("plain", {"number": n}) for n in range(60)]
    for position, call in enumerate([*bad, ("segfault", {}), ("hang", {}), ("exhaust", {})]):
        calls.insert(position * 6, call)
    await send(bench, *calls)
    async with working(bench, process_max_memory_bytes=MEMORY_BYTES):
        outcomes = await bench.outcomes(len(calls))
    errors: dict[str, dict[str, Any]] = {}
    for task_id, (name, params) in enumerate(calls, 1):
        if name == "plain":
            assert result_of(outcomes[task_id])["number"] == params["number"]
        else:
            errors[name] = error_of(outcomes[task_id])
    assert {name: error["type"] for name, error in errors.items()} == {
        "segfault": "ProcessDied", "leave": "ProcessDied", "hang": "TaskTimeout", "exhaust": "MemoryError",
        "hang_on_loop": "TaskTimeout", "sleep": "TaskTimeout",
    }  # fmt: skip
    died = errors["segfault"]
    assert (died["signal"], died.get("exit_code")) == ("SIGSEGV", None)
    assert died["peak_rss_bytes"] > 2**20
    assert "SIGSEGV" in died["message"]
    assert (errors["leave"].get("signal"), errors["leave"]["exit_code"], errors["leave"]["max_attempts"]) == (
        None,
        7,
        3,
    )
    assert "time.sleep(600)" in errors["hang"]["traceback"]
    assert errors["hang_on_loop"]["signal"] == "SIGKILL"  # it could not stop the handler


async def test_progress_cancellation_logs_and_decisions_cross_the_boundary(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    await bench.send(encode_call(1, 1, "plain", '{"number":1}'), **encode_tenants([(1, "acme")]))
    decisions = ["retry", "fail", "other"]
    await send(bench, *(("decide", {"what": what}) for what in decisions), ("plain", {"number": "x"}), first=2)

    def noted(note: str) -> bool:
        return any(note in (sign.detail or "") for sign in bench.signs(6))

    async with working(bench) as worker:
        outcomes = await bench.outcomes(5)
        await send(bench, ("talk", {}), first=6)
        await bench.until(lambda: bench.signs(6), "progress")
        (attempt,) = worker._runner.attempts()
        attempt.lease.lost = True
        await bench.until(lambda: noted("lease lost"), "the lease to be lost")
        attempt.lease.lost = False  # else its message is left alone
        worker._runner.lose(attempt)
        await bench.until(lambda: noted("cancelled True"), "the cancellation")
    assert result_of(outcomes[1])["tenant"] == "acme"
    assert result_of(outcomes[1])["pid"] != os.getpid()
    assert error_of(outcomes[2])["retry_after"] == 30
    assert error_of(outcomes[3])["final"] is True
    lookup = error_of(outcomes[4])
    assert lookup["type"] == "LookupError"
    assert "raise LookupError(what)" in lookup["traceback"]
    assert error_of(outcomes[5])["type"] == "BadParams"
    notes = [json.loads(sign.detail) for sign in bench.signs(6) if sign.detail]
    assert [*dict.fromkeys(note["percent"] for note in notes)] == [40, 50, 60]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "a line of the child" in line]
    assert "task_id=6" in line
    assert "action=talk" in line


async def test_what_a_call_left_running_in_its_child_does_not_harm_the_next_one(bench: Bench) -> None:
    await send(bench, ("leave_running", {}), ("plain", {"number": 2, "seconds": 0.5}))
    async with working(bench, worker_processes=1):
        outcomes = await bench.outcomes(2)
    assert result_of(outcomes[1]) is None
    assert result_of(outcomes[2])["number"] == 2
    assert not [one for one in bench.reports if isinstance(one, Output | Stepped)]


async def test_what_a_child_spawns_is_not_lost_where_its_results_are_equal(bench: Bench) -> None:
    calls = [encode_call(n, 7, "spread", "{}", claim_id=claim_id(n, 7)) for n in range(1, 11)]
    report = await bench.outbound.send([Outgoing(join_batch(calls), {"pack": pack_id(7, range(1, 11))})])
    assert report.failed == []
    async with working(bench):
        outcomes = await bench.outcomes(10)
    assert {one.spawn for one in outcomes.values() if isinstance(one, Succeeded)} == {
        '[{"action":"plain","payload":{"number":1}}]'
    }
    assert sorted(outcomes) == [*range(1, 11)]


async def test_a_result_counts_whose_child_died_behind_it(bench: Bench) -> None:
    await send(bench, ("die_behind_answer", {}))
    async with working(bench):
        outcomes = await bench.outcomes(1)
    assert result_of(outcomes[1]) == "done"


async def test_a_result_counts_whose_child_hangs_behind_it(bench: Bench) -> None:
    await send(bench, ("hang_behind_answer", {}))
    async with working(bench):
        outcomes = await bench.outcomes(1)
    assert result_of(outcomes[1]) == "done"


async def test_a_batch_whose_child_dies_is_run_task_by_task_to_find_the_one_at_fault(bench: Bench) -> None:
    await send(bench, *(("many", {"n": n, "poison": int(n == 2)}) for n in range(5)))
    async with working(bench):
        outcomes = await bench.outcomes(5)
    failed = [task_id for task_id, outcome in outcomes.items() if isinstance(outcome, Failed)]
    # The early answers were sent before their child died.
    assert failed in ([3], [])
    assert all(error_of(outcomes[task_id])["signal"] == "SIGKILL" for task_id in failed)
    assert result_of(outcomes[1]) == "early"


async def test_two_messages_of_one_claim_in_a_batch_are_both_deleted(bench: Bench) -> None:
    """A send whose answer is lost is repeated, though the queue has the first message."""
    await send(bench, ("many", {"n": 1}))
    await send(bench, ("many", {"n": 1}), ("many", {"n": 2}))
    async with working(bench, worker_processes=1):  # which ends with an empty queue
        await bench.until(
            lambda: {one.task_id for one in bench.reports if isinstance(one, Succeeded)} == {1, 2}, "both"
        )


async def test_children_are_replaced_after_so_many_tasks_and_above_their_memory(bench: Bench) -> None:
    await send(bench, *[("plain", {"number": n}) for n in range(6)])
    async with working(bench, worker_processes=1, process_recycle_after=3, process_max_memory_bytes=MEMORY_BYTES):
        outcomes = await bench.outcomes(6)
        runs = Counter(result_of(outcome)["pid"] for outcome in outcomes.values())
        assert sorted(runs.values()) == [3, 3]
        bench.reports.clear()
        await send(bench, ("grow", {"megabytes": 280}), first=10)
        grown = result_of((await bench.outcomes(1))[10])
        bench.reports.clear()
        await send(bench, ("plain", {"number": 1}), first=11)
        assert result_of((await bench.outcomes(1))[11])["pid"] != grown


async def test_a_child_ends_though_its_handler_left_a_call_running_in_a_thread(bench: Bench) -> None:
    await send(bench, ("leave_thread", {}))
    async with working(bench, worker_processes=1, process_recycle_after=1) as worker:
        pool = worker._processes
        assert pool is not None
        pid = result_of((await bench.outcomes(1))[1])

        async def has_ended() -> bool:
            return pid not in pool._children

        await eventually(has_ended, "the end of the child")


async def test_killed_children_and_a_killed_fork_server_lose_no_task(bench: Bench) -> None:
    count = 150
    await send(bench, *[("plain", {"number": n, "seconds": 0.02}) for n in range(count)])
    async with working(bench) as worker:
        pool = worker._processes
        assert pool is not None

        async def kill() -> None:
            while True:
                await asyncio.sleep(0.05)
                # One that is busy, so that each kill ends a task: a start may take longer than until the next kill.
                for child in [one for one in pool._children.values() if one.is_ready and one not in pool.idle][:1]:
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        outcomes = await bench.outcomes(count)
        killing.cancel()
        errors = [error_of(outcome) for outcome in outcomes.values() if isinstance(outcome, Failed)]
        assert errors
        assert {(error["type"], error["signal"]) for error in errors} == {("ProcessDied", "SIGKILL")}
        before = set(pool._children)
        server = await asyncio.to_thread(parent_of, next(iter(before)))
        os.kill(server, signal.SIGKILL)

        async def others() -> bool:
            return len(pool._children) == 2 and not before & set(pool._children)

        await eventually(others, "other children")
        bench.reports.clear()
        await send(bench, ("plain", {"number": 1}), first=1000)
        assert result_of((await bench.outcomes(1))[1000])["number"] == 1


async def test_a_stop_that_is_sent_to_the_whole_group_of_processes_ends_no_child(bench: Bench) -> None:
    async with working(bench) as worker:
        pool = worker._processes
        assert pool is not None

        async def are_ready() -> bool:
            return len(pool.idle) == 2

        async def are_busy() -> bool:
            children = pool._children.values()
            return len(children) == 2 and not pool.idle and all(child.is_ready for child in children)

        await eventually(are_ready, "two children")
        await send(bench, *(("plain", {"number": n, "seconds": 2.0}) for n in range(2)))
        await eventually(are_busy, "two calls")
        before = set(pool._children)
        for pid in (parent_of(next(iter(before))), *before):
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, number)
        outcomes = await bench.outcomes(2)
        assert {result_of(outcome)["pid"] for outcome in outcomes.values()} == before
        assert set(pool._children) == before


async def test_a_process_that_a_handler_forks_ends_by_its_signals(bench: Bench) -> None:
    await send(bench, *[("fork_and_end", {})] * 5)
    async with working(bench):
        outcomes = await bench.outcomes(5)
    assert {result_of(outcome) for outcome in outcomes.values()} == {-signal.SIGTERM}


FEW_PROCESSES = """
import errno, os

fork, calls = os.fork, 0

def refused_at_times():
    global calls
    calls += 1
    if calls in (2, 3):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()

os.fork = refused_at_times
"""


async def test_a_child_goes_on_while_the_system_refuses_another(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "few_processes.py").write_text(FEW_PROCESSES, "utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    pool = ProcessPool(settings.model_copy(update={"worker_processes": 2}), ["few_processes"])
    pooling = asyncio.create_task(pool.run())
    seen: list[int] = []
    try:
        async with asyncio.timeout(30):
            while len(pool.idle) < 2:
                seen += [pid for pid in pool._children if pid not in seen]
                await asyncio.sleep(0.02)
        assert next(iter(pool._children)) == seen[0]
        await pool.stop()
    finally:
        pooling.cancel()
        with suppress(asyncio.CancelledError):
            await pooling


async def test_the_handler_of_the_processes_page_runs_in_a_child(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = next(block.text for block in all_blocks() if (block.page, block.info) == ("docs/processes.md", "python app"))
    (tmp_path / "page_app.py").write_text(text, "utf-8")
    (tmp_path / "pixels.json").write_text("[1, 2, 3]", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry()
    load_app("page_app")
    registry["thumbnail"] = REGISTRY.pop("thumbnail")
    await send(bench, ("thumbnail", {"path": "pixels.json"}))
    async with working(bench, registry=registry, apps=["page_app"]):
        outcomes = await bench.outcomes(1)
    assert result_of(outcomes[1]) == {"pixels": 3}


async def test_spans_of_a_child_belong_to_the_trace_of_the_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    active.use(Spans(TracerProvider()))
    try:
        await send(bench, ("trace", {}))
        async with working(bench, traces=True):
            outcome = (await bench.outcomes(1))[1]
    finally:
        active.use(None)
    assert isinstance(outcome, Succeeded)
    assert outcome.trace is not None
    assert json.loads(outcome.result) == [outcome.trace.trace_id, outcome.trace.trace_id]


async def test_children_have_lifespans_of_their_own(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = tmp_path / "opened"
    monkeypatch.setenv("PROCESS_APP_OPENED", str(opened))
    await send(bench, ("with_model", {}), ("with_model", {}), ("with_model", {}))
    async with working(bench, worker_processes=1, process_recycle_after=1) as worker:
        outcomes = await bench.outcomes(3)
        assert worker._processes is not None
        await worker._processes.stop()
    assert [result_of(outcome) for outcome in outcomes.values()] == [True, True, True]
    # The first child's lifespan failed, and another was started.
    assert opened.read_text("ascii").split().count("opened") in (4, 5)
    assert opened.read_text("ascii").split().count("closed") >= 3


BREAKING = """
import asyncio, os
from pathlib import Path
from penstock import lifespan

async def fail():
    while not Path(os.environ["MAY_FAIL"]).exists():
        await asyncio.sleep(0.02)
    raise LookupError("gone")

@lifespan(process=True)
async def group():
    async with asyncio.TaskGroup() as tasks:
        if not Path(os.environ["BROKEN"]).exists():
            Path(os.environ["BROKEN"]).touch()
            tasks.create_task(fail())
        yield 1
"""


async def test_a_child_whose_lifespan_ends_too_early_is_replaced(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaking.py").write_text(BREAKING, "utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    monkeypatch.setenv("MAY_FAIL", str(tmp_path / "may_fail"))
    pool = ProcessPool(settings.model_copy(update={"worker_processes": 1}), ["breaking"])
    pooling = asyncio.create_task(pool.run())
    seen: set[int] = set()
    try:
        async with asyncio.timeout(30):
            while len(seen) < 2 or not pool.idle:
                seen |= {child.pid for child in pool.idle}
                if seen:
                    (tmp_path / "may_fail").touch()
                await asyncio.sleep(0.02)
        await pool.stop()
    finally:
        pooling.cancel()
        with suppress(asyncio.CancelledError):
            await pooling


async def test_a_pool_may_stop_while_a_child_is_being_forked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, forked, may_go_on = asyncio.open_unix_connection, asyncio.Event(), asyncio.Event()
    calls: list[dict[str, Any]] = []

    async def slow(**options: Any) -> Any:
        calls.append(options)
        if len(calls) == 2:  # the first is to the fork server
            forked.set()
            await may_go_on.wait()
        return await connect(**options)

    monkeypatch.setattr(asyncio, "open_unix_connection", slow)
    pool = ProcessPool(settings.model_copy(update={"worker_processes": 1}), [APP])
    pooling = asyncio.create_task(pool.run())
    try:
        async with asyncio.timeout(60):
            await forked.wait()
            stopping = asyncio.create_task(pool.stop())
            await asyncio.sleep(0)
            may_go_on.set()
            await stopping
        assert pool._children == {}
    finally:
        pooling.cancel()
        with suppress(asyncio.CancelledError):
            await pooling


async def test_a_child_of_an_ended_fork_server_is_not_replaced_by_the_next_server_twice(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROCESS_APP_OPENED", str(tmp_path / "opened"))  # the first lifespan fails
    sleep, start = asyncio.sleep, asyncio.create_subprocess_exec
    servers: list[asyncio.subprocess.Process] = []
    is_pausing, may_go_on = asyncio.Event(), asyncio.Event()

    async def starting(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        servers.append(await start(*words, **options))
        return servers[-1]

    async def pausing(seconds: float) -> None:
        if seconds < 100:
            await sleep(seconds)
        else:
            is_pausing.set()
            await may_go_on.wait()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starting)
    monkeypatch.setattr(asyncio, "sleep", pausing)
    pool = ProcessPool(settings.model_copy(update={"worker_processes": 1}), [APP])
    pool._pauses = Pauses(1000, 1000)
    pooling = asyncio.create_task(pool.run())
    try:
        async with asyncio.timeout(60):
            await is_pausing.wait()
            servers[0].kill()
            while not pool.idle:
                await sleep(0.02)
            may_go_on.set()
            while pool._welcoming:
                await sleep(0)
        assert (len(servers), len(pool._children), len(pool._forking)) == (2, 1, 0)
        await pool.stop()
    finally:
        pooling.cancel()
        with suppress(asyncio.CancelledError):
            await pooling


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


async def test_steps_of_a_child_are_reported_by_the_worker(bench: Bench) -> None:
    journal = '[{"name":"first","result":"from the journal"}]'
    calls = [
        encode_call(1, 1, "by_steps", "{}", journal=journal), encode_call(2, 1, "by_awaited_steps", "{}"),
        encode_call(3, 1, "by_steps", '{"size":300000}'),
    ]  # fmt: skip
    assert (await bench.outbound.send([Outgoing(call) for call in calls])).failed == []
    async with working(bench):
        await bench.until(lambda: len([one for one in bench.reports if isinstance(one, Suspended)]) == 1, "the sleep")
        outcomes = await bench.outcomes(2)
    own_pid, then_pid, child = result_of(outcomes[2])
    assert own_pid == then_pid == child != os.getpid()
    (slept,) = [one for one in bench.reports if isinstance(one, Suspended)]
    assert [entry.name for entry in slept.steps] == ["second", "third", "ctx.sleep"]
    first, pid = json.loads(slept.steps[0].value)
    assert (first, pid != os.getpid(), slept.seconds) == ("from the journal", True, 60)
    reported = [(one.task_id, one.entry.name) for one in bench.reports if isinstance(one, Stepped)]
    assert sorted(reported) == [(1, "second"), (1, "third"), (2, "first"), (2, "second"), (3, "first"), (3, "second")]
    error = error_of(outcomes[3])
    assert (error["type"], error["final"]) == ("BadResult", True)
    assert isinstance(outcomes[3], Failed)
    assert [entry.name for entry in outcomes[3].steps] == ["first", "second"]


async def test_no_step_begins_in_a_child_once_the_lease_has_ended_though_it_was_extended_since(bench: Bench) -> None:
    await send(bench, ("step_once_extended", {}))
    async with working(bench) as worker:
        await bench.until(lambda: any(sign.detail for sign in bench.signs(1)), "the handler to begin")
        (attempt,) = worker._runner.attempts()
        attempt.lease.until = 0.0  # as of a process that was frozen
        await worker._leases._extend([attempt.lease], bench.outbound)
        assert attempt.lease.until > 0.0
        await bench.until(lambda: any(isinstance(one, Suspended) for one in bench.reports), "the suspension")
    assert not any(isinstance(one, Stepped) for one in bench.reports)


async def test_a_child_that_ended_before_it_was_heard_to_be_ready_is_replaced(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, forks = ProcessPool(settings, []), list[int]()
    pool._pauses = Pauses(0.001, 0.001)
    monkeypatch.setattr(pool, "_fork", lambda: forks.append(1))
    ours, theirs = socket.socketpair()
    child = Child(ours, asyncio.get_running_loop().create_future())
    child.reader = asyncio.StreamReader()
    child.reader.feed_data(frame(["ready"]))
    child.ended.set_result(Ended(1))
    await pool._welcome(child)
    assert (forks, len(pool.idle)) == ([1], 0)
    ours.close()
    theirs.close()


async def test_a_worker_receives_on_once_a_call_that_waited_has_its_child(bench: Bench) -> None:
    await send(bench, ("plain", {"number": 1, "seconds": 5}))
    async with working(bench) as worker:
        async with asyncio.timeout(30):
            while not worker._runner._running:  # it waited for the first child
                await asyncio.sleep(0.01)
        await send(bench, ("plain", {"number": 2}), first=2)
        assert (await bench.outcomes(1)).keys() == {2}  # beside the first, not after it
        assert (await bench.outcomes(2)).keys() == {1, 2}
