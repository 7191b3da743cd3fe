"""How many handlers have to run at once, by what is known of the work of a lane."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.limits.model import RouteSetParams
from penstock.limits.scaling import OUTBOUND, ActionLoad, RouteLoad
from penstock.protocol.errors import InvalidParams


def work(
    *, waiting: int = 0, in_flight: int = 0, running: float = 0.0, run_seconds: float | None = None, action: str = "a"
) -> ActionLoad:
    return ActionLoad(action, waiting, in_flight, 0.0, running, run_seconds)


def slots(*of: ActionLoad, drain_seconds: float = 60) -> float:
    return RouteLoad("x", of).slots(drain_seconds)


def test_a_lane_that_keeps_up_needs_what_runs() -> None:
    # 100 a second of half a second each; what is in flight at this instant is what runs.
    assert slots(work(in_flight=50, running=50, run_seconds=0.5)) == 50
    # Short ones that come now and then: at most instants none is there.
    assert slots(work(running=0.2, run_seconds=0.01)) == 0.2


def test_a_backlog_adds_its_run_time_over_the_time_to_drain() -> None:
    lane = work(waiting=12_000, in_flight=50, running=50, run_seconds=0.5)
    assert slots(lane) == 50 + 12_000 * 0.5 / 60
    assert slots(lane, drain_seconds=600) == 50 + 12_000 * 0.5 / 600


def test_no_more_handlers_than_tasks_are_asked_for() -> None:
    assert slots(work(waiting=10, run_seconds=3600)) == 10
    assert slots(work(in_flight=10, running=10, run_seconds=3600)) == 10


def test_one_handler_is_asked_for_while_there_is_a_task_however_short() -> None:
    assert slots(work(waiting=1, run_seconds=0.001)) == 1
    assert slots(work(in_flight=1, running=0.5, run_seconds=0.001)) == 1


def test_one_handler_is_asked_for_while_no_run_time_is_known_and_none_without_tasks() -> None:
    assert slots(work(waiting=50_000)) == 1
    assert slots(work(in_flight=3)) == 1
    assert slots() == slots(work()) == 0


def test_an_action_of_unknown_run_time_counts_as_the_others_of_its_lane() -> None:
    known = work(waiting=600, run_seconds=2, action="known")
    assert slots(known, work(waiting=300, action="new")) == pytest.approx(900 * 2 / 60)


def test_the_examples_of_the_page_are_what_is_reckoned() -> None:
    page = (Path(__file__).parents[3] / "docs" / "autoscaling.md").read_text("utf-8")
    table = page.split("| ran at once |", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip().replace(",", "") for cell in line.split("|")[1:6]] for line in table.splitlines()[2:]]
    assert len(rows) == 7
    for running, tasks, run_seconds, drain_seconds, told in rows:
        seconds = None if run_seconds == "unknown" else float(run_seconds)
        lane = work(waiting=int(tasks), running=float(running), run_seconds=seconds)
        assert slots(lane, drain_seconds=float(drain_seconds)) == pytest.approx(float(told), abs=0.5), (tasks, told)


works = st.builds(
    work,
    waiting=st.integers(0, 100_000), in_flight=st.integers(0, 100_000), running=st.floats(0, 10_000),
    run_seconds=st.none() | st.floats(0, 43_200),
)  # fmt: skip


@given(found=st.lists(works, max_size=5), drain_seconds=st.floats(1, 86_400))
def test_the_figure_is_bounded_by_what_runs_and_what_is_there(found: list[ActionLoad], drain_seconds: float) -> None:
    lane = RouteLoad("x", found)
    tasks, running = lane.waiting + lane.in_flight, sum(each.running for each in found)
    needed = lane.slots(drain_seconds)
    assert 0 <= needed <= max(tasks, running)
    if any(each.run_seconds is not None for each in found):
        assert needed >= running
        assert needed >= lane.slots(2 * drain_seconds)
    assert (needed >= 1) or not tasks


def test_no_route_can_have_the_name_of_the_outbound_lane() -> None:
    given = {"name": OUTBOUND, "queue": "q"}
    with pytest.raises(InvalidParams, match="name must be"):
        RouteSetParams(**given)
