"""Limits, routes, order and schedules with real processes, three schedulers and supervisors, some of them killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import asyncpg
import pytest

from penstock.local.service import python_path
from tests.acceptance.conftest import FAST, ROOT, RunningStack, penstock, running
from tests.forking import forked_commands


@pytest.fixture(scope="module")
def stack(module_data_path: Path) -> Iterator[RunningStack]:
    """Two workers, one more for a queue of its own, and two schedulers and two supervisors beside the stack's."""
    arguments = ("--workers", "2", "--fleet", "own-queue=1", "--app", "tests.acceptance.app")
    with running(module_data_path / "rules", *arguments) as up:
        state = up.state
        env = os.environ | FAST | {
            "PYTHONPATH": python_path(), "PENSTOCK_DATABASE_URL": state["database_url"],
            "PENSTOCK_SQS_ENDPOINT_URL": state["sqs_endpoint_url"], "PENSTOCK_METRICS_PORT": "0",
        }  # fmt: skip
        log = (module_data_path / "more.log").open("wb")
        with forked_commands():
            more = [
                subprocess.Popen([sys.executable, "-m", "penstock", name], cwd=ROOT, env=env, stdout=log, stderr=log)
                for name in ("scheduler", "supervisor") * 2
            ]
        try:
            yield up
        finally:
            for process in more:
                process.terminate()
            for process in more:
                process.wait(30)
            log.close()


def cli(stack: RunningStack, *arguments: str) -> str:
    return penstock(*arguments, "--data-dir", str(stack.data_dir))


def enqueue(stack: RunningStack, *params: dict[str, object]) -> list[int]:
    batch = [{"jsonrpc": "2.0", "method": "enqueue", "params": p, "id": n} for n, p in enumerate(params)]
    return [reply["result"]["id"] for reply in stack.post(batch)]


