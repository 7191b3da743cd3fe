"""examples/scheduler0-node as its page says, where npm is and a registry answers: axios, Express and a whole minute."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.local.service import free_port
from tests.acceptance.test_up_down import Place, make_place
from tests.docs_blocks import ROOT, all_blocks

BEFORE, BLOCK = (block.text for block in all_blocks() if block.page == "examples/scheduler0-node/README.md")
JOBS = 200


def answers() -> bool:
    """Whether packages can be had."""
    if shutil.which("npm") is None:
        return False
    try:
        done = subprocess.run(["npm", "view", "express", "version"], capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@pytest.fixture
def place(data_path: Path) -> Iterator[Place]:
    yield from make_place(data_path / "place", forks=True)


@pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")
def test_the_example_is_called_back_for_every_job(place: Place) -> None:
    if not answers():
        pytest.skip("no registry of npm can be reached")
    folder = place.path / "examples" / "scheduler0-node"
    shutil.copytree(ROOT / "examples" / "scheduler0-node", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = place.path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    command.chmod(0o755)
    exported, start = BEFORE.splitlines()
    place.env |= dict(word.split("=", 1) for word in exported.removeprefix("export ").split())
    assert start == "penstock up"
    state = place.up("--port", "0", "--one-process")
    text = BLOCK.replace("http://127.0.0.1:8080", state["api"])
    env = os.environ | place.env | {
        "PATH": f"{command.parent}:{os.environ['PATH']}", "JOBS": str(JOBS), "MINUTES": "0.5",
        "PORT": str(free_port()),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-euc", text], cwd=place.path, env=env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{JOBS} jobs are made" in done.stdout
    assert re.search(rf"jobs called: {JOBS} of {JOBS}", done.stdout)
    assert "every job was called back as often as any other" in done.stdout
