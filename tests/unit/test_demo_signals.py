"""How the demo is stopped, by the shell that started it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_STOPPED = """
import asyncio, os, signal
from examples.export import demo

signal.signal(signal.SIGINT, signal.{sigint})

def run(*_):
    async def wait():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    asyncio.run(wait())

demo._run = run
raise SystemExit(demo.main(["--data-dir", {folder!r}]))
"""


@pytest.mark.parametrize("sigint", ["default_int_handler", "SIG_IGN"])  # the latter in a script's background
def test_sigterm_stops_the_demo(sigint: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _STOPPED.format(sigint=sigint, folder=str(tmp_path / "demo"))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'services'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (130, "interrupted\n")
