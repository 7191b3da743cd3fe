"""The first example of the README, typed in as it stands."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.local.service import HOST
from tests.acceptance.test_up_down import Place, make_place
from tests.acceptance.tutorial import shows, steps_of

STEPS = steps_of("README.md")


@pytest.fixture
def place(data_path: Path) -> Iterator[Place]:
    yield from make_place(data_path / "place")


def test_the_example_of_the_readme_prints_what_it_shows(place: Place) -> None:
    (written,) = (step for step in STEPS if step.option == "shop.py")
    (console,) = (step for step in STEPS if step.kind == "console")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    here = {"PENSTOCK_API_URL": f"http://{HOST}:{port}"}  # the example's own is :8080, which may be taken
    (place.path / "shop.py").write_text(written.text)
    for command, page in console.commands():
        program, *words = shlex.split(command)
        if program == "penstock":
            output = place.run(*words, *(["--port", str(port)] if words[0] == "up" else [])).stdout
        else:
            assert program == "python"
            done = subprocess.run(
                [sys.executable, *words], cwd=place.path, env=os.environ | place.env | here, capture_output=True,
                text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            output = done.stdout
        assert shows(page, output), f"{command} prints, instead of\n{page}\nthis:\n{output}"
