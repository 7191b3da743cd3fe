"""The arrows between modules, held by import-linter, and what a process must not load, seen in a fresh interpreter."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SERVICES = REPOSITORY / "services"
PACKAGE = SERVICES / "penstock"
DATABASE = {"asyncpg", "sqlalchemy", "alembic"}
TOP_LEVEL_ENTRIES = 24


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


def module_name(path: Path) -> str:
    parts = path.relative_to(SERVICES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache  # not while the tests are collected: each of the processes that run them collects them all
def trees() -> dict[str, ast.Module]:
    return {module_name(path): ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each module named by an import, and the name taken from it; "" where the module itself is meant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""


def import_graph() -> dict[str, set[str]]:
    """Modules of the package by what they import of it, at any depth and under TYPE_CHECKING too; not its root, which
    names public objects for users."""
    graph: dict[str, set[str]] = {name: set() for name in trees() if name != "penstock"}
    for name, imported in graph.items():
        for module, taken in imports_of(trees()[name]):
            target = f"{module}.{taken}" if f"{module}.{taken}" in graph else module
            if target in graph and target != name:
                imported.add(target)
    return graph


def cycles_of(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of two or more modules (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for target in graph[name]:
            if target not in order:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], order[target])
        if lowest[name] == order[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                cycles.append(sorted(component))

    for name in graph:
        if name not in order:
            visit(name)
    return cycles


def test_the_root_of_the_package_does_not_grow() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    assert len(entries) <= TOP_LEVEL_ENTRIES, sorted(entries)


def test_an_init_holds_a_docstring_and_nothing_else() -> None:
    packages = {module_name(path) for path in PACKAGE.rglob("__init__.py")} - {"penstock"}
    assert {name for name in packages if len(trees()[name].body) != 1 or not ast.get_docstring(trees()[name])} == set()


def test_every_folder_of_modules_is_a_package() -> None:
    assert {path.parent for path in PACKAGE.rglob("*.py") if not (path.parent / "__init__.py").is_file()} == set()


def test_a_module_imports_from_the_module_that_defines_a_name() -> None:
    packages = {module_name(path) for path in PACKAGE.rglob("__init__.py")}
    assert {
        (name, module, taken)
        for name, tree in trees().items()
        for module, taken in imports_of(tree)
        if module in packages and f"{module}.{taken}" not in trees()
    } == set()


def test_no_imports_form_a_cycle() -> None:
    assert cycles_of(import_graph()) == []


def test_a_cycle_would_be_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set[str]()}
    assert cycles_of(graph) == [["b", "c"]]


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
    assert loaded_by(statement) & (DATABASE | {"penstock.db"}) == set()


def test_an_action_loads_no_http_client_before_it_is_enqueued() -> None:
    assert loaded_by("from penstock import action") & {"httpx", "pydantic", *DATABASE} == set()


def test_what_enqueues_in_a_transaction_loads_only_msgspec() -> None:
    loaded = loaded_by("import penstock; penstock.enqueue, penstock.enqueue_sync")
    assert {"msgspec", "penstock.tasks.transactional"} <= loaded
    assert loaded & {"httpx", "pydantic", "prometheus_client", "structlog", *DATABASE} == set()


@pytest.mark.parametrize("option", ["--version", "--help", "-h"])
def test_version_and_help_load_no_library_and_no_command(option: str) -> None:
    loaded = loaded_by(f"import sys; sys.argv = ['penstock', {option!r}]; from penstock.cli.start import main; main()")
    assert {name for name in loaded if name.startswith("penstock.cli")} == {"penstock.cli", "penstock.cli.start"}
    assert loaded & {"typer", "rich", "pydantic", "msgspec", "asyncio"} == set()


def test_the_commands_load_neither_the_database_nor_sqs() -> None:
    assert loaded_by("import penstock.cli.app") & (DATABASE | {"penstock.db", "botocore", "aiobotocore"}) == set()


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
