"""What a child process answers, without the process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from penstock.protocol.journal import decode_entry, read_error
from penstock.settings.model import load_settings
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.handlers.lifespan import Resources
from penstock.worker.handlers.outcomes import Fail
from penstock.worker.processes.channel import Channel, read
from penstock.worker.processes.child import _ChildRunner


class Sent:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []

    def send(self, *message: Any) -> None:
        self.messages.append(message)

    async def done(self) -> list[tuple[Any, ...]]:
        async with asyncio.timeout(10):
            while not self.messages or self.messages[-1][0] != "done":
                await asyncio.sleep(0.01)
        return self.messages[:-1]


@pytest.mark.parametrize("batch", [None, 10])
async def test_a_task_whose_claim_is_lost_before_its_start_is_answered_without_a_call(batch: int | None) -> None:
    called: list[Any] = []
    registry = Registry()
    if batch is None:

        @action("a", registry=registry, process=True)
        async def one(**params: Any) -> None:
            called.append(params)

    else:

        @action("a", registry=registry, process=True, batch=batch)
        async def several(calls: list[Call[dict[str, Any]]]) -> list[None]:
            called.extend(call.params for call in calls)
            return [None for _ in calls]

    sent = Sent()
    runner = _ChildRunner(load_settings(), cast(Channel, sent), Resources(in_child=True), registry)
    tasks = [[f"{number}:1", f'{{"n":{number}}}', None, False, "", float("inf")] for number in (1, 2)]
    for some in [tasks] if batch else [tasks[1:], tasks[:1]]:
        sent.messages.clear()
        runner.call("a", 10.0, some, None)
        runner.note("2:1", True, False, float("inf"))
        answers = {message[1]: message for message in await sent.done() if message[0] == "answer"}
        assert answers.keys() == {task[0] for task in some}
        assert all(
            claim_id == "1:1" or (text, problem) == ("", None) for _, claim_id, text, problem, _ in answers.values()
        )
    assert {"n": 1} in called
    runner.close()


async def test_what_goes_on_after_a_call_sends_no_output() -> None:
    """The worker reads the channel during calls alone: one that is full would hold the child up."""
    registry, contexts = Registry(), list[Context]()

    @action("a", registry=registry, process=True, output="chunks")
    async def act(ctx: Context) -> None:
        contexts.append(ctx)
        ctx.emit_sync("in time")

    sent = Sent()
    runner = _ChildRunner(load_settings(), cast(Channel, sent), Resources(in_child=True), registry)
    runner._outputs.flush_seconds = 0.01
    runner.call("a", 10.0, [["1:1", "{}", None, False, "", float("inf")]], None)
    (output,) = [message for message in await sent.done() if message[0] == "output"]
    assert "in time" in output[2]
    contexts[0].emit_sync("too late")
    await asyncio.sleep(0.05)
    assert sent.messages[-1][0] == "done"
    runner.close()


async def told_by(act: Callable[[Context], Awaitable[None]]) -> dict[str, list[Any]]:
    """The last message of each kind from a child whose handler it is, as the worker reads them."""
    registry = Registry()
    action("a", registry=registry, process=True)(act)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    runner = _ChildRunner(load_settings(), Channel(theirs), Resources(in_child=True), registry)
    runner.call("a", 30.0, [["1:1", "{}", None, False, "", float("inf")]], None)
    messages: list[Any] = []
    async with asyncio.timeout(10):
        while not messages or messages[-1][0] != "done":
            messages.append(await read(reader))
    runner.close()
    writer.close()
    theirs.close()
    return {message[0]: message for message in messages}


async def test_an_error_and_a_note_that_are_no_characters_are_reported() -> None:
    async def act(ctx: Context) -> None:
        await ctx.progress(note="caf\udce9")
        raise ValueError("caf\udce9")

    told = await told_by(act)
    assert told["progress"][3] == "caf\ufffd"
    assert told["answer"][3][:2] == ["ValueError", "caf\ufffd"]


class Percent(float):
    """As the numbers of numpy are."""


class Markup(str):
    def __getitem__(self, key: Any) -> Markup:
        return Markup(super().__getitem__(key))


async def test_progress_in_numbers_and_texts_of_libraries_is_reported() -> None:
    async def act(ctx: Context) -> None:
        await ctx.progress(Percent(12.5), Markup("an eighth"))

    told = await told_by(act)
    assert told["progress"][2:] == [12.5, "an eighth"]
    assert told["answer"][3] is None


async def test_the_report_of_a_failed_step_can_be_read_though_its_error_holds_no_characters() -> None:
    registry = Registry()

    @action("a", registry=registry, process=True)
    async def act(ctx: Context) -> None:
        await ctx.step("open", refuse)

    def refuse() -> None:
        raise Fail("no file caf\udce9.txt")

    sent = Sent()
    runner = _ChildRunner(load_settings(), cast(Channel, sent), Resources(in_child=True), registry)
    runner.call("a", 30.0, [["1:1", "{}", None, False, "", float("inf")]], None)
    async with asyncio.timeout(10):
        while not (steps := [message for message in sent.messages if message[0] == "step"]):
            await asyncio.sleep(0.01)
    assert read_error(decode_entry(steps[0][3]).error)[:2] == ("Fail", "no file caf\ufffd.txt")
    runner.recorded("1:1", 1, None)
    await sent.done()
    runner.close()
