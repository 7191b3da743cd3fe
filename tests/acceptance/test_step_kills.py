"""Durable steps of 200 tasks while a worker is killed with SIGKILL every second: no reported step runs again."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

from tests.acceptance.conftest import running
from tests.acceptance.test_kills import enqueue

TASKS, KILLS = 200, 8
SLOTS = 3  # of a worker: few, so that the work lasts for as long as the kills
# On a busy machine nothing is to be sent twice because a process that lives is slow: that alone may run a step again.
ENV = {
    "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": "4", "PENSTOCK_WORKER_CONCURRENCY": str(SLOTS),
    "PENSTOCK_MAX_ATTEMPTS": "100", "PENSTOCK_UNSENT_AFTER_SECONDS": "60", "PENSTOCK_STALE_AFTER_SECONDS": "60",
}  # fmt: skip


def test_no_reported_step_runs_again_although_workers_are_killed(data_path: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    arguments = ("--workers", "3", "--app", "tests.acceptance.app")
    with running(data_path / "stack", *arguments, env=ENV) as stack:
        ids = enqueue(stack, TASKS, "four_steps", ledger=str(ledger), seconds=0.1)
        stack.wait_for(ledger.exists, what="the first step")
        killed: set[int] = set()

        def busy() -> int | None:
            """The worker that has reported a step last, of those that live, if another step follows."""
            for line in reversed(ledger.read_text().splitlines()):
                what, _, name, pid = line.split()
                if what == "reported" and name != "d" and int(pid) not in killed:
                    return int(pid)
            return None

        while len(killed) < KILLS:
            time.sleep(1)
            pid = stack.wait_for(busy, what="a worker that runs steps")
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        tasks = stack.settled(ids, seconds=240)
    assert Counter(task["state"] for task in tasks) == {"SUCCESS": TASKS}
    assert {tuple(step["name"] for step in task["steps"]) for task in tasks} == {("a", "b", "c", "d")}
    # A step has been reported when it has returned: no run of it may come after that.
    reported, twice = set(), 0
    ran: Counter[tuple[str, str]] = Counter()
    for line in ledger.read_text().splitlines():
        what, task_id, name, _ = line.split()
        if what == "reported":
            reported.add((task_id, name))
            continue
        assert (task_id, name) not in reported, f"step {name} of task {task_id} ran again after its report"
        ran[task_id, name] += 1
        twice += ran[task_id, name] == 2
    assert len(ran) == 4 * TASKS
    assert twice <= KILLS * SLOTS * 2  # those that were under way at a kill
    assert any(task["steps"][0]["claim"] != task["steps"][-1]["claim"] for task in tasks), "no task was interrupted"