def spans(ledger: Path) -> list[tuple[float, float, str, int]]:
    """When each run of `span` began and ended, its key and its task, in the order of time."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    return sorted((line["began"], line["ended"], line["key"], line["task"]) for line in lines)


def most_at_once(runs: list[tuple[float, float, str, int]]) -> int:
    edges = sorted([(began, 1) for began, *_ in runs] + [(ended, -1) for _, ended, *_ in runs])
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def test_many_keys_that_are_let_go_together_keep_their_order_though_processes_are_killed(
    stack: RunningStack, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    ids = enqueue(
        stack,
        *(
            {"action": "span", "payload": {"seconds": 0.05, "ledger": str(ledger), "key": f"k{n % 60}"},
             "ordering_key": f"k{n % 60}"}
            for n in range(1800)
        ),
    )  # fmt: skip
    stack.wait_for(ledger.exists, what="the first run")
    for victim in ("scheduler", "resulter", "scheduler", "resulter"):
        pid = stack.pid_of(victim)
        os.kill(pid, signal.SIGKILL)
        stack.wait_for(lambda victim=victim, pid=pid: stack.pid_of(victim) not in (pid, 0), what=f"a new {victim}")
    # A batch of calls asks for at most a thousand.
    tasks = stack.settled(ids[:900], seconds=120) + stack.settled(ids[900:], seconds=120)
    assert {task["state"] for task in tasks} == {"SUCCESS"}
    expect_order(spans(ledger))

    async def turns() -> tuple[int, int]:
        connection = await asyncpg.connect(stack.state["database_url"])
        try:
            (row,) = await connection.fetch(
                "select (select count(*) from penstock.turn), last_value from penstock.turn_id_seq"
            )
            return row[0], row[1]
        finally:
            await connection.close()

    left, given = asyncio.run(turns())
    assert (left, given > 1) == (0, True)


def test_schedulers_and_workers_never_pass_a_limit_or_break_an_order_though_some_are_killed(
    stack: RunningStack, tmp_path: Path
) -> None:
    cli(stack, "actions", "set", "span", "--max-in-flight", "4")
    shown = json.loads(cli(stack, "actions", "--json"))
    assert [(row["action"], row["max_in_flight"]) for row in shown["actions"]] == [("span", 4)]
    ledger = tmp_path / "ledger"
    ids = enqueue(
        stack,
        *(
            {"action": "span", "payload": {"seconds": 0.02, "ledger": str(ledger), "key": f"k{n % 6}"},
             "ordering_key": f"k{n % 6}"}
            for n in range(120)
        ),
    )  # fmt: skip
    stack.wait_for(ledger.exists, what="the first run")
    for victim in ("scheduler", "resulter"):
        pid = stack.pid_of(victim)
        os.kill(pid, signal.SIGKILL)
        stack.wait_for(lambda victim=victim, pid=pid: stack.pid_of(victim) not in (pid, 0), what=f"a new {victim}")
    tasks = stack.settled(ids, seconds=120)
    assert {task["state"] for task in tasks} == {"SUCCESS"}
    runs = spans(ledger)
    assert most_at_once(runs) <= 4
    expect_order(runs)


def expect_order(runs: list[tuple[float, float, str, int]]) -> None:
    """Of each key one task at a time, in order; one whose claim was lost may have run twice."""
    by_key = defaultdict(list)
    for run in runs:
        by_key[run[2]].append(run)
    for of_key in by_key.values():
        assert most_at_once(of_key) == 1
        tasks = [task for *_, task in of_key]
        assert tasks == sorted(tasks)


def test_a_paused_action_sends_none_and_a_route_leads_to_its_own_workers(stack: RunningStack) -> None:
    cli(stack, "actions", "pause", "whose")
    ids = enqueue(stack, *({"action": "whose"} for _ in range(4)))
    others = enqueue(stack, {"action": "echo"})
    stack.settled(others)
    time.sleep(1)
    assert {task["state"] for task in stack.rpc("status", {"ids": ids})} == {"SCHEDULED"}
    cli(stack, "routes", "set", "own", "--queue", "own-queue", "--action", "who*")
    assert "own-queue" in cli(stack, "routes")
    cli(stack, "actions", "resume", "whose")
    pid = stack.pid_of("own-queue-1")
    assert {task["result"]["pid"] for task in stack.settled(ids)} == {pid}
    cli(stack, "routes", "delete", "own")
    (task,) = stack.settled(enqueue(stack, {"action": "whose"}))
    assert task["result"]["pid"] != pid


def test_supervisors_fire_each_second_once_and_none_is_missed_though_one_is_killed(stack: RunningStack) -> None:
    cli(stack, "schedules", "create", "ticks", "* * * * * *", "echo", '{"at": "{{scheduled_time}}"}', "--missed", "all")

    def runs() -> list[dict[str, object]]:
        found: list[dict[str, object]] = stack.rpc("schedule.runs", {"name": "ticks", "limit": 1000})["runs"]
        return found

    stack.wait_for(lambda: len(runs()) >= 3, what="three fires")
    pid = stack.pid_of("supervisor")
    os.kill(pid, signal.SIGKILL)
    stack.wait_for(lambda: stack.pid_of("supervisor") not in (pid, 0), what="a new supervisor")
    before = len(runs())
    stack.wait_for(lambda: len(runs()) >= before + 3, what="three more")
    cli(stack, "schedules", "pause", "ticks")
    fired = runs()
    instants = sorted(datetime.fromisoformat(str(run["scheduled_at"])) for run in fired)
    assert [after - earlier for earlier, after in pairwise(instants)] == [timedelta(seconds=1)] * (len(instants) - 1)
    ids = [int(str(run["task_id"])) for run in fired]
    assert len(set(ids)) == len(ids)
    told = [task["result"]["at"] for task in stack.settled(ids)]
    assert sorted(datetime.fromisoformat(at) for at in told) == instants
    tasks = stack.rpc("list", {"action": "echo", "limit": 1000})["tasks"]
    assert len([task for task in tasks if "at" in (task["result"] or {})]) == len(ids)
