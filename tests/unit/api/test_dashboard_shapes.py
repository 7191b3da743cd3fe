"""What the dashboard draws and writes, without a database: charts, graphs, timelines, formats."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from penstock.api.dashboard import formats, graph, overview
from penstock.api.dashboard.browser_sessions import flash_of, flashed, local_path
from penstock.api.dashboard.requests import cleaned, labels_of, params_of, utc
from penstock.api.dashboard.routes import _templates
from penstock.api.dashboard.timeline import timeline
from penstock.protocol import answers
from penstock.protocol.answers import Step, StepKind
from penstock.protocol.errors import InvalidParams
from penstock.protocol.task import State
from penstock.protocol.views import timestamp

NOW = datetime(2030, 1, 31, 8, tzinfo=UTC)
charts: Any = _templates().globals["charts"]
texts = st.text(max_size=30)


@pytest.mark.parametrize(("seconds", "text"), [
    (None, "–"), (0, "0 ms"), (0.0001, "<1 ms"), (0.25, "250 ms"), (1.5, "1.5 s"), (90, "1.5 min"),
    (7200, "2 h"),
    (86_400 * 3, "3 d"),
])  # fmt: skip
def test_a_span_is_told_by_its_largest_unit(seconds: float | None, text: str) -> None:
    assert formats.span(seconds) == text


@pytest.mark.parametrize(("value", "text"), [
    (0, "0"), (12345, "12,345"), (0.125, "0.12"), (12.34, "12.3"), (3.0, "3"), (None, "–"), (1_234_567.8, "1,234,568"),
])  # fmt: skip
def test_a_number_has_the_digits_that_it_needs(value: float | None, text: str) -> None:
    assert formats.number(value) == text


def test_numbers_in_json_are_shown_as_they_were_written() -> None:
    assert formats.pretty(msgspec.Raw(b'{"a":1.10,"b":123456789012345678901234567890}')) == (
        '{\n  "a": 1.10,\n  "b": 123456789012345678901234567890\n}'
    )
    nested = b"[" * 97 + b"1," * 40_000 + b"1" + b"]" * 97
    assert len(formats.indented(msgspec.Raw(nested))) == len(nested), "each of its lines would begin with 200 blanks"
    assert "more characters" in formats.pretty(msgspec.Raw(msgspec.json.encode(["x" * 100] * 1000)))


scalars = st.none() | st.booleans() | st.integers(-9, 9) | texts
members = st.sampled_from(["code", "message", "data", "type", "traceback", "x"])


@given(error=st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(members, inner)))
def test_any_error_a_worker_makes_up_can_be_shown(error: Any) -> None:
    parts = formats.error_parts(msgspec.Raw(msgspec.json.encode(error)))
    assert all(isinstance(parts[name], str) for name in ("kind", "message", "traceback"))


counts = st.integers(0, 10**9)


@given(minutes=st.lists(st.tuples(texts, counts, counts, counts), min_size=1, max_size=60))
def test_columns_are_well_formed_and_stay_inside(minutes: list[tuple[str, int, int, int]]) -> None:
    minutes = [("".join(filter(str.isprintable, label)), *given) for label, *given in minutes]  # type: ignore[misc]
    highest = max(succeeded + failed for _, _, succeeded, failed in minutes)
    top = overview.nice_top(max(highest, *(minute[1] for minute in minutes)))
    drawn = charts.columns({"minutes": minutes, "highest": highest, "top": top})
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", drawn, re.DOTALL)[0])  # type: ignore[index]
    for shape in svg.iter("rect"):
        if shape.get("class") != "hover":
            assert float(shape.get("y", 0)) >= -0.01
            assert float(shape.get("y", 0)) + float(shape.get("height", 0)) <= 100.02


@given(value=st.floats(1e-6, 1e12))
def test_the_top_of_an_axis_is_above_the_highest_value_and_not_far(value: float) -> None:
    top = overview.nice_top(value)
    assert value * 0.999 <= top <= value * 2.01


def step(number: int, name: str, *after: str, state: State = State.WAITING, parent: str | None = None) -> Step:
    return Step(
        number=number, name=name, kind=StepKind.TASK, state=state, after=list(after), parent=parent, task_id=number
    )


def test_a_step_stands_behind_all_that_it_waits_for() -> None:
    drawn = charts.graph(
        graph.layout([step(0, "a"), step(1, "b", "a"), step(2, "c", "a"), step(3, "d", "b", "c", "a")])
    )
    places = dict(zip("abcd", (float(x) for x in re.findall(r"translate\((\d+),", drawn)), strict=True))
    assert places["a"] < places["b"] == places["c"] < places["d"]
    assert drawn.count('class="edge"') == 5
    ElementTree.fromstring(drawn)


@given(st.lists(st.lists(st.integers(0, 11), max_size=4), min_size=1, max_size=12))
def test_any_graph_is_drawn_even_one_that_cannot_be(links: list[list[int]]) -> None:
    steps = [step(place, f"s{place}", *(f"s{one}" for one in before)) for place, before in enumerate(links)]
    drawn = charts.graph(graph.layout(steps, "all"))
    assert drawn.count('<g class="node') == len(steps)
    ElementTree.fromstring(drawn)


def test_alike_steps_are_one_node_with_the_most_telling_of_their_states() -> None:
    fan = [step(1 + place, f"s{place}", "a", state=State.SUCCESS) for place in range(graph.FAN_OUT)]
    last = step(50, "z", "s0", "s1")
    assert len(graph.layout([step(0, "a"), *fan, last])["nodes"]) == 2 + graph.FAN_OUT
    fan.append(step(40, "s40", "a", state=State.CRITICAL_ERROR))
    drawn = graph.layout([step(0, "a"), *fan, last])
    node = drawn["nodes"][1][0]
    assert (node.size, node.state) == (graph.FAN_OUT + 1, State.CRITICAL_ERROR)
    assert node.counts == [(State.SUCCESS, graph.FAN_OUT), (State.CRITICAL_ERROR, 1)]
    assert len(drawn["lines"]) == 2
    ElementTree.fromstring(charts.graph(drawn))


def detail(**given: Any) -> answers.TaskDetail:
    values: dict[str, Any] = {
        "id": 1, "action": "a", "state": State.SCHEDULED, "attempts": 0, "max_attempts": 3, "priority": 0,
        "run_at": timestamp(NOW), "created_at": timestamp(NOW), "updated_at": timestamp(NOW),
        "progress": None, "result": None, "error": None, "payload": None, "unique_key": None, "ordering_key": None,
        "limit_key": None, "labels": None, "expires_at": None, "timeout": None, "claim": 0, "worker": None,
        "failures": [],
    }  # fmt: skip
    return answers.TaskDetail(**values | given)


def life(**given: Any) -> dict[str, Any]:
    values = dict.fromkeys(("claimed_at", "heartbeat_at", "workflow", "route", "behind"))
    return values | {"suspect": False, "unsent": False} | given


def test_a_life_is_told_in_order_from_the_first_attempt_to_the_end() -> None:
    failed = answers.Failure(
        attempt=1,
        claim=5,
        at=timestamp(NOW + timedelta(seconds=4)),
        error=msgspec.Raw(b'{"message":"boom"}'),
        worker="one:7",
    )
    task = detail(state=State.SUCCESS, attempts=2, claim=9, failures=[failed], worker="two:8",
                  updated_at=timestamp(NOW + timedelta(seconds=30)))  # fmt: skip
    events = timeline(task, life(claimed_at=NOW + timedelta(seconds=20)), NOW + timedelta(seconds=60))
    assert [event["title"] for event in events] == [
        "Enqueued", "Attempt 1 failed", "Attempt 2 of 3 claimed", "Succeeded",
    ]  # fmt: skip
    assert [event["later"] for event in events] == [None, "4 s", "16 s", "10 s"]
    assert events[1]["error"]["message"] == "boom"
    assert (events[1]["detail"], events[-1]["detail"].split(", ")[0]) == ("ran on one:7, claim 5", "ran on two:8")


def test_a_life_that_no_worker_told_its_name_in_names_none() -> None:
    failed = answers.Failure(
        attempt=1, claim=5, at=timestamp(NOW), error=msgspec.Raw(b'{"message":"boom"}'), worker=None
    )
    events = timeline(detail(state=State.SUCCESS, failures=[failed]), life(), NOW)
    assert not any("ran on" in event["detail"] for event in events)


@pytest.mark.parametrize(("given", "of_life", "last"), [
    ({"state": State.WAITING, "ordering_key": "k"}, {"behind": 7}, "Waiting for task 7, by ordering key k"),
    ({"state": State.WAITING}, {"workflow": 4}, "Waiting for earlier steps of workflow 4"),
    ({"state": State.WAITING, "ordering_key": "k"}, {"workflow": 4, "behind": 7},
     "Waiting for task 7, by ordering key k"),
    ({"state": State.WAITING, "waits_for": answers.WaitsFor(token="tok", until="2030-01-31T08:00:00Z")}, {},
     "Waiting for an event, token tok"),
    ({"state": State.ACQUIRED, "attempts": 1, "claim": 3}, {"claimed_at": NOW}, "In flight"),
    ({"state": State.ERROR, "attempts": 1}, {}, "Attempt 2 is due"),
    ({"state": State.CANCELLED, "reason": "expired"}, {}, "Cancelled"),
])  # fmt: skip
def test_a_life_ends_with_what_it_is_at_now(given: dict[str, Any], of_life: dict[str, Any], last: str) -> None:
    assert timeline(detail(**given), life(**of_life), NOW)[-1]["title"] == last


@pytest.mark.parametrize("there", ["//x", "http://x", "/\\x", "/a\nb", "x", "", "/ä", "/" + "x" * 5000])
def test_a_way_back_that_is_not_ours_is_the_overview(there: str) -> None:
    assert local_path(there) == "/"
    assert local_path("/tasks?state=ERROR&x=%C3%A4") == "/tasks?state=ERROR&x=%C3%A4"


@pytest.mark.parametrize("character", ["a", "ü", "\N{GRINNING FACE}", "\x01"])
def test_what_a_form_has_to_say_is_a_cookie_that_browsers_keep(character: str) -> None:
    cookie = flashed("/", character * 2000, "failed").headers["set-cookie"].partition(";")[0]
    assert len(cookie) <= 4096
    shown = flash_of(Request({"type": "http", "headers": [(b"cookie", cookie.encode())]}))
    assert shown is not None
    assert (set(shown[0]), shown[1]) == ({character}, "failed")


def test_fields_of_forms_become_what_methods_take() -> None:
    assert labels_of("a=1, b=2 c") == {"a": "1", "b": "2", "c": ""}
    assert utc("2030-01-31T08:00") == "2030-01-31T08:00:00Z"
    assert utc("2030-01-31T08:00:00+01:00") == "2030-01-31T08:00:00+01:00"
    assert cleaned({"a": " \0x ", "b": " ", "c": "\ud800"}) == {"a": "\ufffdx", "c": "?"}
    given = {"delay": "1.5", "action": "a", "spread": "2", "priority": "3"}
    assert params_of("bulk.reschedule", given) == {
        "action": "a", "delay": 90.0, "spread": 120.0, "priority": 3,
    }  # fmt: skip
    for number in ("inf", "nan", "1e308"):  # minutes, in seconds
        with pytest.raises(InvalidParams, match="older_than must be a number"):
            params_of("bulk.retry", {"older_than": number})
    for digits in (20, 310, 5000):
        with pytest.raises(InvalidParams, match="limit must be a whole number, not '9999"):
            params_of("list", {"limit": "9" * digits})
