"""Faults on purpose: off by default, as often as asked, and of every kind that happens on its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.brokers.base import Depth, Limits, Message, Outgoing, SendReport
from penstock.brokers.chaos import FaultyQueue
from penstock.protocol.errors import InjectedFault, Unavailable
from penstock.runtime.chaos import EDGES, Faults, faults_of
from penstock.settings.model import load_settings
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Context

MESSAGES = [Message(str(n), f"r{n}", "{}", 1, None, {}) for n in range(10)]
CONTEXT = Context(1, 1, "any")


class Calls:
    """A queue that notes what reaches it."""

    label = "outbound"
    limits = Limits(1_048_576, 10, 43_200)

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.deleted: list[Message] = []
        self.extended: list[Message] = []

    async def send(self, messages: Sequence[Outgoing]) -> SendReport:
        self.sent += messages
        return SendReport([], None)

    async def receive(self, *, wait_seconds: int, visibility_seconds: int) -> list[Message]:
        return list(MESSAGES)

    async def delete(self, messages: Sequence[Message]) -> list[Message]:
        self.deleted += messages
        return []

    async def extend(self, messages: Sequence[Message], seconds: int) -> list[Message]:
        self.extended += messages
        return []

    async def release(self, messages: Sequence[Message]) -> None:
        self.extended += messages

    async def depth(self) -> Depth:
        return Depth(0, 0, 0)


def test_no_fault_is_asked_for_by_default() -> None:
    assert faults_of(load_settings(), "worker") is None


@pytest.mark.parametrize("edge", EDGES)
def test_one_setting_is_enough_to_have_faults(edge: str) -> None:
    faults = faults_of(load_settings(**{f"chaos_{edge}": 1}), "worker")
    assert faults is not None
    assert [other for other in EDGES if faults.strikes(other)] == [edge]


def test_faults_come_as_often_as_asked_and_the_same_by_the_same_seed() -> None:
    def series(process: str) -> list[bool]:
        faults = Faults(process, {"send": 0.1}, seed=7)
        return [faults.strikes("send") for _ in range(5000)]

    assert series("worker") == series("worker") != series("scheduler")
    assert 400 < sum(series("worker")) < 600


async def test_a_send_that_fails_may_have_gone_all_the_same_and_tells_no_success_that_was_none() -> None:
    queue, went_all_the_same, failed_in_part = Calls(), 0, 0
    faulty = FaultyQueue(queue, Faults("scheduler", {"send": 1}, seed=1))
    for _ in range(200):
        queue.sent = []
        outgoing = [Outgoing(str(n)) for n in range(10)]
        report = await faulty.send(outgoing)
        arrived = {int(message.body) for message in queue.sent}
        assert arrived | set(report.failed) == set(range(10))
        assert (report.reason is not None) == bool(report.failed)
        went_all_the_same += bool(arrived & set(report.failed))
        failed_in_part += 0 < len(report.failed) < 10
    assert went_all_the_same
    assert failed_in_part


async def test_a_delete_that_fails_names_every_message_that_is_still_there() -> None:
    queue = Calls()
    faulty = FaultyQueue(queue, Faults("worker", {"delete": 1, "extend": 1}, seed=2))
    for _ in range(200):
        queue.deleted, queue.extended = [], []
        failed = await faulty.delete(MESSAGES)
        assert {m.id for m in queue.deleted} | {m.id for m in failed} == {m.id for m in MESSAGES}
        failed = await faulty.extend(MESSAGES, 5)
        assert {m.id for m in queue.extended} | {m.id for m in failed} == {m.id for m in MESSAGES}


async def test_a_receive_fails_and_a_duplicate_is_delivered_with_the_next() -> None:
    with pytest.raises(Unavailable, match="PENSTOCK_CHAOS_RECEIVE"):
        await FaultyQueue(Calls(), Faults("worker", {"receive": 1})).receive(wait_seconds=0, visibility_seconds=5)
    twice = FaultyQueue(Calls(), Faults("worker", {"duplicate": 1}))
    assert await twice.receive(wait_seconds=0, visibility_seconds=5) == MESSAGES
    assert await twice.receive(wait_seconds=0, visibility_seconds=5) == MESSAGES + MESSAGES


async def test_a_handler_fails_before_its_work_or_after_it() -> None:
    registry, done = Registry(), []

    @action("async", registry=registry)
    async def one(ctx: Context) -> None:
        done.append("async")

    @action("plain", registry=registry)
    def other(ctx: Context) -> None:
        done.append("plain")

    faulty = registry.inside(Faults("worker", {"handler": 1}, seed=3).around)
    for _ in range(50):
        handler = faulty.get("async")
        assert handler is not None
        with pytest.raises(InjectedFault):
            await handler.function(CONTEXT)
        plain = faulty.get("plain")
        assert plain is not None
        with pytest.raises(InjectedFault):
            plain.function(CONTEXT)
    assert 5 < done.count("async") < 45
    assert 5 < done.count("plain") < 45
    untouched = registry.get("async")
    assert untouched is not None
    await untouched.function(CONTEXT)
