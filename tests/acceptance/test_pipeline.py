"""The whole pipeline as its users meet it: real processes, a plain SQS client, a plain HTTP client.

All but the workers run in one process here, as `penstock run` does it; tests/acceptance/test_kills.py has one each.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.acceptance.conftest import ROOT, WORKERS, RunningStack, penstock, running


@pytest.fixture(scope="module")
def stack(module_data_path: Path) -> Iterator[RunningStack]:
    with running(module_data_path / "stack", "--one-process", *WORKERS) as up:
        yield up


def test_a_plain_sqs_client_submits_and_the_task_succeeds(stack: RunningStack) -> None:
    body = '{"jsonrpc":"2.0","method":"submit:export","params":{"objectID":23}}'
    stack.sqs().send_message(QueueUrl=stack.state["queues"]["inbound"], MessageBody=body)
    found = stack.wait_for(lambda: stack.rpc("list", {"action": "export", "state": "SUCCESS"})["tasks"])
    assert [task["attempts"] for task in found] == [1]
    again = stack.rpc("submit:export", {"objectID": "23"})
    assert again == {"id": found[0]["id"], "state": "SUCCESS", "duplicate": True}


def test_enqueues_over_http_and_through_the_queue_meet_in_the_same_states(stack: RunningStack) -> None:
    batch = [
        {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "add", "payload": {"a": n, "b": 1}}, "id": n}
        for n in range(50)
    ]
    ids = [reply["result"]["id"] for reply in stack.post(batch)]
    for task in batch:
        task["params"]["unique_key"] = f"through-the-queue-{task['id']}"
    stack.sqs().send_message(QueueUrl=stack.state["queues"]["inbound"], MessageBody=json.dumps(batch))
    assert [task["result"] for task in stack.settled(ids)] == [n + 1 for n in range(50)]
    stack.wait_for(lambda: len(stack.rpc("list", {"action": "add", "state": "SUCCESS", "limit": 200})["tasks"]) == 100)


def test_an_action_that_always_fails_is_given_up_after_ten_attempts_with_growing_delays(stack: RunningStack) -> None:
    task_id = stack.rpc("enqueue", {"action": "always_fails", "payload": {"n": 1}})["id"]
    (task,) = stack.settled([task_id], seconds=90)
    assert (task["state"], task["attempts"]) == ("CRITICAL_ERROR", 10)
    assert task["error"]["data"]["type"] == "RuntimeError"
    assert "no luck" in task["error"]["data"]["traceback"]
    times = [datetime.fromisoformat(failure["at"]) for failure in task["failures"]]
    assert [failure["attempt"] for failure in task["failures"]] == list(range(1, 11))
    gaps = [(after - before).total_seconds() for before, after in itertools.pairwise(times)]
    assert all(gap >= 0.1 * 1.5**n for n, gap in enumerate(gaps))
    assert all(late > early for early, late in zip(gaps, gaps[3:], strict=False))


def test_what_cannot_be_understood_is_kept_listed_and_purged(stack: RunningStack) -> None:
    queue = stack.state["queues"]["inbound"]
    good = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "echo", "unique_key": "neighbour"}}
    bad = {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "echo", "priority": "high"}}
    stack.sqs().send_message(QueueUrl=queue, MessageBody="{not json")
    stack.sqs().send_message(QueueUrl=queue, MessageBody=json.dumps([bad, good]))
    stack.wait_for(lambda: len(stack.rpc("rejected.list")["rejected"]) == 2)
    stack.wait_for(lambda: stack.rpc("list", {"action": "echo", "state": "SUCCESS"})["tasks"])
    shown = json.loads(penstock("rejected", "list", "--json", "--data-dir", str(stack.data_dir)))["rejected"]
    assert {entry["source"] for entry in shown} == {"inbound"}
    assert any("priority" in entry["reason"] for entry in shown)
    assert any(entry["body"] == "{not json" for entry in shown)
    ids = [entry["id"] for entry in shown]
    assert stack.rpc("rejected.retry", {"ids": ids})["retried"] == 0
    assert stack.rpc("rejected.purge", {"ids": [entry["id"] for entry in stack.rpc("rejected.list")["rejected"]]})
    assert stack.rpc("rejected.list")["rejected"] == []


def test_an_urgent_task_overtakes_a_backlog_and_a_delayed_one_waits(stack: RunningStack) -> None:
    delayed = stack.rpc("enqueue", {"action": "echo", "delay": 3600})["id"]
    urgent = stack.rpc("enqueue", {"action": "echo", "priority": 100})["id"]
    assert stack.settled([urgent])[0]["state"] == "SUCCESS"
    assert stack.rpc("status", {"id": delayed})["state"] == "SCHEDULED"
    assert stack.rpc("cancel", {"id": delayed}) == {"id": delayed, "state": "CANCELLED"}


def test_a_running_task_that_is_cancelled_is_told_to_stop(stack: RunningStack, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    task_id = stack.rpc("enqueue", {"action": "until_cancelled", "payload": {"ledger": str(ledger)}})["id"]
    stack.wait_for(lambda: ledger.read_text() == "begun\n", what="the handler")
    stack.rpc("cancel", {"id": task_id, "reason": "no longer wanted"})
    stack.wait_for(lambda: ledger.read_text() == "begun\nstopped\n", what="the handler's end")
    task = stack.rpc("status", {"id": task_id})
    assert (task["state"], task["reason"]) == ("CANCELLED", "no longer wanted")


def test_a_task_waits_while_its_worker_is_killed_and_succeeds_by_its_event(stack: RunningStack, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    ids = [stack.rpc("enqueue", {"action": "ask", "payload": {"ledger": str(ledger)}})["id"] for _ in range(3)]

    def waiting() -> bool:
        return all(task["state"] == "WAITING" for task in stack.rpc("status", {"ids": ids}))

    stack.wait_for(waiting, what="three tasks that wait")
    for name in ("worker-1", "worker-2", "run"):
        os.kill(stack.pid_of(name), signal.SIGKILL)
    stack.wait_for(stack.answers, what="the api")
    by_task = {int(line.split(":")[1]): line for line in ledger.read_text().splitlines()}
    shown = stack.rpc("status", {"id": ids[0], "detail": True})["waits_for"]["token"]
    assert shown == by_task[ids[0]]
    printed = json.loads(
        penstock("task", "complete", shown, '{"by":"Ann"}', "--json", "--data-dir", str(stack.data_dir))
    )
    assert printed == {"id": ids[0], "state": "SUCCESS", "kept": False, "duplicate": False}
    answer = {"jsonrpc": "2.0", "method": "task.complete", "params": {"token": by_task[ids[1]], "result": 2}}
    stack.sqs().send_message(QueueUrl=stack.state["queues"]["inbound"], MessageBody=json.dumps(answer))
    penstock("task", "fail", by_task[ids[2]], "not at home", "--final", "--data-dir", str(stack.data_dir))
    settled = stack.settled(ids)
    assert [(task["state"], task["attempts"]) for task in settled] == [
        ("SUCCESS", 1), ("SUCCESS", 1), ("CRITICAL_ERROR", 1)
    ]  # fmt: skip
    assert [task["result"] for task in settled] == [{"by": "Ann"}, 2, None]


def test_every_task_settles_although_the_one_process_is_killed(stack: RunningStack) -> None:
    names = {entry["name"] for entry in stack.state["processes"]}
    assert names == {"run", "worker-1", "worker-2", "postgres", "sqs"}
    batch = [
        {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "sleep", "payload": {"seconds": 0.01}}, "id": n}
        for n in range(300)
    ]
    ids = [reply["result"]["id"] for reply in stack.post(batch)]
    pid = stack.pid_of("run")
    os.kill(pid, signal.SIGKILL)
    stack.wait_for(lambda: stack.pid_of("run") not in (pid, 0) and stack.answers(), what="a new process")
    assert {task["state"] for task in stack.settled(ids, seconds=180)} == {"SUCCESS"}
    log = (stack.data_dir / "penstock.log").read_text()
    started = {"submitter", "scheduler", "resulter", "supervisor", "api"}
    assert all(f"event=process_started process={name}" in log for name in started)  # lines name the part, not `run`


def test_tasks_of_a_batched_handler_each_have_their_own_result(stack: RunningStack) -> None:
    batch = [
        {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "add_many", "payload": {"a": n, "b": 1}}, "id": n}
        for n in range(60)
    ]
    ids = [reply["result"]["id"] for reply in stack.post(batch)]
    results = [task["result"] for task in stack.settled(ids)]
    assert [result["sum"] for result in results] == [n + 1 for n in range(60)]
    assert max(result["in"] for result in results) <= 20


def test_a_foreign_worker_without_penstock_serves_a_queue_of_its_own(stack: RunningStack) -> None:
    state = stack.state
    queue = stack.sqs().create_queue(QueueName="foreign")["QueueUrl"]
    stack.rpc("route.set", {"name": "foreign", "queue": queue, "actions": ["shout", "whisper"]})
    script = Path(__file__).with_name("foreign_worker.py")
    assert "penstock" not in script.read_text().split('"""')[2]
    arguments = [state["sqs_endpoint_url"], queue, state["queues"]["results"]]
    key_id, secret = state["sqs_access_key"].split(":")
    env = os.environ | {"AWS_ACCESS_KEY_ID": key_id, "AWS_SECRET_ACCESS_KEY": secret}
    worker = subprocess.Popen([sys.executable, "-I", str(script), *arguments], cwd=ROOT.parent, env=env)
    try:
        batch = [
            {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "shout", "payload": {"text": str(n)}}, "id": n}
            for n in range(100)
        ]
        ids = [reply["result"]["id"] for reply in stack.post(batch)]
        unknown = stack.rpc("enqueue", {"action": "whisper", "max_attempts": 2})["id"]
        assert [task["result"] for task in stack.settled(ids)] == [f"{n}!" for n in range(100)]

        def is_given_back() -> bool:  # which is for a moment, now and then, with the worker
            (task,) = stack.rpc("status", {"ids": [unknown]})
            return (task["state"], task["attempts"]) == ("SCHEDULED", 0)

        stack.wait_for(is_given_back, what="the task that no worker can run")
        announced = {one["action"]: one for one in stack.rpc("action.announced", {})["actions"]}
        assert (announced["shout"]["workers"], announced["shout"]["versions"]) == (1, ["7"])
        assert announced["whisper"]["workers"] == 0
        assert "No worker runs whisper" in stack.rpc("task.explain", {"id": unknown})["reason"]
    finally:
        worker.kill()
        worker.wait()
