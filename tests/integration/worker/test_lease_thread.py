"""A worker whose event loop a handler blocks: its leases and heartbeats go on, and past the time limit it ends."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from penstock.brokers.base import Outgoing, Queue, Transport
from penstock.brokers.opening import create_queues, open_transport
from penstock.protocol.reports import Failed, Progress, Report, Succeeded, decode_reports
from penstock.protocol.requests import encode_call, join_batch
from penstock.settings.model import Settings, load_settings
from tests.brokers import KINDS, broker_settings
from tests.integration.test_stopping import Process

PATIENCE_SECONDS = 60.0
VISIBILITY_SECONDS = 3
APP = """
import time

from penstock import Context, action
from penstock.runtime import health

health._STALLED_AFTER_SECONDS = 1.0


@action
async def block(ctx: Context, seconds: float) -> bool:
    with open("runs", "a") as runs:
        runs.write(f"{ctx.task_id}\\n")
    time.sleep(seconds)
    return ctx.lease_lost


@action(timeout=1)
async def hang(ctx: Context) -> None:
    time.sleep(600)


@action(timeout=1)
async def fan_out(ctx: Context) -> None:
    import asyncio
    await asyncio.gather(hang(ctx), asyncio.sleep(0))


@action
async def wait(ctx: Context) -> None:
    import asyncio
    await asyncio.sleep(600)
"""
SHORT_POLLS = """
from penstock.brokers.kafka import group_reader

