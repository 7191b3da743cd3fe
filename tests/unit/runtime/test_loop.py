from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from penstock.protocol.errors import SettingsError, Unavailable
from penstock.runtime import loop as loop_module
from penstock.runtime import metrics
from penstock.runtime.health import Health, ready
from penstock.runtime.loop import Loop, MakeService, Service, SideTask, run_services
from penstock.runtime.periodic import Pauses
from penstock.settings.model import Settings, load_settings
from tests.waiting import wait_until

Step = Callable[[], Awaitable[int]]


class Scripted(Service):
    """Does what each test says; notes what it was asked for, in order."""

    name = "scripted"
    idle_seconds = 3600.0

    def __init__(self, step: Step | None = None, *, sides: Mapping[str, SideTask] | None = None) -> None:
        self.asked: list[str] = []
        self.idle = asyncio.Event()
        self.unreachable = 0  # how often ``open`` fails first
        self.drained_seconds: float | None = None
        self._step = step
        self._sides = sides or {}

    async def open(self) -> None:
        self.asked.append("open")
        if self.unreachable:
            self.unreachable -= 1
            raise Unavailable("Postgres is unavailable")

    async def run_once(self) -> int:
        self.asked.append("pass")
        return await self._step() if self._step else 0

    async def wait_for_work(self) -> None:
        self.idle.set()
        await super().wait_for_work()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return self._sides

    def stop_taking(self) -> None:
        self.asked.append("stop_taking")

    async def drain(self, seconds: float) -> None:
        self.asked.append("drain")
        self.drained_seconds = seconds

    async def close(self) -> None:
        self.asked.append("close")


@pytest.fixture(autouse=True)
def _signal_handlers_put_back() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "Pauses", partial(Pauses, 0.001, 0.005))


def looped(service: Service, *, passes: int = 1, grace_seconds: float = 30) -> Loop:
    return Loop(service, passes=passes, grace_seconds=grace_seconds)


def passes(outcome: str) -> float:
    return metrics.REGISTRY.get_sample_value("penstock_passes_total", {"process": "scripted", "outcome": outcome}) or 0


def in_turn(*steps: int | Exception) -> tuple[Step, asyncio.Event]:
    """A step that returns or raises these in turn, then finds nothing for ever; the event is set at their end."""
    left = list(steps)
    spent = asyncio.Event()

    async def step() -> int:
        if not left:
            spent.set()
            return 0
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return step, spent


# The ordinary life


async def test_passes_follow_each_other_while_there_is_work_and_a_stop_ends_an_idle_wait_at_once() -> None:
    step, _ = in_turn(3, 1)
    service = Scripted(step)
    before = passes("worked"), passes("idle")
    loop = looped(service)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(service.idle.wait(), 30)
    loop.stop()
    assert await asyncio.wait_for(running, 30) == 0
    assert service.asked == ["open", "pass", "pass", "pass", "stop_taking", "drain", "close"]
    assert (passes("worked"), passes("idle")) == (before[0] + 2, before[1] + 1)


async def test_a_stop_before_the_start_opens_nothing() -> None:
    service = Scripted()
    loop = looped(service)
    loop.stop()
    assert await loop.run() == 0
    assert service.asked == ["stop_taking", "close"]


def test_passes_are_counted_from_none_on() -> None:
    class Fresh(Service):
        name = "fresh"

    looped(Fresh())
    for outcome in ("worked", "idle", "failed"):
        labels = {"process": "fresh", "outcome": outcome}
        assert metrics.REGISTRY.get_sample_value("penstock_passes_total", labels) == 0


async def test_stopping_twice_tells_the_service_once() -> None:
    service = Scripted()
    loop = looped(service)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(service.idle.wait(), 30)
    loop.stop()
    loop.stop()
    await running
    assert service.asked.count("stop_taking") == 1


async def test_as_many_passes_as_asked_for_are_under_way_at_once() -> None:
    together, met = asyncio.Barrier(3), asyncio.Event()

    async def step() -> int:
        await together.wait()
        met.set()
        return 0

    loop = looped(Scripted(step), passes=3)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(met.wait(), 30)
    loop.stop()
    assert await asyncio.wait_for(running, 30) == 0


