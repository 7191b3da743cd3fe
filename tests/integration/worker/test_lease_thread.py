"""A worker whose event loop a handler blocks: its leases and heartbeats go on, and past the time limit it ends."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.protocol.batching import join_batch
from penstock.protocol.reports import Failed, Progress, Report, Succeeded, decode_reports
from penstock.protocol.requests import encode_call
from penstock.settings.model import Settings
from tests.integration.test_stopping import Process

PATIENCE_SECONDS = 60.0
VISIBILITY_SECONDS = 3
APP = """
import time

from penstock import Context, action


@action
async def block(ctx: Context, seconds: float) -> bool:
    with open("runs", "a") as runs:
        runs.write(f"{ctx.task_id}\\n")
    time.sleep(seconds)
    return ctx.lease_lost


@action(timeout=1)
async def hang(ctx: Context) -> None:
    time.sleep(600)


@action
async def wait(ctx: Context) -> None:
    import asyncio
    await asyncio.sleep(600)
"""


async def reports_until(results: SqsQueue, wanted: int, rival: SqsQueue | None = None) -> list[Report]:
    """What workers report, up to so many outcomes. rival: gives no message to others, once one is worked on."""
    found: list[Report] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(isinstance(report, Succeeded | Failed) for report in found) < wanted:
        assert time.monotonic() < deadline, found
        messages = await results.receive(wait_seconds=1, visibility_seconds=30)
        found += [report for message in messages for report in decode_reports(message.body, batch_limit=1000)]
        await results.delete(messages)
        if rival is not None and found:
            assert await rival.receive(wait_seconds=0, visibility_seconds=30) == []
    return found


def worker(settings: Settings, folder: Path) -> Process:
    (folder / "blocking_app.py").write_text(APP, "utf-8")
    short = {"PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": str(VISIBILITY_SECONDS), "PENSTOCK_HEARTBEAT_SECONDS": "1"}
    return Process(settings, "worker", "--app", "blocking_app", folder=folder, environment=short)


async def test_tasks_that_block_the_loop_run_once_each_and_their_worker_heartbeats(
    settings: Settings, tmp_path: Path, outbound: SqsQueue, results: SqsQueue
) -> None:
    seconds = 3 * VISIBILITY_SECONDS / 2  # two of them: the second message waits for three visibility timeouts
    await outbound.send([Outgoing(encode_call(n, 1, "block", json.dumps({"seconds": seconds}))) for n in (1, 2)])
    process = worker(settings, tmp_path)
    try:
        found = await reports_until(results, 2, rival=outbound)
        await asyncio.to_thread(process.until, "event=event_loop_blocked", "action=block", "time.sleep(seconds)")
    finally:
        code = await asyncio.to_thread(process.stop, PATIENCE_SECONDS)
    assert code == 0
    assert sorted((tmp_path / "runs").read_text("utf-8").split()) == ["1", "2"]
    assert [report.result for report in found if isinstance(report, Succeeded)] == ["false", "false"]
    assert [report for report in found if isinstance(report, Progress)]
    assert (await outbound.depth()).total == 0


async def test_a_loop_blocked_past_the_time_limit_ends_the_worker_and_leaves_nothing_behind(
    settings: Settings, tmp_path: Path, outbound: SqsQueue, results: SqsQueue
) -> None:
    body = join_batch([encode_call(1, 1, "wait", "{}"), encode_call(2, 1, "hang", "{}")])
    await outbound.send([Outgoing(body), Outgoing(encode_call(3, 1, "wait", "{}"))])
    process = worker(settings, tmp_path)
    found = await reports_until(results, 3)
    line = await asyncio.to_thread(process.until, "event=worker_stuck", "action=hang")
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
