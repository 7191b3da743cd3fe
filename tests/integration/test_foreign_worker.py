"""A worker that knows nothing of Penstock serves the outbound queue."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.protocol.reports import Announced, Failed, Hints, Report, Succeeded, decode_reports
from penstock.protocol.requests import encode_call, join_batch
from penstock.settings.model import Settings

SCRIPT = Path(__file__).parents[1] / "acceptance" / "foreign_worker.py"


@pytest.fixture
def database_url() -> str:
    """No test here touches Postgres."""
    return "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
async def foreign_worker(
    settings: Settings, outbound: SqsQueue, results: SqsQueue, tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(SCRIPT), str(settings.sqs_endpoint_url), await outbound.url(), await results.url()]
    with (tmp_path / "log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path)
        yield process
        process.kill()
        process.wait()


def test_its_script_imports_nothing_of_ours() -> None:
    imported = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported == {"botocore", "json", "sys"}


async def test_single_requests_and_batches_are_answered_in_the_wire_format(
    foreign_worker: subprocess.Popen[bytes], outbound: SqsQueue, results: SqsQueue
) -> None:
    batch = [encode_call(1, 11, "shout", '{"text":"a"}'), encode_call(2, 12, "whisper", "{}")]
    await outbound.send([Outgoing(join_batch(batch)), Outgoing(encode_call(3, 13, "shout", '{"text":"b"}'))])
    reports: list[Report] = []
    deadline = time.monotonic() + 60
    await outbound.send([Outgoing(encode_call(4, 14, "call", "{}"))])
    while len(reports) < 6:
        assert time.monotonic() < deadline, f"two announcements and four answers did not come, only {reports}"
        assert foreign_worker.poll() is None, "the worker ended"
        messages = await results.receive(wait_seconds=1, visibility_seconds=30)
        for message in messages:
            reports += decode_reports(message.body, batch_limit=100)
        await results.delete(messages)
    shout, call, first, second, third, fourth = sorted(reports, key=lambda report: getattr(report, "task_id", 0))
    assert {shout, call} == {Announced(name, "foreign", "7", None, '{"type": "object"}') for name in ("shout", "call")}
    assert first == Succeeded(1, 11, None, '"A!"')
    assert third == Succeeded(3, 13, None, '"B!"')
    assert isinstance(second, Failed)
    assert (second.task_id, second.claim) == (2, 12)
    assert json.loads(second.error)["code"] == -32601
    assert second.hints.unknown_action  # by the code alone: it is given back
    assert isinstance(fourth, Failed)
    assert fourth.hints == Hints(retry_after=600, snooze=True, hold="key")