# Unavailable services


async def test_a_start_waits_until_what_it_needs_is_there(short_pauses: None) -> None:
    service = Scripted()
    service.unreachable = 3
    loop = looped(service)
    health = loop.health
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(service.idle.wait(), 30)
    assert service.asked[:5] == ["open", "open", "open", "open", "pass"]
    assert health.ready() == (True, "ok")
    loop.stop()
    assert await running == 0


async def test_a_start_that_still_waits_says_why_and_stops_at_once_when_told() -> None:
    service = Scripted()
    service.unreachable = 10**9
    loop = looped(service)
    health = loop.health
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(30):
        while health.ready() == (False, "starting"):
            await asyncio.sleep(0)
    assert health.ready() == (False, "Postgres is unavailable")
    assert "pulse" in {task.get_name() for task in asyncio.all_tasks()}  # alive all the same
    loop.stop()
    assert await asyncio.wait_for(running, 30) == 0
    assert "pass" not in service.asked
    assert service.asked[-1] == "close"


async def test_a_start_that_hangs_does_not_hold_a_stop_back() -> None:
    class Hanging(Scripted):
        async def open(self) -> None:
            self.idle.set()
            await asyncio.sleep(3600)

    service = Hanging()
    loop = looped(service)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(service.idle.wait(), 30)
    loop.stop()
    assert await asyncio.wait_for(running, 30) == 0
    assert service.asked[-1] == "close"


async def test_a_pass_that_finds_postgres_away_is_repeated_and_health_follows(short_pauses: None) -> None:
    seen: list[tuple[bool, str]] = []
    step, spent = in_turn(Unavailable("Postgres is unavailable"), Unavailable("Postgres is unavailable"), 1)

    async def watched() -> int:
        seen.append(loop.health.ready())
        return await step()

    before = passes("failed")
    loop = looped(Scripted(watched))
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(spent.wait(), 30)
    loop.stop()
    assert await running == 0
    assert seen == [(True, "ok"), (False, "Postgres is unavailable"), (False, "Postgres is unavailable"), (True, "ok")]
    assert passes("failed") == before + 2


async def test_a_mistake_in_a_pass_neither_ends_the_process_nor_shows_its_text_outside(short_pauses: None) -> None:
    seen: list[tuple[bool, str]] = []
    step, spent = in_turn(ValueError("postgresql://user:secret@host/db"), 1)

    async def watched() -> int:
        seen.append(loop.health.ready())
        return await step()

    loop = looped(Scripted(watched))
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(spent.wait(), 30)
    loop.stop()
    assert await running == 0
    assert seen == [(True, "ok"), (False, "ValueError"), (True, "ok")]


@pytest.mark.parametrize(("pause_seconds", "expected"), [(0.001, 3), (3600, 1)])
async def test_a_wait_that_fails_is_no_end_and_no_tight_circle(
    monkeypatch: pytest.MonkeyPatch, pause_seconds: float, expected: int
) -> None:
    class Restless(Scripted):
        async def wait_for_work(self) -> None:
            if self.asked.count("pass") == expected:
                self.idle.set()
            raise OSError("no")

    monkeypatch.setattr(loop_module, "Pauses", partial(Pauses, pause_seconds, pause_seconds))
    service = Restless()
    loop = looped(service)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(service.idle.wait(), 30)
    if expected == 1:
        for _ in range(100):  # turns in which a tight circle would make passes
            await asyncio.sleep(0)
        assert service.asked.count("pass") == 1
    loop.stop()
    assert await running == 0


def test_pauses_double_up_to_a_limit_and_are_jittered() -> None:
    for _ in range(20):
        pauses = Pauses()
        for expected in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0):
            assert expected / 2 <= pauses.next_seconds() <= expected
    pauses.failures = 10**6
    assert pauses.next_seconds() <= 10.0
    pauses.reset()
    assert pauses.next_seconds() <= 0.2


