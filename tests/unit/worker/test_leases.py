"""Messages that are held for as long as a broker allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from penstock.brokers.base import Depth, Limits, Message, Outgoing, SendReport
from penstock.brokers.sqs import LIMITS
from penstock.settings.model import Settings, load_settings
from penstock.worker.leases import Lease, Leases

PATIENCE_SECONDS = 60.0


class Calls:
    """A queue that notes its calls."""

    label = "outbound"

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.deleted: list[str] = []
        self.released: list[str] = []
        self.extended: list[str] = []
        self.ended = False  # whether every lease has ended

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        raise AssertionError

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        raise AssertionError

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        self.deleted += [message.id for message in messages]
        return []

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        self.extended += [message.id for message in messages]
        return list(messages) if self.ended else []

    async def release(self, messages: Sequence[Message]) -> None:
        self.released += [message.id for message in messages]

    async def depth(self) -> Depth:
        raise AssertionError


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


def waiting(visibility_seconds: int, delete_seconds: int) -> Settings:
    """Leases may be shorter here than a queue's."""
    settings = load_settings(billed_call_wait_seconds=delete_seconds)
    return settings.model_copy(update={"visibility_timeout_seconds": visibility_seconds})


MESSAGE = Message("m", "r", "[]", 1, None, {})


def added(leases: Leases, tasks: int) -> Lease:
    lease = leases.take(MESSAGE)
    assert lease is not None
    leases.add(lease, tasks)
    return lease


@pytest.mark.parametrize("deletes", [True, False])
async def test_a_message_held_for_as_long_as_can_be_is_let_go_and_its_tasks_go_on(deletes: bool) -> None:
    queue = Calls(replace(LIMITS, max_extend_seconds=1, deletes_overdue=deletes))
    leases = Leases(queue, waiting(1, 0))
    lease = added(leases, 2)
    tasks = [asyncio.create_task(run) for run in (leases.extend_unfinished(queue), leases.deleter.run())]
    try:
        await until(lambda: lease.lost)
        assert queue.deleted == (["m"] if deletes else [])
        assert leases.unfinished() == [lease]
        leases.answered(lease)
        leases.answered(lease)
        await until(lambda: not leases._leases)
    finally:
        for task in tasks:
            task.cancel()
    assert queue.deleted == (["m"] if deletes else [])  # what is lost is others' and is not deleted under their hands
    assert queue.released == []


async def test_a_message_that_cannot_be_deleted_for_long_is_extended_before_its_lease_ends() -> None:
    """As while a handler blocks the event loop, and the lease thread goes on."""
    queue = Calls(LIMITS)
    leases = Leases(queue, waiting(1, 60))
    finished = added(leases, 1)
    leases.answered(finished)
    assert leases.finished() == [finished]
    extending = asyncio.create_task(leases.extend_unfinished(queue))
    try:
        await until(lambda: queue.extended)
    finally:
        extending.cancel()
    assert queue.extended[0] == "m"
    assert not finished.lost
    deleting = asyncio.create_task(leases.deleter.run())
    await leases.deleter.flush()
    deleting.cancel()
    assert queue.deleted == ["m"]
    assert not leases._leases


@pytest.mark.parametrize("ended", [False, True])
async def test_an_arrived_message_is_extended_until_it_is_taken_and_left_to_others_once_its_lease_has_ended(
    ended: bool,
) -> None:
    queue = Calls(LIMITS)
    queue.ended = ended
    leases = Leases(queue, waiting(1, 0))
    await asyncio.to_thread(leases.arrive, [MESSAGE])
    (arrived,) = leases.unfinished()
    extending = asyncio.create_task(leases.extend_unfinished(queue))
    try:
        await until((lambda: arrived.lost) if ended else (lambda: len(queue.extended) > 3))
    finally:
        extending.cancel()
    assert leases.take(MESSAGE) == (None if ended else arrived)
    assert leases.unfinished() == []


async def test_messages_that_arrived_and_were_not_taken_are_released() -> None:
    queue = Calls(LIMITS)
    leases = Leases(queue, waiting(60, 0))
    leases.arrive([MESSAGE])
    await leases.release(leases.unfinished())
    assert queue.released == ["m"]
    assert leases.unfinished() == []


async def test_a_message_that_arrives_again_renews_its_lease_by_its_newer_receipt() -> None:
    leases = Leases(Calls(LIMITS), waiting(60, 0))
    lease = added(leases, 1)
    leases.arrive([replace(MESSAGE, receipt="newer")])
    (_, arrived) = leases.unfinished()
    assert leases.take(MESSAGE) is None
    assert (lease.message.receipt, lease.until) == ("newer", arrived.until)
    assert leases.unfinished() == [lease]
