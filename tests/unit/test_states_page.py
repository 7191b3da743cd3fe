from __future__ import annotations

import re
from pathlib import Path

from penstock.db.statements import SQL
from penstock.protocol.task import FINAL_STATES, State
from tests.transitions import TRANSITIONS

PAGE = (Path(__file__).parents[2] / "docs" / "states.md").read_text("utf-8")
_ARROW = re.compile(r"^    (\w+) --> (\w+): ", re.MULTILINE)
_ROW = re.compile(r"^\| (?P<before>.+?) \| (?P<after>.+?) \| .+? \| (?P<statements>.+?) \| .+ \|$", re.MULTILINE)


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def rows() -> list[tuple[list[str], list[str], list[str]]]:
    return [
        (names(row["before"]), names(row["after"]), names(row["statements"]))
        for row in _ROW.finditer(PAGE.split("## Who performs each transition")[1])
        if "`" in row["statements"]
    ]


def test_the_diagram_draws_every_transition_and_no_other() -> None:
    arrows = _ARROW.findall(PAGE)
    assert len(arrows) == len(set(arrows))
    assert {(State(before), State(after)) for before, after in arrows} == TRANSITIONS


def test_the_diagram_ends_in_the_final_states() -> None:
    assert {State(name) for name in re.findall(r"^    (\w+) --> \[\*\]", PAGE, re.MULTILINE)} == FINAL_STATES


def test_the_table_tells_who_performs_each_transition() -> None:
    told = {(State(before), State(after)) for befores, afters, _ in rows() for before in befores for after in afters}
    assert told == TRANSITIONS


def test_every_statement_that_the_table_names_is_there() -> None:
    named = {statement for _, _, statements in rows() for statement in statements}
    assert named <= SQL.keys()
    changing = {name for name, text in SQL.items() if re.search(r"set state =|into penstock\.task(_history)? \(", text)}
    assert changing <= named
