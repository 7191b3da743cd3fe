"""The executor of event loops: as the usual one, but for its end."""

from __future__ import annotations

import asyncio
import threading
from time import monotonic

import pytest

from penstock.runtime import daemon_threads
from penstock.runtime.loop_thread import new_loop


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


def test_more_calls_than_threads_wait_and_a_cancelled_one_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "_MOST", 1)
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
    monkeypatch.setattr(daemon_threads, "_END_SECONDS", 30)
    executor = daemon_threads.DaemonThreads()
    short = executor.submit(threading.Event().wait, 0.05)
    executor.shutdown()
    assert short.done()
    monkeypatch.setattr(daemon_threads, "_END_SECONDS", 0.1)
    executor = daemon_threads.DaemonThreads()
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

    monkeypatch.setattr(daemon_threads, "_MOST", 1)
    executor = daemon_threads.DaemonThreads()
    ran: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            executor.submit(ran.append, 1)
    executor.submit(ran.append, 2).result(30)
    executor.shutdown()
    assert ran == [2]
