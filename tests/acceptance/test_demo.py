"""The demo as people run it, undisturbed and with processes killed in the middle."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from examples.export.place import own_place
from penstock.local.service import is_free
from penstock.local.state import DataDir
from tests.acceptance.conftest import FAST, ROOT, penstock
from tests.forking import forked_commands
from tests.waiting import wait_until

DEMO_WITHIN_SECONDS = 240
# As often as the demo's own, so that some tasks are still in retry when the others are done.
ENV = {name: value for name, value in FAST.items() if "RETRY" not in name}


@contextmanager
def demo(data_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo, started; whatever becomes of the test, nothing of it runs on."""
    with forked_commands():
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "examples.export.demo",
                "--data-dir",
                str(data_dir),
                "--time-limit",
                "180",
                *arguments,
            ],
            cwd=ROOT,
            env=os.environ | ENV | {"PYTHONPATH": f"{ROOT / 'services'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=DEMO_WITHIN_SECONDS)
        if DataDir(data_dir).holder() is not None:
            penstock("down", "--data-dir", str(data_dir))


def state_of(data_dir: Path) -> dict[str, Any] | None:
    """What `penstock ps --json` prints, None as long as nothing is up."""
    return DataDir(data_dir).read_state()


def settled(state: dict[str, Any]) -> int:
    async def count() -> int:
        connection = await asyncpg.connect(state["database_url"])
        try:
            return int(await connection.fetchval("select count(*) from penstock.task_history"))
        finally:
            await connection.close()

    return asyncio.run(count())


def figure(output: str, label: str) -> str:
    found = re.search(rf"^{label} +(.+)$", output, re.MULTILINE)
    assert found is not None, output
    return found[1]


def test_every_record_is_exported_once_although_a_worker_and_the_scheduler_are_killed(data_path: Path) -> None:
    folder, tasks = data_path / "demo", 4000
    with demo(folder, "--tasks", str(tasks), "--error-rate", "0.2") as process:
        found: list[dict[str, Any]] = []

        def some_are_settled() -> bool:
            assert process.poll() is None, process.communicate()[0]
            if not found and (state := state_of(folder)) is not None:
                found.append(state)
            return bool(found) and settled(found[0]) > 0

        wait_until(some_are_settled, "the first settled task", seconds=90)
        pids = {entry["name"]: entry["pid"] for entry in found[0]["processes"]}
        for victim in ("worker-1", "scheduler"):
            os.kill(pids[victim], signal.SIGKILL)
        assert settled(found[0]) < tasks, "everything had settled before the kill: it needs more tasks"
        output, _ = process.communicate(timeout=DEMO_WITHIN_SECONDS)
        assert process.returncode == 0, output
    assert figure(output, "states") == f"{tasks:,} SUCCESS"
    assert figure(output, "exported") == f"{tasks:,} of {tasks:,} records exactly once"
    assert figure(output, "restarted") == "scheduler 1, worker-1 1"


def test_a_second_demo_takes_a_second_folder_and_says_why_tasks_failed_that_cannot_succeed(
    data_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "PENSTOCK_MAX_ATTEMPTS", "2")
    with (
        own_place(data_path / "demo"),  # as a first demo has it
        demo(data_path / "demo", "--tasks", "5", "--error-rate", "1") as process,
    ):
        output, _ = process.communicate(timeout=DEMO_WITHIN_SECONDS)
    assert figure(output, "log") == f"{data_path / 'demo-2' / 'penstock.log'}"
    assert process.returncode == 1, output
    assert figure(output, "states") == "5 CRITICAL_ERROR"
    assert "0 of 5 tasks are SUCCESS" in output
    assert re.search(r"is CRITICAL_ERROR after 2 attempts: .*a random error (before|after) the write", output), output
    assert output.rstrip().endswith("FAILED: see above")


def test_a_terminated_demo_leaves_nothing_and_the_next_exports_every_record_although_a_fifth_of_the_calls_fail(
    data_path: Path,
) -> None:
    folder = data_path / "demo"
    with demo(folder, "--tasks", "20000") as process:
        wait_until(lambda: state_of(folder) is not None, "the stack", seconds=90)
        state = state_of(folder)
        assert state is not None
        process.terminate()
        output, _ = process.communicate(timeout=DEMO_WITHIN_SECONDS)
    assert process.returncode == 130, output
    assert state_of(folder) is None
    for entry in state["processes"]:
        with pytest.raises(ProcessLookupError):
            os.kill(entry["pid"], 0)
    assert is_free(int(state["api"].rsplit(":", 1)[1]))
    with demo(folder, "--tasks", "300", "--error-rate", "0.2") as process:
        output, _ = process.communicate(timeout=DEMO_WITHIN_SECONDS)
        assert process.returncode == 0, output
    assert figure(output, "states") == "300 SUCCESS"
    assert figure(output, "exported") == "300 of 300 records exactly once"
    assert output.rstrip().endswith("SUCCESS: every record was exported exactly once")
    histogram = dict(re.findall(r"^(?:attempts)? +(\d+) +(\d+)  #+$", output, re.MULTILINE))
    assert sum(int(count) for count in histogram.values()) == 300
    assert int(histogram["2"]) > 0
    assert re.search(r"^ +\d+ s  enqueued 300/300  settled 300/300", output, re.MULTILINE)
    assert state_of(folder) is None


def test_a_demo_whose_stack_is_stopped_by_others_says_so_and_ends(data_path: Path) -> None:
    folder = data_path / "demo"
    with demo(folder, "--tasks", "20000") as process:
        wait_until(lambda: state_of(folder) is not None, "the stack", seconds=90)
        penstock("down", "--data-dir", str(folder))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert f"its stack in {folder} has ended" in output
    assert output.rstrip().endswith("FAILED: see above")


def test_a_folder_that_no_demo_made_is_left_alone(data_path: Path) -> None:
    (data_path / "thesis.txt").write_text("years of work")
    with demo(data_path, "--tasks", "1") as process:
        output, _ = process.communicate(timeout=DEMO_WITHIN_SECONDS)
    assert process.returncode == 1
    assert "no demo made it" in output
    assert (data_path / "thesis.txt").read_text() == "years of work"
