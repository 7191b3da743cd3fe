"""docs/features.md against the tests, methods and commands that it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from penstock.api.table import METHODS
from penstock.methods.table import SUBMIT_PREFIX
from tests.command_lines import command_tree

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text("utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")][
    2:
]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_table_has_rows_of_three_cells_and_no_feature_twice() -> None:
    assert len(ROWS) >= 16
    assert all(len(row) == 3 and all(row) for row in ROWS)
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_feature_is_held_by_tests_that_exist(row: list[str]) -> None:
    named = TEST.findall(row[2])
    assert named, "no test is named"
    assert TEST.sub("", row[2]).strip(", ") == "", "something else stands among the tests"
    for path, name in named:
        assert name in names_in(path), f"{path} has no {name}"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_method_and_command_of_a_feature_exists(row: list[str]) -> None:
    for name in re.findall(r"`((?:bulk|job|keys|dlq|rejected)\.\w+|submit:)", row[1]):
        assert name in METHODS or name == SUBMIT_PREFIX, name
    group = command_tree()
    for words in re.findall(r"`penstock ((?:[a-z][a-z-]* ?)+)", row[1]):
        command = group
        for word in words.split():
            commands = getattr(command, "commands", None)
            if commands is None:
                break  # an argument
            command = commands[word]
