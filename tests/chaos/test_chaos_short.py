"""The short form of `make chaos`: a few of its scenarios, each for a few seconds. All of them: `make chaos`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking import forked_commands

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["kills", "chaos-settings"])
def test_nothing_is_lost_and_nothing_recorded_twice(name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.chaos", "--scenario", name, "--seconds", "8", "--json", str(report)]
    paths = os.pathsep.join([str(ROOT / "services"), str(ROOT)])
    with forked_commands():
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=240,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(report.read_text())
    assert row["problems"] == []
    assert row["accepted"] == row["settled"] > 300
    assert (row["lost"], row["twice"], row["wrong"]) == (0, 0, 0)
