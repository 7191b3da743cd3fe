"""clients/go: its own tests, and the rules of the protocol; built once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from penstock.cli.conformance.checks import CHECKS
from tests.acceptance.test_conformance import Run
from tests.docs_blocks import ROOT

KIT = ROOT / "clients" / "go"
FEATURES = (
    "stopping",
    "heartbeats",
    "retry hints",
    "time limits",
    "bad messages",
    "steps",
    "traces",
    "encryption",
    "tenants",
)


def go(*arguments: str, tool: str = "go") -> str:
    env = {**os.environ, "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GO111MODULE": "on"}
    done = subprocess.run(
        [tool, *arguments], cwd=KIT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The suite, at work beside the other test of this module."""
    if shutil.which("go") is None:
        pytest.skip("Go is not installed")
    folder = tmp_path_factory.mktemp("go")
    go("build", "-o", f"{folder}/", "./example", "./internal/conformance")
    required = [option for feature in FEATURES for option in ("--require", feature)]
    run = Run(str(folder / "conformance"), *required, folder=folder / "logs")
    yield run
    run.process.kill()
    run.process.communicate()


def test_its_own_tests_pass_and_its_code_is_formatted(suite: Run) -> None:
    assert go("-l", ".", tool="gofmt") == ""
    go("vet", "./...")
    assert "ok" in go("test", ".")


def test_its_worker_keeps_every_rule_but_that_of_the_bucket(suite: Run) -> None:
    suite.wait()
    assert {feature for feature, *_ in CHECKS} == {"minimum", "large payloads", *FEATURES}
    bucket = {rule for feature, rule, *_ in CHECKS if feature == "large payloads"}
    assert suite.missed() == dict.fromkeys(bucket, ("not supported", "it gives such attempts back, as it should"))
    assert suite.code == 0