@pytest.mark.usefixtures("short_pauses")
async def test_a_long_outage_is_logged_at_its_first_failure_and_every_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[int] = []

    class Log:
        def warning(self, event: str, *, reason: str, failures: int) -> None:
            assert (event, reason) == ("backing_off", "away")
            lines.append(failures)

        def info(self, event: str, **_: object) -> None:
            pass

    monkeypatch.setattr(loop_module, "log", Log())
    step, spent = in_turn(*(Unavailable("away") for _ in range(25)))
    loop = looped(Scripted(step))
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(spent.wait(), 30)
    loop.stop()
    await running
    assert lines == [1, 11, 21]


# Stopping


async def test_a_pass_under_way_is_finished_before_the_end() -> None:
    begun, finish = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def step() -> int:
        begun.set()
        await finish.wait()
        done.append("saved")
        return 1

    service = Scripted(step)
    loop = looped(service)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(begun.wait(), 30)
    loop.stop()
    finish.set()
    assert await asyncio.wait_for(running, 30) == 0
    assert done == ["saved"]
    assert service.asked == ["open", "pass", "stop_taking", "drain", "close"]
    assert service.drained_seconds is not None
    assert 0 < service.drained_seconds <= 30


async def test_a_pass_that_outlasts_the_grace_is_cut_off() -> None:
    begun = asyncio.Event()
    cut: list[bool] = []

    async def step() -> int:
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cut.append(True)
            raise
        return 1

    service = Scripted(step)
    loop = looped(service, grace_seconds=0.05)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(begun.wait(), 30)
    loop.stop()
    assert await asyncio.wait_for(running, 30) == 0
    assert cut == [True]
    assert service.drained_seconds == 0.0
    assert service.asked[-2:] == ["drain", "close"]


@pytest.mark.parametrize("problem", [Unavailable("SQS is unavailable"), ValueError("ours")])
async def test_a_drain_that_fails_still_closes(problem: Exception) -> None:
    class Leaky(Scripted):
        async def drain(self, seconds: float) -> None:
            raise problem

    service = Leaky()
    loop = looped(service)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(service.idle.wait(), 30)
    loop.stop()
    assert await asyncio.wait_for(running, 30) == 0
    assert service.asked[-1] == "close"


async def test_the_service_is_closed_even_when_opening_it_is_a_mistake() -> None:
    class Broken(Scripted):
        async def open(self) -> None:
            raise SettingsError("wrong")

    service = Broken()
    with pytest.raises(SettingsError):
        await looped(service).run()
    assert service.asked == ["close"]


# Side tasks


async def test_a_side_task_runs_beside_the_passes_until_the_end() -> None:
    state: list[str] = []

    async def side() -> None:
        state.append("running")
        try:
            await asyncio.sleep(3600)
        finally:
            state.append("ended")

    service = Scripted(sides={"side": side})
    loop = looped(service)
    running = asyncio.create_task(loop.run())
    await asyncio.wait_for(service.idle.wait(), 30)
    await asyncio.sleep(0)
    assert state == ["running"]
    loop.stop()
    assert await running == 0
    assert state == ["running", "ended"]


@pytest.mark.parametrize("dies", [True, False])
async def test_a_side_task_that_ends_takes_the_process_down(dies: bool) -> None:
    async def side() -> None:
        if dies:
            raise RuntimeError("no")

    service = Scripted(sides={"side": side})
    assert await asyncio.wait_for(looped(service).run(), 30) == 1
    assert service.asked[-2:] == ["drain", "close"]


# Signals and the whole process


PROCESS = """
import asyncio, sys
from pathlib import Path
from penstock.runtime.loop import Service, run_services
from penstock.settings.model import load_settings

class Slow(Service):
    name = "slow"
    async def run_once(self):
        Path(sys.argv[1]).touch()
        await asyncio.sleep(3600)
        return 1
    def stop_taking(self):
        Path(sys.argv[1] + ".stopping").touch()

sys.exit(run_services([(lambda stack: Slow(), 1)], load_settings(metrics_port=0, grace_seconds=float(sys.argv[2]))))
"""


