"""clients/node: its own tests against a running stack, its README, and every rule of the protocol."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_conformance import Run
from tests.acceptance.test_scheduler0_node import answers
from tests.acceptance.test_up_down import Place, make_place
from tests.docs_blocks import ROOT, all_blocks

KIT = ROOT / "clients" / "node"
WORKER = f"node {KIT / 'build' / 'test' / 'conformance-worker.js'}"
# What the README's examples use of the program around them.
AROUND = """
declare function busy(): Promise<boolean>;
declare function chargeCard(card: string, reference: string): Promise<string>;
declare function ship(item: string, charge: string): Promise<string>;
"""


def npm(*arguments: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        ["npm", *arguments], cwd=KIT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built() -> None:
    """The kit with its packages; they stay in the clone."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    if not (KIT / "node_modules" / ".package-lock.json").exists():
        if not answers():
            pytest.skip("no registry of npm can be reached")
        npm("ci", "--no-audit", "--no-fund")
    npm("run", "build")


@pytest.fixture(scope="module")
def suite(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The suite, at work beside the other tests of this module."""
    run = Run(WORKER, "--require", "all", folder=tmp_path_factory.mktemp("conformance"))
    yield run
    run.process.kill()
    run.process.communicate()


@pytest.fixture
def place(data_path: Path) -> Iterator[Place]:
    yield from make_place(data_path / "place", forks=True)


def test_its_tests_pass_beside_a_stack(suite: Run, place: Place) -> None:
    state = place.up("--port", "0", "--one-process", "--workers", "0")
    env = {**os.environ, **state["env"], "PENSTOCK_API_URL": state["api"]}
    worker = subprocess.Popen(WORKER.split(), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        said = npm("test", env=env)
        assert "# fail 0" in said
        assert "# skipped 0" in said
    finally:
        worker.terminate()
        assert worker.wait(30) == 0


def test_its_worker_keeps_every_rule(suite: Run) -> None:
    suite.wait()
    assert suite.missed() == {}
    assert suite.code == 0


def test_the_examples_of_its_readme_compile(built: None, tmp_path: Path) -> None:
    blocks = [block.text for block in all_blocks() if block.page == "clients/node/README.md"]
    assert len(blocks) == 2
    for number, text in enumerate(blocks):
        (tmp_path / f"example{number}.mts").write_text(AROUND + text, "utf-8")
    options = json.loads((KIT / "tsconfig.json").read_text())["compilerOptions"]
    options |= {"noEmit": True, "rootDir": "/", "paths": {"penstock": [str(KIT / "src" / "index.ts")]}}
    options |= {"typeRoots": [str(KIT / "node_modules" / "@types")], "types": ["node"]}
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "include": ["*.mts"]}))
    done = subprocess.run(
        [str(KIT / "node_modules" / ".bin" / "tsc"), "-p", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_lock_file_names_no_registry_and_its_version_is_ours() -> None:
    lock = json.loads((KIT / "package-lock.json").read_text("utf-8"))
    hosts = {
        re.sub(r"^https://([^/]+)/.*", r"\1", one["resolved"]) for one in lock["packages"].values() if "resolved" in one
    }
    assert hosts <= {"registry.npmjs.org"}
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    version = json.loads((KIT / "package.json").read_text("utf-8"))["version"]
    assert f'\nversion = "{version}"\n' in project
    assert lock["version"] == version
