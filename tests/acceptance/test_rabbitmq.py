"""Real processes over a real RabbitMQ, some killed, and the broker taken away for a while."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import running
from tests.rabbitmq import WHY_NOT, RabbitMq, rabbitmq_in
from tests.waiting import wait_until


@pytest.fixture
def rabbitmq() -> Iterator[RabbitMq]:
    """A node of this test alone, which takes it away."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    with rabbitmq_in() as node:
        yield node


def test_every_task_settles_although_workers_schedulers_and_the_broker_die(
    rabbitmq: RabbitMq, data_path: Path, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    arguments = ("--workers", "2", "--app", "tests.acceptance.app", "--transport-url", rabbitmq.url)
    with running(data_path / "stack", *arguments) as stack:
        assert {entry["name"] for entry in stack.state["processes"]} >= {"worker-1", "worker-2", "postgres"}
        assert all(entry["name"] != "sqs" for entry in stack.state["processes"])
        ids: list[int] = []

        def enqueue(count: int) -> None:
            payload = {"seconds": 0.02, "ledger": str(ledger)}
            batch = [
                {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "sleep", "payload": payload}, "id": n}
                for n in range(count)
            ]
            ids.extend(reply["result"]["id"] for reply in stack.post(batch))

        for victim in ("worker-1", "scheduler", "resulter"):
            enqueue(400)
            pid = stack.pid_of(victim)
            os.kill(pid, signal.SIGKILL)
            stack.wait_for(lambda pid=pid, victim=victim: stack.pid_of(victim) not in (pid, 0), what=f"a new {victim}")
        enqueue(400)
        for take_away in (rabbitmq.stop, rabbitmq.kill):
            runs = len(ledger.read_text().split())
            wait_until(lambda runs=runs: len(ledger.read_text().split()) > runs, "a run before the broker goes")
            take_away()
            enqueue(200)
            rabbitmq.start()
            stack.wait_for(lambda: stack.rpc("stats") is not None, what="the api")
        assert len(ids) == 2000
        tasks = stack.settled(ids[:1000], seconds=240) + stack.settled(ids[1000:], seconds=240)
        assert Counter(task["state"] for task in tasks) == {"SUCCESS": 2000}
        assert set(map(int, ledger.read_text().split())) == set(ids)
        log = (stack.data_dir / "penstock.log").read_text()
        assert "guest:guest" not in log
