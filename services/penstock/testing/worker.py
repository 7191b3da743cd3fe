"""One worker of a test: runs every task in its queue, or dies as planned."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.brokers.base import Outgoing, SendReport
from penstock.brokers.sqs import LIMITS
from penstock.protocol.batching import join_batch
from penstock.protocol.json_text import entry_text
from penstock.protocol.reports import Outcome, SharedResult, Stepped, decode_report
from penstock.protocol.requests import split_body
from penstock.settings.model import Settings
from penstock.testing.faults import Faults
from penstock.testing.queue import MemoryQueue
from penstock.worker.handlers.actions import Registry
from penstock.worker.process import Worker

ONE_AT_A_TIME = replace(LIMITS, max_call_messages=1)
"""Limits of an outbound queue from which a worker takes one message after another, so that a crash concerns one."""

ALONE: Mapping[str, Any] = {
    "payload_bucket": None, "payload_keys": (), "control_url": None, "receive_wait_seconds": 0, "worker_concurrency": 1,
    "task_output": "logs", "database_schema": "penstock",
    "billed_call_wait_seconds": 0,  # else deletes wait for a side task
}  # fmt: skip
"""Settings of a test: nothing reaches beyond this process, and one task runs at a time."""

_SIDE_TASKS = ("send responses", "delete messages", "watch threads")  # the others are for long runs


def matches(payload: Any, wanted: Any) -> bool:
    """Whether a payload is the wanted one, None for any; an object matches by the members that are given."""
    if isinstance(wanted, Mapping) and isinstance(payload, Mapping):
        return all(name in payload and payload[name] == value for name, value in wanted.items())
    return wanted is None or payload == wanted


class _Died(Exception):
    """The worker is dead."""


class _Results(MemoryQueue):
    """The results queue as a worker sees it, which dies on its way there with the answer of a dying task."""

    def __init__(self, queue: MemoryQueue, faults: Faults) -> None:
        super().__init__(queue.label, queue._now)
        self.messages = queue.messages
        self._faults = faults

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        for message in messages:
            _, entries = split_body(message.body, batch_limit=len(message.body))
            for place, entry in enumerate(entries):
                report = decode_report(entry)
                if isinstance(report, Stepped):
                    is_sent, dies = 1, self._faults.dies_after(report.task_id, report.entry.label)
                elif isinstance(report, SharedResult | Outcome):
                    ids = {*report.task_ids} if isinstance(report, SharedResult) else {report.task_id}
                    is_sent, dies = 0, not ids.isdisjoint(self._faults.dying)
                    self._faults.dying -= ids
                else:
                    continue
                if dies:
                    if sent := entries[: place + is_sent]:  # what was answered before
                        self.put(Outgoing(join_batch([entry_text(one) for one in sent]), message.attributes))
                    raise _Died
            self.put(message)
        return SendReport([], None)


async def run_worker(
    outbound: MemoryQueue, results: MemoryQueue, settings: Settings, registry: Registry, faults: Faults
) -> None:
    """Run the tasks in the outbound queue until all are answered, or the worker dies: its messages come again."""
    dying = _Results(results, faults)
    worker = Worker(outbound=outbound, results=dying, settings=settings, registry=faults.over(registry))
    sides = [asyncio.create_task(run()) for name, run in worker.side_tasks().items() if name in _SIDE_TASKS]
    work = asyncio.create_task(_work(worker))
    try:
        await asyncio.wait((work, *sides), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            await worker.drain(0)
    finally:
        for task in (work, *sides):
            task.cancel()
        ended = await asyncio.gather(work, *sides, return_exceptions=True)
        await worker.close()
    for outcome in ended:
        if isinstance(outcome, BaseException) and not isinstance(outcome, _Died | asyncio.CancelledError):
            raise outcome


async def _work(worker: Worker) -> None:
    await worker.open()  # lifespans of the handlers
    while await worker.run_once():
        await worker.settle()
