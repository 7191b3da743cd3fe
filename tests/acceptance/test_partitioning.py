"""`penstock partition-tasks` beside all processes of a stack under load: nothing is lost, nothing runs twice."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psycopg

from tests.acceptance.conftest import ROOT, RunningStack
from tests.forking import forked_commands


class Load(threading.Thread):
    """Enqueues batches of tasks, a few of them with ordering keys, until it is asked to end."""

    def __init__(self, stack: RunningStack, ledger: Path) -> None:
        super().__init__(daemon=True)
        self.stack = stack
        self.ledger = ledger
        self.ids: list[int] = []
        self.refused: list[object] = []
        self.may_end = threading.Event()

    def run(self) -> None:
        task = {"action": "sleep", "payload": {"seconds": 0.01, "ledger": str(self.ledger)}}
        batch = [task | ({"ordering_key": f"k{n}"} if n < 3 else {}) for n in range(20)]
        calls = [{"jsonrpc": "2.0", "method": "enqueue", "params": params, "id": n} for n, params in enumerate(batch)]
        while not self.may_end.wait(0.05):
            for answer in self.stack.post(calls):
                if "result" in answer:
                    self.ids.append(answer["result"]["id"])
                else:
                    self.refused.append(answer)


def divide(stack: RunningStack, partitions: int, *, kill_after: int | None = None) -> list[str]:
    """Run the command; kill it once it has said so many lines. Returns what it said."""
    with forked_commands():
        started = subprocess.Popen(
            [sys.executable, "-m", "penstock", "partition-tasks", str(partitions)],
            env=os.environ | {"PENSTOCK_DATABASE_URL": stack.state["database_url"]},
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    with started as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line.strip())
            if len(said) == kill_after:
                process.kill()
        process.wait(60)
        # What a run before did behind its last line is not said again, so the fourth may end before its kill.
        assert process.returncode == -9 or (process.returncode == 0 and kill_after in (None, 4))
    return said


def test_tasks_go_on_while_their_table_is_divided_and_the_command_is_killed_at_each_step(
    stack: RunningStack, tmp_path: Path
) -> None:
    load = Load(stack, tmp_path / "ledger")
    load.start()
    stack.wait_for(lambda: len(load.ids) > 100, what="the load")
    for partitions in (4, 2):
        for step in range(1, 5):
            divide(stack, partitions, kill_after=step)
        assert divide(stack, partitions)[-1].startswith(("tasks are in", "new tasks go to"))
        count = len(load.ids)
        stack.wait_for(lambda count=count: len(load.ids) > count + 100, what="more tasks")
    with psycopg.connect(stack.state["database_url"]) as connection:
        assert connection.execute("select relkind from pg_class where oid = 'penstock.task'::regclass").fetchone() == (
            "p",
        )
    divide(stack, 1)
    load.may_end.set()
    load.join(60)
    tasks = [task for first in range(0, len(load.ids), 500) for task in stack.settled(load.ids[first : first + 500])]
    assert Counter((task["state"], task["attempts"]) for task in tasks) == {("SUCCESS", 1): len(load.ids)}
    assert Counter(map(int, load.ledger.read_text().split())) == dict.fromkeys(load.ids, 1)
    assert load.refused == []
    assert divide(stack, 1)[-1] == "tasks are in one table"
    with psycopg.connect(stack.state["database_url"]) as connection:
        assert connection.execute("select relkind from pg_class where oid = 'penstock.task'::regclass").fetchone() == (
            "r",
        )
        names = connection.execute("select relname from pg_class where relname like 'task\\_from%'").fetchall()
    assert names == []
