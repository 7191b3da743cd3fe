"""Event loops: their executor is as the usual one but for its end; calls from one into a thread with another."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any

import pytest

from penstock.runtime import loop_thread
from penstock.runtime.loop_thread import DaemonThreads, LoopThread, new_loop, run_whole
from tests.waiting import wait_until


@pytest.fixture
async def thread() -> AsyncIterator[LoopThread]:
    thread = LoopThread("tried")
    yield thread
    await asyncio.to_thread(thread.stop)


async def test_a_call_runs_in_the_thread_and_returns_its_result_or_error(thread: LoopThread) -> None:
    async def name() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def fail() -> None:
        raise LookupError("none")

    assert await thread.call(name()) == "tried"
    with pytest.raises(LookupError, match="none"):
        await thread.call(fail())
    with pytest.raises(asyncio.CancelledError):
        await thread.call(cancelled())
    assert await thread.call(name()) == "tried"


async def cancelled() -> None:
    raise asyncio.CancelledError


async def test_a_call_is_cancelled_with_its_caller(thread: LoopThread) -> None:
    began, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    call = asyncio.create_task(thread.call(wait()))
    assert await asyncio.to_thread(began.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(ended.wait, 60)


async def test_a_stop_ends_the_calls_under_way() -> None:
    thread = LoopThread("tried")
    call = asyncio.create_task(thread.call(asyncio.sleep(600)))
    await thread.call(asyncio.sleep(0))
    await asyncio.to_thread(thread.stop)
    with pytest.raises(asyncio.CancelledError):
        await call


# Exits


@pytest.mark.parametrize("factory", [new_loop, asyncio.new_event_loop])
def test_a_task_of_a_handler_that_exits_ends_alone(
    factory: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        await asyncio.sleep(0.01)
        sys.exit(3)

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(leave())
            group.create_task(asyncio.sleep(600))

    async def main() -> str:
        for handler in (leave, grouped):
            with pytest.raises(SystemExit):
                await asyncio.create_task(handler())
        await asyncio.sleep(0.01)
        return "went on"

    async def own() -> None:
        await asyncio.sleep(0)
        sys.exit(4)

    with asyncio.Runner(loop_factory=factory) as runner:
        assert run_whole(runner, main()) == "went on"
        assert "exit_in_task" in caplog.text
        with pytest.raises(SystemExit, match="4"):
            run_whole(runner, own())


# Names


def test_names_whose_servers_do_not_answer_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, asked, real = threading.Event(), list[str](), socket.getaddrinfo

    def slow(host: str, *where: Any, **how: Any) -> Any:
        if host.endswith(".invalid"):
            asked.append(host)
            may_end.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *where, **how)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        dead = [asyncio.create_task(loop.getaddrinfo(f"{n}.invalid", 80)) for n in range(40)]
        await asyncio.sleep(0)
        found = await asyncio.wait_for(loop.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM), 30)
        assert found[0][4][1] == 80
        await asyncio.to_thread(wait_until, lambda: len(asked) == 40, "the threads of all look-ups", seconds=10)
        may_end.set()
        outcomes = await asyncio.gather(*dead, return_exceptions=True)
        assert {type(one) for one in outcomes} == {socket.gaierror}

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


# The executor


def fail() -> None:
    raise LookupError("none")


def test_calls_run_beside_each_other_in_daemon_threads_that_are_used_again() -> None:
    async def main() -> None:
        together = threading.Barrier(3, timeout=30)
        await asyncio.gather(*(asyncio.to_thread(together.wait) for _ in range(3)))
        threads = {await asyncio.to_thread(threading.current_thread) for _ in range(20)}
        assert len(threads) <= 3
        assert all(thread.daemon for thread in threads)
        with pytest.raises(LookupError, match="none"):
            await asyncio.to_thread(fail)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_a_call_that_raises_stop_iteration_ends_for_its_caller() -> None:
    async def main() -> None:
        nothing: list[int] = []
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            await asyncio.wait_for(asyncio.to_thread(next, iter(nothing)), 5)
        assert isinstance(caught.value.__cause__, StopIteration)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_more_calls_than_threads_wait_and_a_cancelled_one_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_MOST", 1)
    ran: list[int] = []
    may_go_on = threading.Event()

    async def main() -> None:
        first = asyncio.create_task(asyncio.to_thread(may_go_on.wait, 30))
        others = [asyncio.create_task(asyncio.to_thread(ran.append, n)) for n in range(3)]
        await asyncio.sleep(0.05)
        assert not ran
        others[0].cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.gather(first, *others[1:])

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert ran == [1, 2]


def test_an_end_waits_for_short_calls_and_leaves_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "_END_SECONDS", 30)
    executor = DaemonThreads()
    short = executor.submit(threading.Event().wait, 0.05)
    executor.shutdown()
    assert short.done()
    monkeypatch.setattr(loop_thread, "_END_SECONDS", 0.1)
    executor = DaemonThreads()
    executor.submit(threading.Event().wait, 600)
    before = monotonic()
    executor.shutdown()
    assert 0.1 <= monotonic() - before < 30
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(fail)


def test_a_thread_that_the_system_refuses_takes_no_place_and_its_call_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(loop_thread, "_MOST", 1)
    executor = DaemonThreads()
    ran: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            executor.submit(ran.append, 1)
    executor.submit(ran.append, 2).result(30)
    executor.shutdown()
    assert ran == [2]
