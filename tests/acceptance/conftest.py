"""Whole stacks of real processes, brought up by the real command, one per test module that asks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import botocore.session
import httpx
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.local.state import DataDir
from tests.forking import forked_commands

ROOT = Path(__file__).resolve().parents[2]
FAST = {
    "PENSTOCK_RETRY_BASE_SECONDS": "0.1",
    "PENSTOCK_RETRY_FACTOR": "1.5",
    "PENSTOCK_RETRY_JITTER": "0",
    "PENSTOCK_POLL_SECONDS": "0.05",
    "PENSTOCK_SUPERVISOR_INTERVAL_SECONDS": "0.5",
    # Long enough for a machine that is four times too busy: what is late by these runs again.
    "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": "10",
    "PENSTOCK_HEARTBEAT_SECONDS": "1",
    "PENSTOCK_CANCEL_POLL_SECONDS": "0.3",
    "PENSTOCK_STALE_AFTER_SECONDS": "12",
    "PENSTOCK_UNSENT_AFTER_SECONDS": "6",
    "PENSTOCK_GRACE_SECONDS": "20",
}
_TOLD = ("penstock_messages_total", "penstock_sqs_calls_total", "penstock_passes_total")


def penstock(*arguments: str, env: dict[str, str] | None = None, timeout: float = 120) -> str:
    """Run the command and return its output; what it says when it fails is in the failure.

    Whatever makes no processes runs in this one, for the start of another costs most of a second.
    """
    if arguments[0] != "up":
        done = CliRunner().invoke(app, arguments, env=env)
        said = done.output + str(done.exception or "")
        assert done.exit_code == 0, f"penstock {' '.join(arguments)} exited with {done.exit_code}\n{said}"
        return done.stdout
    with forked_commands():
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT / 'services'}{os.pathsep}{ROOT}"} | (env or {}),
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (
        f"penstock {' '.join(arguments)} exited with {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


class RunningStack:
    """A stack that is up: its URLs, its api, its queues and its processes."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    @property
    def state(self) -> dict[str, Any]:
        """What `penstock ps --json` prints, which a test of its own runs; read here some thousand times in all."""
        state = DataDir(self.data_dir).read_any_state()
        assert state is not None, f"no stack is up in {self.data_dir}"
        return state

    def pid_of(self, name: str) -> int:
        return int(next(entry["pid"] for entry in self.state["processes"] if entry["name"] == name))

    def rpc(self, method: str, params: Any = None) -> Any:
        reply = self.post({"jsonrpc": "2.0", "method": method, "params": params or {}, "id": 1})
        assert "error" not in reply, reply
        return reply["result"]

    def answers(self) -> bool:
        """Whether the api can be asked."""
        try:
            return "result" in self.post({"jsonrpc": "2.0", "method": "stats", "id": 1})
        except Exception:
            return False

    def post(self, body: Any) -> Any:
        return httpx.post(f"{self.state['api']}/rpc", json=body, timeout=30).json()

    def sqs(self) -> Any:
        """A plain SQS client, as any user has one."""
        key_id, secret = self.state["sqs_access_key"].split(":")
        return botocore.session.get_session().create_client(
            "sqs", endpoint_url=self.state["sqs_endpoint_url"], region_name="us-east-1",
            aws_access_key_id=key_id, aws_secret_access_key=secret,
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], Any], *, seconds: float = 60, what: str = "the condition") -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{what} did not come within {seconds} s; {self.describe()}")

    def describe(self) -> str:
        """What a failure needs to be understood: what each process counted, and the end of the log."""
        lines = []
        for entry in self.state["processes"]:
            if entry["metrics"]:
                text = httpx.get(entry["metrics"], timeout=10).text
                counted = [line for line in text.splitlines() if line.startswith(_TOLD) and not line.endswith(" 0.0")]
                lines += [f"{entry['name']}: {line}" for line in counted]
        log = (self.data_dir / "penstock.log").read_text()[-4000:]
        return "\n".join(["counted:", *lines, "the log ends:", log])

    def settled(self, ids: list[int], *, seconds: float = 60) -> list[dict[str, Any]]:
        """The tasks, once all are in a final state."""

        def look() -> list[dict[str, Any]] | None:
            tasks = self.rpc("status", {"ids": ids, "detail": True})
            done = all(task["state"] in ("SUCCESS", "CRITICAL_ERROR", "CANCELLED") for task in tasks)
            return tasks if done else None

        found: list[dict[str, Any]] = self.wait_for(look, seconds=seconds, what=f"the end of {len(ids)} tasks")
        return found


@contextmanager
def running(data_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[RunningStack]:
    penstock("up", "--detach", "--data-dir", str(data_dir), "--port", "0", *arguments, env=FAST | (env or {}))
    try:
        yield RunningStack(data_dir)
    finally:
        penstock("down", "--data-dir", str(data_dir))


WORKERS = ("--workers", "2", "--app", "tests.acceptance.app", "--app", "examples.export")


@pytest.fixture(scope="module")
def stack(module_data_path: Path) -> Iterator[RunningStack]:
    """A stack whose two workers serve the actions of tests/acceptance/app.py."""
    with running(module_data_path / "stack", *WORKERS) as up:
        yield up
