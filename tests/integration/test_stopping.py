"""Processes as they are started in production: what a worker logs, and how an idle process stops."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.protocol.reports import decode_reports
from penstock.protocol.requests import encode_call
from penstock.settings.model import Settings
from tests.forking import forked_commands

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 20  # the longest that SQS has; a process that waits for it is found out
APP = """
import asyncio
import logging

from penstock import Context, action

logger = logging.getLogger(__name__)


@action
def plain(ctx: Context) -> None:
    logger.info("in a thread")
    try:
        1 / 0
    except ZeroDivisionError:
        logger.exception("divided")


@action
async def on_loop(ctx: Context) -> None:
    await asyncio.to_thread(logger.info, "in a thread of its own")
    raise LookupError("no luck")
"""


class Process:
    """A process of Penstock with the test's settings, its log lines read as they come."""

    def __init__(
        self, settings: Settings, *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        environment = {
            "PENSTOCK_DATABASE_URL": settings.require_database_url,
            "PENSTOCK_SQS_ENDPOINT_URL": settings.sqs_endpoint_url or "",
            "PENSTOCK_AWS_REGION": "us-east-1",
            "PENSTOCK_INBOUND_QUEUE": settings.inbound_queue,
            "PENSTOCK_OUTBOUND_QUEUE": settings.outbound_queue,
            "PENSTOCK_RESULTS_QUEUE": settings.results_queue,
            "PENSTOCK_RECEIVE_WAIT_SECONDS": str(POLL_SECONDS),
            "PENSTOCK_HTTP_PORT": "0",
            "PENSTOCK_METRICS_PORT": "0",
            "PYTHONPATH": str(ROOT / "services"),
            **(environment or {}),
        }
        self.lines: list[str] = []
        with forked_commands():
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "penstock", *arguments],
                cwd=folder, env=os.environ | environment, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    def until(self, *texts: str) -> str:
        """Read lines until one has all the texts, and return it."""
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self.lines.append(line)
            if all(text in line for text in texts):
                return line
        raise AssertionError(f"no line with {texts} in {self.lines}")

    @property
    def pid(self) -> int:
        return self._popen.pid

    def stop(self, seconds: float, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; returns its exit code."""
        self._popen.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Its exit code, once it has ended."""
        try:
            _, rest = self._popen.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            raise
        self.lines += rest.splitlines()
        return self._popen.returncode


@pytest.mark.parametrize("name", ["worker", "submitter", "resulter", "scheduler", "supervisor", "api"])
async def test_an_idle_process_does_not_wait_for_its_long_poll_to_stop(
    name: str, settings: Settings, tmp_path: Path, outbound: SqsQueue, inbound: SqsQueue, results: SqsQueue
) -> None:
    (tmp_path / "idle_app.py").write_text(APP, "utf-8")
    process = Process(settings, name, *(("--app", "idle_app") if name == "worker" else ()), folder=tmp_path)
    await asyncio.to_thread(process.until, "event=process_started")
    await asyncio.sleep(2)  # by now it waits
    assert await asyncio.to_thread(process.stop, POLL_SECONDS / 2) == 0, process.lines
    if name == "worker":
        (announced,) = await results.receive(wait_seconds=5, visibility_seconds=30)
        assert '"method":"announce"' in announced.body
    # The poll that was cut off takes nothing with it.
    for queue in (outbound, inbound, results):
        await queue.send([Outgoing("[]")])
        assert len(await queue.receive(wait_seconds=5, visibility_seconds=30)) == 1


async def test_a_worker_writes_what_handlers_log_and_names_their_task(
    settings: Settings, tmp_path: Path, outbound: SqsQueue, results: SqsQueue
) -> None:
    (tmp_path / "logging_app.py").write_text(APP, "utf-8")
    calls = encode_call(7, 2, "plain", "{}"), encode_call(8, 3, "on_loop", "{}")
    await outbound.send([Outgoing(call, {}) for call in calls])
    process = Process(settings, "worker", "--app", "logging_app", "--concurrency", "1", "--loops", "3", folder=tmp_path)
    try:
        found = 0
        while found < len(calls):
            messages = await results.receive(wait_seconds=20, visibility_seconds=30)
            assert messages, process.lines
            found += sum(hasattr(r, "task_id") for m in messages for r in decode_reports(m.body, batch_limit=100))
    finally:
        code = await asyncio.to_thread(process.stop, POLL_SECONDS / 2)
    assert code == 0
    log = "\n".join(process.lines)
    for line in (
        'level=info event=log process=worker logger=logging_app message="in a thread" task_id=7 claim=2 action=plain',
        'event=log process=worker logger=logging_app message="in a thread of its own" task_id=8 claim=3 action=on_loop',
        "level=warning event=task_failed process=worker task_id=8 claim=3 action=on_loop error=LookupError",
        "passes=3",
    ):
        assert line in log
    (divided,) = [line for line in process.lines if "divided" in line]
    assert "level=error" in divided
    assert "ZeroDivisionError: division by zero" in divided
    assert "task_id=7 claim=2" in divided
    assert "botocore" not in log


def test_a_worker_without_handlers_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "worker"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "services")}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "this worker has no handlers" in done.stderr
    assert "--app" in done.stderr
