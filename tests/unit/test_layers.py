"""The arrows between modules, held by import-linter, and what a process must not load, seen in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SERVICES = REPOSITORY / "services"
PACKAGE = SERVICES / "penstock"
DATABASE = {"asyncpg", "sqlalchemy", "alembic"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after the statement."""
    script = f"{statement}\nimport sys\nprint(*sorted(sys.modules), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(SERVICES)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    return set(run.stdout.split())


def test_the_import_contracts_hold() -> None:
    script = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SERVICES)}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " 0 broken" in run.stdout


def test_every_module_has_its_place_among_the_layers() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.replace("|", ":").split(":")}
    modules = {
        f"penstock.{path.stem}"
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").is_file()) and path.name != "__init__.py"
    }
    assert modules <= placed


@pytest.mark.parametrize(
    "statement",
    [
        "import penstock",
        "from penstock import action, Retry, Fail, Context",
        "import penstock.worker.process",
        "import penstock.worker.handlers.actions, penstock.runtime.loop, penstock.cli.run",
        "import penstock.brokers.sqs",
        "import penstock.worker.deliveries.http, penstock.worker.deliveries.sqs",
    ],
)
def test_a_worker_loads_no_database_driver(statement: str) -> None:
    assert loaded_by(statement) & (DATABASE | {"penstock.db", "penstock.db.tables.registry"}) == set()


def test_a_worker_loads_no_delivery_before_one_is_asked_for() -> None:
    loaded = loaded_by("import penstock.worker.process, penstock.cli.run")
    assert {name for name in loaded if name.startswith("penstock.worker.deliveries.")} <= {
        "penstock.worker.deliveries.registry"
    }


def test_importing_the_package_loads_none_of_its_modules() -> None:
    assert {name for name in loaded_by("import penstock") if name.startswith("penstock")} == {"penstock"}


@pytest.mark.parametrize("module", ["errors", "task", "retry", "requests", "reports"])
def test_the_bottom_does_no_io(module: str) -> None:
    mine = loaded_by(f"import penstock.protocol.{module}") - loaded_by(
        "import msgspec, json, dataclasses, enum, datetime, random, importlib.metadata"
    )
    assert (
        mine & {"asyncio", "socket", "sqlite3", "subprocess", "structlog", "botocore", "aiobotocore", *DATABASE}
        == set()
    )
