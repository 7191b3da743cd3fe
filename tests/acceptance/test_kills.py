"""kill -9 at any process: nothing accepted is lost, nothing stays stuck."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.acceptance.conftest import RunningStack


def enqueue(stack: RunningStack, count: int, action: str = "echo", **payload: object) -> list[int]:
    batch = [
        {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": action, "payload": payload}, "id": n}
        for n in range(count)
    ]
    return [reply["result"]["id"] for reply in stack.post(batch)]


@pytest.mark.parametrize("victim", ["scheduler", "worker-1", "resulter", "submitter", "supervisor", "api", "sqs"])
def test_every_task_settles_although_a_process_is_killed(stack: RunningStack, victim: str) -> None:
    ids = enqueue(stack, 300, "sleep", seconds=0.01)
    pid = stack.pid_of(victim)
    os.kill(pid, signal.SIGKILL)
    stack.wait_for(lambda: stack.pid_of(victim) not in (pid, 0), what=f"a new {victim}")
    stack.wait_for(stack.answers, what="the api")
    ids += enqueue(stack, 100)
    tasks = stack.settled(ids, seconds=180)
    assert Counter(task["state"] for task in tasks) == {"SUCCESS": 400}


def test_every_task_settles_although_postgres_is_killed(stack: RunningStack) -> None:
    ids = enqueue(stack, 300, "sleep", seconds=0.01)
    pid = stack.pid_of("postgres")
    os.kill(pid, signal.SIGKILL)
    stack.wait_for(lambda: stack.pid_of("postgres") != pid, what="a new postgres")
    stack.wait_for(stack.answers, what="the api")
    assert Counter(task["state"] for task in stack.settled(ids, seconds=90)) == {"SUCCESS": 300}


def test_a_task_that_runs_longer_than_the_stale_time_runs_once(stack: RunningStack, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    task_id = stack.rpc("enqueue", {"action": "sleep", "payload": {"seconds": 15, "ledger": str(ledger)}})["id"]
    (task,) = stack.settled([task_id])
    assert (task["state"], task["attempts"]) == ("SUCCESS", 1)
    assert ledger.read_text().split() == [str(task_id)]


def test_workers_told_to_stop_under_load_finish_what_they_hold_and_nothing_runs_twice(
    stack: RunningStack, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    ids = enqueue(stack, 400, "sleep", seconds=0.2, ledger=str(ledger))
    stack.wait_for(ledger.exists, what="the first run")
    for name in ("worker-1", "worker-2", "scheduler", "resulter"):
        pid = stack.pid_of(name)
        os.kill(pid, signal.SIGTERM)
        stack.wait_for(lambda name=name, pid=pid: stack.pid_of(name) not in (pid, 0), what=f"a new {name}")
    tasks = stack.settled(ids, seconds=180)
    assert Counter(task["state"] for task in tasks) == {"SUCCESS": 400}
    assert {task["attempts"] for task in tasks} == {1}
    assert sorted(map(int, ledger.read_text().split())) == ids


def test_a_workflow_settles_in_order_although_each_process_is_killed_once(stack: RunningStack, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    random = Random(11)
    after: dict[str, list[str]] = {}
    for number in range(10_000):
        near = range(max(0, number - 300), number)  # so that it goes through many stages while they are killed
        after[f"s{number}"] = [f"s{n}" for n in random.sample(near, min(number, random.randint(1, 3)))]
    steps = [
        {"name": name, "action": "mark", "payload": {"name": name, "ledger": str(ledger)}, "after": before}
        for name, before in after.items()
    ]
    flow = stack.rpc("workflow.create", {"steps": steps, "key": "killed"})["id"]
    for victim in ("supervisor", "resulter", "scheduler", "worker-1", "api", "sqs", "postgres", "supervisor"):
        pid = stack.pid_of(victim)
        os.kill(pid, signal.SIGKILL)
        stack.wait_for(lambda victim=victim, pid=pid: stack.pid_of(victim) not in (pid, 0), what=f"a new {victim}")
        stack.wait_for(stack.answers, what="the api")
    assert stack.rpc("workflow.create", {"steps": steps, "key": "killed"}) == {
        "id": flow, "state": stack.rpc("workflow.status", {"id": flow})["state"], "duplicate": True,
    }  # fmt: skip

    def ended() -> bool:
        return stack.answers() and stack.rpc("workflow.status", {"id": flow, "limit": 1})["finished_at"] is not None

    stack.wait_for(ended, seconds=240, what="the end of the workflow")
    found = stack.rpc("workflow.status", {"id": flow, "limit": 1000})
    assert (found["state"], found["counts"]) == ("SUCCESS", {"SUCCESS": 10_000})
    # A step whose worker was killed runs again; none runs before each of those that it comes after has run.
    first: dict[str, int] = {}
    for place, name in enumerate(ledger.read_text().split()):
        first.setdefault(name, place)
    assert first.keys() == after.keys()
    assert all(first[before] < first[name] for name, names in after.items() for before in names)


def test_a_task_that_kills_its_worker_is_given_up_within_its_cap(stack: RunningStack) -> None:
    # The last test of its stack: until the queue gives its messages up, they go on killing workers.
    poison = stack.rpc("enqueue", {"action": "kill_worker", "max_attempts": 1})["id"]
    innocent = enqueue(stack, 20)
    (task,) = stack.settled([poison], seconds=240)
    assert (task["state"], task["attempts"]) == ("CRITICAL_ERROR", 1)
    assert {task["state"] for task in stack.settled(innocent, seconds=240)} == {"SUCCESS"}
