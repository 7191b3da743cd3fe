from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock
from penstock.cli.doctor.database import INVARIANTS
from penstock.db.statements import SQL

PACKAGE = Path(penstock.__file__).parent
FILES = sorted(PACKAGE.rglob("*.sql"))
SOURCE = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
_NAME = re.compile(r"^-- name: (.*)$", re.MULTILINE)


def head_of(path: Path) -> str:
    """The comment above the first statement of a file, which speaks for all of them."""
    return path.read_text("utf-8").split("-- name: ")[0]


def test_every_statement_of_every_file_is_loaded_once() -> None:
    named = [name for path in FILES for name in _NAME.findall(path.read_text("utf-8"))]
    assert FILES
    assert sorted(named) == sorted(SQL)


@pytest.mark.parametrize("name", SQL)
def test_a_statement_is_named_verb_noun_in_lower_case(name: str) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)+", name)


@pytest.mark.parametrize("name", SQL)
def test_a_statement_is_one_statement_without_its_semicolon(name: str) -> None:
    code = re.sub(r"--.*|'[^']*'", "", SQL[name])
    assert code.strip()
    assert ";" not in code


@pytest.mark.parametrize("name", SQL)
def test_a_statement_is_used(name: str) -> None:
    assert f'"{name}"' in SOURCE or name in {invariant.statement for invariant in INVARIANTS}


@pytest.mark.parametrize("name", SQL)
def test_every_parameter_is_explained_above_its_statement(name: str) -> None:
    (home,) = [path for path in FILES if name in _NAME.findall(path.read_text("utf-8"))]
    comments = head_of(home) + "\n".join(re.findall(r"--.*", SQL[name]))
    code = re.sub(r"--.*", "", SQL[name])
    used = {int(number) for number in re.findall(r"\$([0-9]+)", code)}
    assert used == set(range(1, max(used, default=0) + 1)), "a parameter is skipped"
    explained = {int(number) for number in re.findall(r"\$([0-9]+)", comments)}
    for first, last in re.findall(r"\$([0-9]+) to \$([0-9]+)", comments):
        explained |= set(range(int(first), int(last) + 1))
    assert used <= explained


@pytest.mark.parametrize("name", SQL)
def test_values_are_bound_and_only_a_partition_and_its_parent_are_put_in_by_name(name: str) -> None:
    code = re.sub(r"--.*", "", SQL[name])
    assert set(re.findall(r"\{[a-z_]+\}|%s|%\(", code)) <= {"{partition}", "{parent}"}
