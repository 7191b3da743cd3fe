"""`penstock worker --reload`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.protocol.reports import Succeeded, decode_reports
from penstock.protocol.requests import encode_call
from penstock.settings.model import Settings
from tests.integration.test_stopping import Process

PATIENCE_SECONDS = 60
APP = """
from penstock import action


@action
async def version() -> int:
    return {version}
"""


async def test_a_changed_file_is_loaded_and_a_broken_one_waits_for_its_correction(
    settings: Settings, tmp_path: Path, outbound: SqsQueue, results: SqsQueue
) -> None:
    app = tmp_path / "reloaded_app.py"

    async def answer(task_id: int) -> object:
        await outbound.send([Outgoing(encode_call(task_id, 1, "version", "{}"))])
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                messages = await results.receive(wait_seconds=1, visibility_seconds=30)
                await results.delete(messages)
                for message in messages:
                    for report in decode_reports(message.body, batch_limit=100):
                        if isinstance(report, Succeeded) and report.task_id == task_id:
                            return json.loads(report.result)

    app.write_text(APP.format(version=1), "utf-8")
    process = Process(settings, "worker", "--app", "reloaded_app", "--reload", folder=tmp_path)
    try:
        assert await answer(1) == 1
        app.write_text("no python", "utf-8")
        await asyncio.to_thread(process.until, "event=reloading", "files=reloaded_app.py")
        await asyncio.to_thread(process.until, "--app reloaded_app cannot be loaded")
        app.write_text(APP.format(version=22), "utf-8")
        assert await answer(2) == 22
    finally:
        code = await asyncio.to_thread(process.stop, PATIENCE_SECONDS)
    assert code == 0, process.lines


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_no_worker_goes_on_without_the_process_that_starts_it_again(
    settings: Settings, tmp_path: Path, outbound: SqsQueue, results: SqsQueue, number: signal.Signals
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("nohup runs these tests, and what it runs is to go on")
    (tmp_path / "reloaded_app.py").write_text(APP.format(version=1), "utf-8")
    process = Process(settings, "worker", "--app", "reloaded_app", "--reload", folder=tmp_path)
    process.until("event=process_started")
    (worker,) = psutil.Process(process.pid).children()
    assert process.stop(PATIENCE_SECONDS, number) == (0 if number is signal.SIGHUP else -number)
    assert psutil.wait_procs([worker], timeout=PATIENCE_SECONDS)[1] == []
