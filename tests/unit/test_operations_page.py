"""docs/operations.md against what it speaks of: alert rules, tests, commands, settings, metrics, log events."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from penstock.protocol.task import State
from penstock.runtime import metrics
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.supervisor.repair import Repair
from tests.command_lines import find_command, options_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)))
COMMANDS = sorted(set(re.findall(r"`penstock ([a-z][^`]*)`", PAGE)))


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table's rows under a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_a_test_that_the_page_names_exists(path: str, name: str) -> None:
    assert name in names_in(path)


def test_every_promise_and_every_case_names_a_test() -> None:
    promises = rows_of("Guarantees")
    assert len(promises) >= 15
    for promise in (*promises, *rows_of("The three ambiguous cases")):
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", promise[-1]), promise[0]


def test_every_alert_has_its_section_and_no_other() -> None:
    groups = yaml.safe_load((ROOT / "docs" / "operations" / "compose" / "alerts.yml").read_text("utf-8"))["groups"]
    rules = [rule["alert"] for group in groups for rule in group["rules"]]
    section = PAGE.split("## Alarms\n", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == rules


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_the_page_names_exists_with_its_options(line: str) -> None:
    command, words = find_command(line.split())
    assert {word for word in words if word.startswith("-")} <= options_of(command)


def test_settings_metrics_and_log_events_of_the_page_exist() -> None:
    settings = set(re.findall(rf"\b{PREFIX}(\w+)", PAGE))
    assert {name.lower() for name in settings} <= set(Settings.model_fields)
    exported = {sample.name for family in metrics.REGISTRY.collect() for sample in family.samples}
    exported |= {family.name for family in metrics.REGISTRY.collect()}
    exported |= {f"{name}_total" for name in exported}
    assert set(re.findall(r"`(penstock_[a-z_]+)`", PAGE)) <= exported
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "services" / "penstock").rglob("*.py"))
    for event in ("backing_off", "recovered", "pass_failed", "send_failed", "dead_letters_rose"):
        assert event in PAGE
        assert f'"{event}"' in source, event


def test_the_drawing_of_the_silent_ends_where_the_repair_does_and_names_what_it_goes_by() -> None:
    (drawing,) = re.findall(r"```mermaid\nflowchart TD\n(.*?)```", PAGE, re.DOTALL)
    node = r'(\w)(?:\["(.*?)"\]|\{"(.*?)"\})?'
    arrows = [re.fullmatch(rf'    {node} --(?: "?(.*?)"? --)?> {node}', line) for line in drawing.splitlines()]
    titles, questions, after = {}, set(), {}
    for arrow in arrows:
        assert arrow is not None
        start, start_text, start_question, answer, stop, text, question = arrow.groups()
        for name, told, asked in ((start, start_text, start_question), (stop, text, question)):
            titles |= {name: told or asked} if told or asked else {}
            questions |= {name} if asked else set()
        after.setdefault(start, []).append((answer, stop))
    assert {stop for answers in after.values() for _, stop in answers} | {"S"} == titles.keys()
    for name, answers in after.items():
        words = {re.split("[:,]", answer)[0] for answer, _ in answers if answer}
        assert words == ({"yes", "no"} if name in questions else set()), titles[name]
    ends = {name for name in titles if name not in after}
    repair = Path(inspect.getfile(Repair)).read_text("utf-8")
    told = " ".join(titles.values())
    assert set(re.findall(r"\w+_seconds", told)) == set(re.findall(r"settings\.(un\w+_seconds)", repair))
    assert set(re.findall(r"\b[A-Z_]{4,}\b", told)) <= set(State)
    (quoted,) = re.findall(r"'(.*)'", told)
    assert quoted in repair
    # What the repair does: give back unsent, untaken and once more alone, and fail.
    released = set(re.findall(r'RELEASED\.labels\("(\w+)"\)', repair))
    assert (released, len(ends)) == ({"unsent", "untaken", "suspect"}, len(released) + 1)
