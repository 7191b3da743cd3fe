"""What type checkers make of the public names, in a program of a user's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import penstock

PROGRAM = Path(__file__).parent / "typing_program.py"
REFUSED = {
    number for number, line in enumerate(PROGRAM.read_text("utf-8").splitlines(), 1) if line.endswith("  # refused")
}


def checked(*command: str) -> tuple[set[int], str]:
    """The lines at which a checker finds errors, and its whole output."""
    services = str(Path(penstock.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-m", *command, str(PROGRAM)], capture_output=True, text=True, check=False,
        env=os.environ | {"MYPYPATH": services}, cwd=PROGRAM.parents[2],
    )  # fmt: skip
    return {int(line) for line in re.findall(r"typing_program\.py:(\d+):.*error", run.stdout)}, run.stdout + run.stderr


def test_a_program_of_every_verb_is_checked(tmp_path: Path) -> None:
    found, output = checked(
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        f"--cache-dir={tmp_path}",
        "--python-version=3.11",
    )
    assert found == REFUSED, output


@pytest.mark.skipif(find_spec("pyright") is None, reason="pyright is not installed")
def test_pyright_agrees() -> None:
    found, output = checked("pyright", "--pythonpath", sys.executable)
    assert found == REFUSED, output
