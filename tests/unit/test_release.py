""".github and .ci/release.py: workflows that parse, pinned actions, commands that exist; what a tag needs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from penstock.protocol.version import __version__

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
PERMISSIONS = {"contents", "packages", "id-token", "attestations", "pages"}


def workflow(path: Path) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    found: dict[Any, Any] = yaml.safe_load(path.read_text("utf-8"))
    return {"on" if name is True else name: value for name, value in found.items()}


def steps() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.name} {name}", step)
        for path in WORKFLOWS
        for name, job in workflow(path)["jobs"].items()
        for step in job["steps"]
    ]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_one(path: Path) -> None:
    found = workflow(path)
    assert found.keys() <= {"name", "on", "permissions", "concurrency", "env", "jobs"}
    assert found["permissions"] == {"contents": "read"}, "a job that needs more says so"
    for name, job in found["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        assert job.get("permissions", {}).keys() <= PERMISSIONS, name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= found["jobs"].keys()
        assert job["steps"], name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)


def test_actions_are_pinned_to_a_commit_with_one_version_each() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for action, commit, version in re.findall(
            r"uses: (\S+)@(\S+)(?: # (v[\d.]+))?$", path.read_text("utf-8"), re.MULTILINE
        ):
            assert re.fullmatch(r"[0-9a-f]{40}", commit), (path.name, action)
            assert version, f"{path.name}: {action} has no version beside its commit"
            pins.setdefault(action, set()).add(f"{commit} {version}")
    assert pins
    assert {action: found for action, found in pins.items() if len(found) > 1} == {}


def test_no_step_puts_what_a_stranger_wrote_into_a_shell() -> None:
    for place, step in steps():
        assert not re.search(r"\$\{\{\s*github\.(event|head_ref)", step.get("run", "")), place
        assert "secrets." not in step.get("run", ""), place


def test_commands_of_the_workflows_are_here() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for place, step in steps():
        text = step.get("run", "")
        for called in re.findall(r"^make ([a-z -]+)", text, re.MULTILINE):
            assert set(called.split()) <= targets, place
        for path in re.findall(r"(?<![\w/])(\.ci/[\w.]+)", text):
            assert (ROOT / path).is_file(), place
        if "working-directory" in step:
            assert (ROOT / step["working-directory"] / "package.json").is_file(), place


def test_two_makes_at_once_in_a_fresh_clone_install_once(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
        case "$1 $2" in
        -c*) exec {sys.executable} "$@";;
        -m*) echo "$2" >>log; mkdir -p .venv/bin; cp python .venv/bin/python; sleep 0.3;;
        esac
        """.replace("\n        ", "\n")
    )
    python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    makes = [subprocess.Popen(["make", "setup", "PYTHON=./python"], cwd=tmp_path) for _ in range(2)]
    assert [make.wait(30) for make in makes] == [0, 0]
    assert (tmp_path / "log").read_text() == "venv\npip\n"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_shell_steps_parse(path: Path) -> None:
    for name, job in workflow(path)["jobs"].items():
        for step in job["steps"]:
            if "run" in step:
                text = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
                done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
                assert done.returncode == 0, (name, done.stderr)


def test_both_architectures_build_on_one_base_and_are_attested() -> None:
    jobs = workflow(GITHUB / "workflows" / "release.yml")["jobs"]
    platforms = [one["platform"] for one in jobs["image"]["strategy"]["matrix"]["include"]]
    assert platforms == ["linux/amd64", "linux/arm64"]
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+\.\d+-slim-\w+$", dockerfile, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    build = next(step["run"] for step in jobs["image"]["steps"] if "docker buildx build" in step.get("run", ""))
    assert '--build-arg PYTHON_IMAGE="$BASE"' in build
    assert "--provenance mode=max" in build
    for name in ("build", "manifest"):
        assert any("attest-build-provenance" in step.get("uses", "") for step in jobs[name]["steps"]), name
        assert jobs[name]["permissions"]["attestations"] == "write"


def test_supported_versions_of_python_are_tested_and_named() -> None:
    tested = workflow(GITHUB / "workflows" / "ci.yml")["jobs"]["python"]["strategy"]["matrix"]["version"]
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text("utf-8"))
    assert set(named) <= set(tested)
    assert "3.14" in tested


@pytest.mark.parametrize(
    "path", [*sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), GITHUB / "dependabot.yml"], ids=lambda path: path.name
)
def test_templates_parse(path: Path) -> None:
    found = yaml.safe_load(path.read_text("utf-8"))
    if path.name not in ("config.yml", "dependabot.yml"):
        assert found.keys() >= {"name", "description", "body"}
        ids = [field["id"] for field in found["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids))
    for update in found.get("updates", ()):
        assert (ROOT / update["directory"].lstrip("/")).is_dir()


def test_all_versions_are_that_of_the_package(release: ModuleType) -> None:
    assert set(release.versions().values()) == {__version__}


CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n- b\n\n## [0.2.0] - 2026-12-01\n\n### Added\n- a\n\n"
    "## [0.1.0]\n\n- x\n\n## [0.0.1] - 2026-01-01\n"
)


def test_notes_are_the_section_of_the_version(release: ModuleType) -> None:
    assert release.notes(CHANGELOG, "0.2.0") == "### Added\n- a\n"


@pytest.mark.parametrize(
    ("version", "said"), [("0.3.0", "has no section"), ("0.1.0", "has no date"), ("0.0.1", "is empty")]
)
def test_a_changelog_that_is_not_ready_is_refused(release: ModuleType, version: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        release.notes(CHANGELOG, version)


def test_a_tag_of_another_version_is_refused(release: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main("9.9.9") == 1
    assert f"pyproject.toml has {__version__}" in capsys.readouterr().err
