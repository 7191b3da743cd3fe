"""A function of AWS Lambda that runs tasks: an event source mapping of the outbound queue, or of a route's, invokes it.

One worker serves all invocations of an execution environment, which is frozen between them; so each ends with nothing
under way. Lambda itself receives, and deletes the messages that the answer does not name.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from time import monotonic
from typing import Any

from penstock.protocol.errors import needing

with needing("penstock.lambda_handler", "lambda"):
    from penstock.brokers.base import Depth, Message, Outgoing, SendReport
    from penstock.brokers.opening import open_transport
    from penstock.brokers.sqs import LIMITS, message_of
    from penstock.runtime.logs import setup_logging
    from penstock.runtime.loop_thread import run_whole
    from penstock.runtime.tracing.active import active, setup_tracing
    from penstock.settings.model import load_settings
    from penstock.worker.handlers.actions import REGISTRY
    from penstock.worker.process import Worker

_STOP_SECONDS = 3.0  # before the end of the invocation, handlers are stopped
_DRAIN_SECONDS = 1.5  # before it, what is unfinished is left to a later invocation
_FLUSH_SECONDS = 1.0  # at its end, for spans to reach their exporter


class _Event:
    """The messages of one invocation, as the queue that a worker receives from."""

    label = "outbound"
    limits = replace(LIMITS, bills_calls=False)

    def __init__(self) -> None:
        self._new: list[Message] = []
        self.left: dict[str, Message] = {}

    def put(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._new = [_message(record) for record in records]
        self.left = {message.id: message for message in self._new}

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        taken, self._new = self._new, []
        return taken

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            self.left.pop(message.id, None)
        return []

    async def release(self, messages: Sequence[Message]) -> None:
        """They are named in the answer."""

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        return []

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        return SendReport([*range(len(messages))], "an event takes no messages")

    async def depth(self) -> Depth:
        return Depth(len(self._new), None, 0)


class _Environment:
    """The worker of this execution environment; one that was stopped, or failed, is replaced."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._event = _Event()
        self._stack = AsyncExitStack()
        self._worker: Worker | None = None
        self._sides: list[asyncio.Task[None]] = []

    def run(self, records: Sequence[Mapping[str, Any]], seconds: float) -> list[str]:
        """Ids of the messages to deliver again."""
        ends_at = monotonic() + seconds
        try:
            return run_whole(self._runner, self._invoke(records, ends_at, seconds))
        finally:
            if (spans := active()) is not None:  # nothing runs until the next invocation, if one comes
                spans.flush(min(_FLUSH_SECONDS, (ends_at - monotonic()) / 2))

    async def _invoke(self, records: Sequence[Mapping[str, Any]], ends_at: float, seconds: float) -> list[str]:
        drain_seconds = min(_DRAIN_SECONDS, seconds / 8)
        is_whole = False
        stop: asyncio.TimerHandle | None = None
        try:
            self._event.put(records)
            worker = self._worker or await self._open()
            # The timeout of the queue is at least that of the function.
            stop = worker.run_until(ends_at - min(_STOP_SECONDS, seconds / 4), held_until=ends_at)
            work = asyncio.create_task(_work(worker))
            left = ends_at - drain_seconds - monotonic()
            ended, _ = await asyncio.wait((work, *self._sides), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a side task ends by an error alone
            is_whole = work in ended
            if not is_whole:
                work.cancel()
                await worker.drain(drain_seconds / 2)
        finally:
            if stop is not None:
                stop.cancel()
            if not is_whole:
                await self._close()
        return [*self._event.left]

    async def _open(self) -> Worker:
        settings = load_settings()
        setup_logging("worker", level=settings.log_level, form=settings.log_format)
        setup_tracing("worker", settings)
        transport = open_transport(settings)
        self._stack.push_async_callback(transport.close)
        results = transport.queue(settings.results_queue, label="results")
        self._worker = worker = Worker(outbound=self._event, results=results, settings=settings, registry=REGISTRY)
        self._stack.push_async_callback(worker.close)
        await worker.open()
        sides = dict(worker.side_tasks())
        del sides["extend visibility"]  # Lambda holds the messages
        self._sides = [asyncio.create_task(run(), name=name) for name, run in sides.items()]
        return worker

    async def _close(self) -> None:
        sides, self._sides, self._worker = self._sides, [], None
        for task in sides:
            task.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
        await self._stack.aclose()


async def _work(worker: Worker) -> None:
    await worker.run_once()
    await worker.settle()


def _message(record: Mapping[str, Any]) -> Message:
    """A message as ReceiveMessage answers it: an event has the same fields, in lower case."""
    message = {name[:1].upper() + name[1:]: value for name, value in record.items()}
    message["MessageAttributes"] = {
        name: {"StringValue": value["stringValue"]}
        for name, value in record.get("messageAttributes", {}).items()
        if value.get("stringValue") is not None
    }
    return message_of(message)


_environment = cache(_Environment)


def lambda_handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Run the tasks of an event by the actions that are registered, and name the messages to deliver again.

    The mapping needs ReportBatchItemFailures; settings are those of a worker, ``PENSTOCK_*``. A handler still running
    3 seconds before the end of the invocation has exceeded its time limit. Raises SettingsError, Unavailable.
    """
    left = _environment().run(event["Records"], context.get_remaining_time_in_millis() / 1000)
    return {"batchItemFailures": [{"itemIdentifier": message_id} for message_id in left]}
