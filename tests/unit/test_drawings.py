"""The drawings of the pipeline against the processes that there are, what they call, and who needs a database."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.cli.run import PROCESSES, _maker
from penstock.protocol.errors import SettingsError
from penstock.settings.model import Settings
from tests.docs_blocks import ROOT, all_blocks
from tests.drawings import Flowchart, read_flowchart
from tests.unit.test_terraform import called

PAGES = ("README.md", "docs/threat-model.md")
QUEUES = {role: f"{role} queue" for role in ("inbound", "outbound", "results")}
DRAWN = {*PROCESSES, "worker"}
FLOWS = {"sqs:SendMessage", "sqs:ReceiveMessage"}


def drawing(page: str) -> Flowchart:
    (block,) = (block for block in all_blocks() if block.page == page and block.info == "mermaid")
    return read_flowchart(block.text)


def needs_database(process: str) -> bool:
    try:
        _maker(process, Settings(), (), None)
    except SettingsError as exc:  # a worker is refused for want of handlers
        return "PENSTOCK_DATABASE_URL" in str(exc)
    return False


@pytest.mark.parametrize("page", PAGES)
def test_every_process_and_every_queue_is_drawn_and_nothing_else_of_ours(page: str) -> None:
    drawn = drawing(page)
    outside = {start for start, _, _ in drawn.arrows} - {stop for _, _, stop in drawn.arrows} - DRAWN
    ours = drawn.nodes - outside - {"postgres", "metrics"}
    assert ours == DRAWN | QUEUES.keys()
    assert {name: drawn.titles[name] for name in QUEUES} == QUEUES
    assert drawn.titles["postgres"] == "Postgres"
    assert all(drawn.titles.get(name) for name in outside), "who is no process says who that is"


@pytest.mark.parametrize("page", PAGES)
def test_arrows_to_and_from_queues_are_the_calls_of_the_processes(page: str) -> None:
    wanted = set()
    for process, calls in called().items():
        for action, queue in calls:
            if process in DRAWN and queue in QUEUES and action in FLOWS:
                wanted.add((process, queue) if action == "sqs:SendMessage" else (queue, process))
    drawn = {(start, stop) for start, _, stop in drawing(page).arrows if {start, stop} & QUEUES.keys()}
    from_outside = {pair for pair in drawn if not set(pair) & DRAWN}
    assert drawn - from_outside == wanted
    assert [stop for _, stop in from_outside] == ["inbound"]


@pytest.mark.parametrize("page", PAGES)
def test_arrows_to_and_from_postgres_are_of_those_that_need_one(page: str) -> None:
    drawn = [{start, stop} - {"postgres"} for start, _, stop in drawing(page).arrows if "postgres" in (start, stop)]
    assert len(drawn) == len({*map(frozenset, drawn)})
    assert set().union(*drawn) & DRAWN == {process for process in DRAWN if needs_database(process)}


def test_boundaries_that_are_drawn_are_those_that_are_explained() -> None:
    drawn = {number for _, label, _ in drawing("docs/threat-model.md").arrows for number in label.split(", ")}
    page = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
    explained = page.split("```mermaid", 1)[1].split("\n## ", 1)[0]
    assert drawn == set(re.findall(r"^(\d)\. \*\*", explained, re.MULTILINE))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("graph LR\n    a --> b\n", "no flowchart"), ("flowchart LR\n    a -- b\n", "no arrow")],
)
def test_what_a_test_could_not_read_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_flowchart(text)


def test_arrows_are_read_with_their_labels_and_titles() -> None:
    found: Any = read_flowchart(
        "flowchart LR\n    a([an a]) -->|1, 2| b[[b c]]\n    b --> c[(C)]\n    c --> d[/x y/]\n"
    )
    assert found.arrows == [("a", "1, 2", "b"), ("b", "", "c"), ("c", "", "d")]
    assert found.titles == {"a": "an a", "b": "b c", "c": "C", "d": "x y"}