config = group_reader.consumer_config
group_reader.consumer_config = lambda *given: config(*given) | {"max.poll.interval.ms": 2000}
"""


@pytest.fixture
def kind() -> str:
    return "sqs"


@pytest.fixture
def settings(kind: str, request: pytest.FixtureRequest) -> Settings:
    return load_settings(
        **broker_settings(kind, request, f"t-{secrets.token_hex(4)}"),
        database_url="postgresql://127.0.0.1/unused",
    )


@pytest.fixture
async def transport(settings: Settings) -> AsyncIterator[Transport]:
    await create_queues(settings)
    transport = open_transport(settings)
    yield transport
    await transport.close()


@pytest.fixture
def outbound(transport: Transport, settings: Settings) -> Queue:
    return transport.queue(settings.outbound_queue, label="outbound")


@pytest.fixture
def results(transport: Transport, settings: Settings) -> Queue:
    return transport.queue(settings.results_queue, label="results")


async def reports_until(results: Queue, wanted: int, rival: Queue | None = None) -> list[Report]:
    """What workers report, up to the outcomes of so many tasks. rival: has no message, once one is worked on."""
    found: list[Report] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len({report.task_id for report in found if isinstance(report, Succeeded | Failed)}) < wanted:
        assert time.monotonic() < deadline, found
        messages = await results.receive(wait_seconds=1, visibility_seconds=30)
        found += [report for message in messages for report in decode_reports(message.body, batch_limit=1000)]
        await results.delete(messages)
        if rival is not None and any(isinstance(report, Progress) for report in found):
            assert await rival.receive(wait_seconds=0, visibility_seconds=30) == []
    return found


def worker(settings: Settings, folder: Path) -> Process:
    (folder / "blocking_app.py").write_text(APP, "utf-8")
    (folder / "short_polls.py").write_text(SHORT_POLLS, "utf-8")
    environment = {
        "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": str(VISIBILITY_SECONDS), "PENSTOCK_HEARTBEAT_SECONDS": "1",
    }  # fmt: skip
    apps = ["--app", "blocking_app"]
    if settings.transport.kind != "sqs":
        environment["PENSTOCK_TRANSPORT_URL"] = settings.transport.text
    if settings.transport.kind == "kafka":
        environment["PENSTOCK_KAFKA_SESSION_TIMEOUT_SECONDS"] = "2"
        apps += ["--app", "short_polls"]
    return Process(settings, "worker", *apps, folder=folder, environment=environment)


@pytest.mark.parametrize("kind", KINDS)
async def test_tasks_that_block_the_loop_run_once_each_and_their_worker_heartbeats(
    kind: str, settings: Settings, tmp_path: Path, outbound: Queue, results: Queue
) -> None:
    seconds = 3 * VISIBILITY_SECONDS / 2  # two of them: the second message waits for three visibility timeouts
    await outbound.send([Outgoing(encode_call(n, 1, "block", json.dumps({"seconds": seconds}))) for n in (1, 2)])
    process = worker(settings, tmp_path)
    try:
        # With another member, Kafka would move partitions, and deliver again what is leased of them.
        found = await reports_until(results, 2, rival=None if kind == "kafka" else outbound)
        await asyncio.to_thread(process.until, "event=event_loop_blocked", "action=block", "time.sleep(seconds)")
    finally:
        code = await asyncio.to_thread(process.stop, PATIENCE_SECONDS)
    assert code == 0
    assert sorted((tmp_path / "runs").read_text("utf-8").split()) == ["1", "2"]
    results_of = {report.task_id: report.result for report in found if isinstance(report, Succeeded)}
    assert results_of == {1: "false", 2: "false"}
    assert [report for report in found if isinstance(report, Progress)]
    assert (await outbound.depth()).total == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kafka"])
async def test_a_message_that_arrives_while_the_loop_is_blocked_is_no_other_workers(
    kind: str, settings: Settings, tmp_path: Path, outbound: Queue, results: Queue
) -> None:
    await outbound.send([Outgoing(encode_call(1, 1, "block", json.dumps({"seconds": 3 * VISIBILITY_SECONDS})))])
    process = worker(settings, tmp_path)
    try:
        await asyncio.to_thread(process.until, "event=event_loop_blocked", "action=block")
        await outbound.send([Outgoing(encode_call(2, 1, "block", json.dumps({"seconds": 0})))])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await outbound.depth()).visible:  # until the worker's long poll has it
                await asyncio.sleep(0.05)
        await reports_until(results, 2, rival=outbound)
    finally:
        code = await asyncio.to_thread(process.stop, PATIENCE_SECONDS)
    assert code == 0
    assert (tmp_path / "runs").read_text("utf-8").split() == ["1", "2"]
    assert (await outbound.depth()).total == 0


async def test_a_worker_is_alive_while_its_handler_blocks_the_loop_within_its_time_limit(
    settings: Settings, tmp_path: Path, outbound: Queue
) -> None:
    await outbound.send([Outgoing(encode_call(1, 1, "block", json.dumps({"seconds": 4})))])
    process = worker(settings, tmp_path)
    try:
        url = (await asyncio.to_thread(process.until, "event=metrics_listening")).rstrip().rpartition("url=")[2]
        await asyncio.to_thread(process.until, "event=event_loop_blocked", "action=block")
        await asyncio.sleep(1.5)  # longer than the loop may stand still for no such reason
        answer = await asyncio.to_thread(httpx.get, f"{url}/healthz")
    finally:
        code = await asyncio.to_thread(process.stop, PATIENCE_SECONDS)
    assert (answer.status_code, answer.text) == (200, "ok\n")
    assert code == 0


async def test_a_response_does_not_wait_for_the_handlers_that_block_the_loop_after_it(
    settings: Settings, tmp_path: Path, outbound: Queue, results: Queue
) -> None:
    seconds = json.dumps({"seconds": 2 * VISIBILITY_SECONDS})
    await outbound.send([Outgoing(join_batch([encode_call(n, 1, "block", seconds) for n in (1, 2, 3)]))])
    process = worker(settings, tmp_path)
    try:
        found = await reports_until(results, 1)
        assert len((tmp_path / "runs").read_text("utf-8").split()) == 2
        found += await reports_until(results, 3)  # the event loop sends the first once more
    finally:
        code = await asyncio.to_thread(process.stop, PATIENCE_SECONDS)
    assert code == 0
    assert {report.task_id for report in found if isinstance(report, Succeeded)} == {1, 2, 3}
    assert (await outbound.depth()).total == 0


@pytest.mark.parametrize("blocking", ["hang", "fan_out"])
async def test_a_loop_blocked_past_the_time_limit_ends_the_worker_and_leaves_nothing_behind(
    settings: Settings, tmp_path: Path, outbound: Queue, results: Queue, blocking: str
) -> None:
    body = join_batch([encode_call(1, 1, "wait", "{}"), encode_call(2, 1, blocking, "{}")])
    await outbound.send([Outgoing(body), Outgoing(encode_call(3, 1, "wait", "{}"))])
    process = worker(settings, tmp_path)
    found = await reports_until(results, 3)
    line = await asyncio.to_thread(process.until, "event=worker_stuck", f"action={blocking}")
    assert "time.sleep(600)" in line
    assert await asyncio.to_thread(process.wait, PATIENCE_SECONDS) == 1
    failed = {report.task_id: report for report in found if isinstance(report, Failed)}
    errors = {task_id: json.loads(report.error)["data"] for task_id, report in failed.items()}
    assert {task_id: data["type"] for task_id, data in errors.items()} == {
        1: "WorkerStuck", 2: "TaskTimeout", 3: "WorkerStuck",
    }  # fmt: skip
    assert "time.sleep(600)" in errors[2]["traceback"]
    assert [failed[n].hints.not_begun for n in (1, 2, 3)] == [True, False, True]  # the others' attempts do not count
    assert (await outbound.depth()).total == 0
