"""Calls from one event loop into a thread with a loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from penstock.runtime.loop_thread import LoopThread


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
