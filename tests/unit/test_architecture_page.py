"""docs/architecture.md against the code: files exist and define the names that follow them; packages are all listed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.run import PROCESSES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "services" / "penstock"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])


def names_of_page() -> Iterator[tuple[str, str]]:
    """Each name in the sections about the code, with the file named last before it."""
    path = ""
    for heading in ("Six processes", "The life of a task", "Where to add"):
        for span in re.findall(r"`([\w./]+)`", SECTIONS[heading]):
            if re.search(r"\.(py|sql|toml)$", span):
                path = span
            elif "/" not in span and not (PACKAGE / span).exists():
                yield path, span


NAMED = sorted(set(names_of_page()))


def find(path: str) -> Path:
    return next(base / path for base in (PACKAGE, ROOT) if (base / path).exists())


def defined_in(path: Path) -> set[str]:
    """Functions, classes, constants and methods (``method`` and ``Class.method``); of a SQL file its statements."""
    text = path.read_text("utf-8")
    if path.suffix == ".sql":
        return set(re.findall(r"^-- name: (\w+)", text, re.MULTILINE))
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {spelt for name in methods for spelt in (name, f"{node.name}.{name}")}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def rows_of(heading: str) -> list[list[str]]:
    lines = [line for line in SECTIONS[heading].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w.]+(?:/[\w.]+)+|\w+\.(?:py|sql|toml))`", PAGE))))
def test_a_path_of_the_page_exists(path: str) -> None:
    assert any((base / path).exists() for base in (PACKAGE, ROOT, PACKAGE / "cli"))  # `run.py`, in the row of cli


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_name_of_the_page_is_defined_in_its_file(path: str, name: str) -> None:
    assert name in defined_in(find(path)), path


def test_the_page_names_what_a_reader_needs() -> None:
    assert len(NAMED) > 50


def test_every_process_is_listed() -> None:
    assert {row[0] for row in rows_of("Six processes")} == {*PROCESSES, "worker"}


def test_packages_are_listed_in_the_order_of_the_layers() -> None:
    listed = [re.findall(r"`(\w+)`", row[0]) for row in rows_of("Packages")]
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert sorted(name for row in listed for name in row) == sorted(there - {"__init__", "__main__"})
    layers = (ROOT / "pyproject.toml").read_text("utf-8").split("layers = [\n", 1)[1].split("]", 1)[0]
    places = {name: place for place, line in enumerate(layers.splitlines()) for name in re.findall(r"k\.(\w+)", line)}
    order = [places[name] for row in listed for name in row]
    assert order == sorted(order)
