"""A running api, in this process and over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from penstock.api.process import Api
from penstock.brokers.base import Queue, Transport
from penstock.brokers.opening import open_transport, queue_names
from penstock.compat.clockwork.http import Clockwork
from penstock.compat.scheduler0.http.routes import Scheduler0
from penstock.db.pool import Store
from penstock.runtime.loop import Loop
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

JSON = {"Content-Type": "application/json"}


def queues_of(settings: Settings) -> tuple[Transport, dict[str, Queue], dict[str, Queue]]:
    """A transport, the three queues by label, and their dead-letter queues."""
    transport = open_transport(settings)
    queues, dead_letters = (
        {
            label + suffix: transport.queue(name + suffix, label=label + suffix)
            for label, name in queue_names(settings).items()
        }
        for suffix in ("", DEAD_LETTER_SUFFIX)
    )
    return transport, queues, dead_letters  # type: ignore[return-value]


class RunningApi(Api):
    """stop: what a signal does to the process."""

    stop: Callable[[], None]


@asynccontextmanager
async def running(store: Store, settings: Settings) -> AsyncIterator[RunningApi]:
    """The api, listening; stopped in order at the end, if it was not before."""
    transport, queues, dead_letters = queues_of(settings)
    api = RunningApi(
        store=store, settings=settings, queues=queues, dead_letters=dead_letters, additions=[Scheduler0, Clockwork]
    )
    loop = Loop(api, passes=1, grace_seconds=settings.grace_seconds)
    api.stop = loop.stop
    running = asyncio.create_task(loop.run(), name="api")
    listening = asyncio.create_task(api.listening.wait())
    try:
        await asyncio.wait((running, listening), timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert listening.done(), "the api did not come up"
        yield api
    finally:
        listening.cancel()
        api.stop()
        assert await running == 0
        await transport.close()


def captured_log(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the answering of requests logs from now on, one dict of fields a line."""
    capture = structlog.testing.LogCapture()
    monkeypatch.setattr("penstock.api.rpc.log", structlog.wrap_logger(None, processors=[capture]))
    return capture.entries  # type: ignore[return-value]
