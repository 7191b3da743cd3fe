from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

# What users may rely on. A name that is added or taken away here is a change of the contract: see CHANGELOG.md.
PUBLIC = [
    "Action",
    "AsyncClient",
    "Backoff",
    "Batcher",
    "Bound",
    "Call",
    "Client",
    "Context",
    "DuplicateTask",
    "EnqueueOptions",
    "EventTimeout",
    "Fail",
    "InboundClient",
    "InvalidParams",
    "JobNotFound",
    "NoResult",
    "PayloadLost",
    "PayloadUnavailable",
    "PenstockError",
    "RateLimited",
    "ResultCancelled",
    "ResultGone",
    "ResultTimeout",
    "Retry",
    "RpcError",
    "ScheduleNotFound",
    "Settings",
    "SettingsError",
    "Snooze",
    "StateConflict",
    "Step",
    "StepChanged",
    "StepFailed",
    "lambda_handler",
    "SyncInboundClient",
    "Task",
    "TaskCancelled",
    "TaskFailed",
    "TaskLogFilter",
    "TaskNotFound",
    "TooLarge",
    "TooManyWaits",
    "Unavailable",
    "UnexpectedResult",
    "Unfinished",
    "Wait",
    "Workflow",
    "WorkflowConflict",
    "WorkflowNotFound",
    "__version__",
    "action",
    "around_attempt",
    "inject",
    "lifespan",
    "connect",
    "enqueue",
    "enqueue_many",
    "enqueue_many_sync",
    "enqueue_sync",
    "load_settings",
    "settle",
    "settle_sync",
]


def test_the_public_names_are_these() -> None:
    assert sorted(penstock.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    value = getattr(penstock, name)
    if name != "__version__":
        assert inspect.getdoc(value)
        assert value is getattr(importlib.import_module(value.__module__), name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = penstock.nonsense


def test_a_type_checker_knows_the_public_names_and_no_others(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text("import penstock\nfrom penstock import InvalidParams, action\npenstock.enque_sync\n", "utf-8")
    package = Path(penstock.__file__)
    command = [
        sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", "--no-site-packages",
        f"--cache-dir={tmp_path}", str(snippet), str(package),
    ]  # fmt: skip
    found = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(package.parents[1])}, check=False
    )
    assert "snippet.py:3: error: Module has no attribute" in found.stdout, found.stdout + found.stderr
    assert found.stdout.count("error:") == 1, found.stdout


def test_the_version_is_the_one_of_the_package() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert f'\nversion = "{penstock.__version__}"\n' in pyproject.read_text("utf-8")


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(penstock.__file__).parent / "py.typed").is_file()