def start(mark: Path, *, grace_seconds: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", PROCESS, str(mark), str(grace_seconds)], env=_environment())
    wait_until(mark.exists, "the first pass")
    return process


def _environment() -> dict[str, str]:
    import penstock

    return os.environ | {"PYTHONPATH": str(Path(penstock.__file__).parents[1])}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_told_to_stop_leaves_with_0_within_its_grace(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path / "mark", grace_seconds=0.2)
    process.send_signal(number)
    assert process.wait(60) == 0


LEAVING = """
import asyncio, atexit, sys, time
from pathlib import Path
from penstock.runtime.loop import Service, run_services
from penstock.settings.model import load_settings

class Leaving(Service):
    name = "leaving"
    async def run_once(self):
        task = asyncio.create_task(asyncio.to_thread(time.sleep, 600))
        await asyncio.sleep(0)
        Path(sys.argv[1]).touch()
        await task
        return 0

atexit.register(print, "its end")
sys.exit(run_services([(lambda stack: Leaving(), 1)], load_settings(metrics_port=0, grace_seconds=0.1)))
"""


def test_a_stopped_process_does_not_wait_for_what_a_handler_left_in_a_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVING, str(tmp_path / "mark")]
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, text=True)
    try:
        wait_until((tmp_path / "mark").exists, "the call")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert output == "its end\n"


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    process = start(tmp_path / "mark", grace_seconds=3600)
    process.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "mark.stopping").exists, "the stop")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


@pytest.fixture
def settings() -> Settings:
    return load_settings(metrics_port=0, grace_seconds=1)


def test_what_was_made_for_a_service_is_closed_after_it(settings: Settings) -> None:
    service = Scripted()

    def make(stack: AsyncExitStack) -> Service:
        stack.callback(service.asked.append, "pool closed")
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
        return service

    assert run_services([(make, 1)], settings) == 0
    assert service.asked[-2:] == ["close", "pool closed"]


# Several services in one process


def given(service: Service) -> tuple[MakeService, int]:
    return lambda stack: service, 1


def test_a_signal_stops_all_services_of_a_process_in_order(settings: Settings) -> None:
    services = [Scripted(), Scripted()]

    async def step() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert run_services([given(Scripted(step)), *map(given, services)], settings) == 0
    assert [service.asked[-3:] for service in services] == [["stop_taking", "drain", "close"]] * 2


def test_a_task_of_a_handler_that_exits_ends_no_process(settings: Settings) -> None:
    left: list[asyncio.Task[None]] = []

    async def leave() -> None:
        sys.exit(3)

    async def step() -> int:
        left.append(asyncio.create_task(leave()))
        await asyncio.wait(left)
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert run_services([given(Scripted(step))], settings) == 0
    assert isinstance(left[0].exception(), SystemExit)


def test_a_service_that_dies_stops_the_others_and_the_process_fails(settings: Settings) -> None:
    async def dies() -> None:
        raise RuntimeError("no")

    other = Scripted()
    assert run_services([given(other), given(Scripted(sides={"side": dies}))], settings) == 1
    assert other.asked[-3:] == ["stop_taking", "drain", "close"]


def test_a_mistake_in_one_service_is_raised_when_the_others_have_stopped(settings: Settings) -> None:
    class Broken(Scripted):
        async def open(self) -> None:
            raise SettingsError("wrong")

    other = Scripted()
    with pytest.raises(SettingsError, match="wrong"):
        run_services([given(other), given(Broken())], settings)
    assert other.asked[-1] == "close"


def test_a_process_is_ready_when_all_its_services_are_and_names_those_that_are_not() -> None:
    api, scheduler = Health("api"), Health("scheduler")
    both = [api, scheduler]
    assert ready(both) == (False, "api: starting; scheduler: starting")
    api.succeeded()
    scheduler.failed("Postgres is unavailable")
    assert ready(both) == (False, "scheduler: Postgres is unavailable")
    scheduler.succeeded()
    assert ready(both) == (True, "ok")
    api.failed("gone")
    assert ready([api]) == (False, "gone")
