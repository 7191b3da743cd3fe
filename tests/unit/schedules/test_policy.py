"""What is done about a schedule that is due, decided without a database."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from time import thread_time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.answers import Missed
from penstock.schedules.cron import COUNTED, timing
from penstock.schedules.policy import FEW_COUNTED, Misfires, Rule, plan, render, run_name

BASE = datetime(2026, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def rule(expression: str = "* * * * *", **more: Any) -> Rule:
    given: dict[str, Any] = {
        "name": "n", "timing": timing(expression, "UTC", BASE), "start_at": None, "end_at": None, "jitter_seconds": 0.0,
        "missed": Missed.ONE, "max_missed": 100, "max_lateness_seconds": None,
    }  # fmt: skip
    return Rule(**given | more)


def minutes(*numbers: int) -> list[datetime]:
    return [BASE + n * MINUTE for n in numbers]


def test_one_on_time_is_run_and_the_clock_goes_on() -> None:
    decided = plan(rule(), BASE, BASE + timedelta(seconds=1), 60)
    assert decided.run == [BASE]
    assert (decided.misfires, decided.last, decided.next.at) == (None, BASE, BASE + MINUTE)


@pytest.mark.parametrize(
    ("missed", "more", "run", "lost"),
    [
        (Missed.SKIP, {}, minutes(9, 10), Misfires(9, BASE, BASE + 8 * MINUTE)),
        (Missed.ONE, {}, minutes(9, 10), Misfires(9, BASE, BASE + 8 * MINUTE)),
        (Missed.ALL, {}, minutes(*range(11)), None),
        (Missed.ALL, {"max_missed": 4}, minutes(7, 8, 9, 10), Misfires(7, BASE, BASE + 6 * MINUTE)),
        (Missed.ALL, {"max_lateness_seconds": 240.0}, minutes(7, 8, 9, 10), Misfires(7, BASE, BASE + 6 * MINUTE)),
        (Missed.SKIP, {"max_lateness_seconds": 40.0}, minutes(10), Misfires(10, BASE, BASE + 9 * MINUTE)),
    ],
)
def test_after_ten_minutes_without_a_supervisor(
    missed: Missed, more: dict[str, Any], run: list[datetime], lost: Misfires | None
) -> None:
    """The grace is a minute and a half: the last two are on time."""
    decided = plan(rule(missed=missed, **more), BASE, BASE + 10 * MINUTE + timedelta(seconds=20), 90)
    assert (decided.run, decided.misfires) == (run, lost)
    assert (decided.last, decided.next.at) == (BASE + 10 * MINUTE, BASE + 11 * MINUTE)


@pytest.mark.parametrize(
    ("missed", "run", "lost"),
    [
        (Missed.SKIP, [], Misfires(1, BASE, BASE)),
        (Missed.ONE, [BASE], None),
        (Missed.ALL, [BASE], None),
    ],
)
def test_a_single_instant_that_was_missed(missed: Missed, run: list[datetime], lost: Misfires | None) -> None:
    decided = plan(rule("0 12 * * *", missed=missed), BASE, BASE + timedelta(hours=3), 60)
    assert (decided.run, decided.misfires) == (run, lost)
    assert decided.next.at == BASE + timedelta(days=1)


def test_nothing_comes_after_the_end() -> None:
    decided = plan(rule(end_at=BASE + MINUTE), BASE + MINUTE, BASE + 5 * MINUTE, 600)
    assert (decided.run, decided.next.at, decided.next.due) == ([BASE + MINUTE], None, None)
    missed = plan(rule(end_at=BASE + MINUTE, missed=Missed.ALL), BASE, BASE + 5 * MINUTE, 1)
    assert (missed.run, missed.next.at) == (minutes(0, 1), None)


def test_start_and_end_belong_to_it() -> None:
    within = rule(start_at=BASE + MINUTE, end_at=BASE + 2 * MINUTE)
    assert within.next_after(BASE - timedelta(days=1)).at == BASE + MINUTE
    assert within.next_after(BASE + MINUTE).at == BASE + 2 * MINUTE
    assert within.next_after(BASE + 2 * MINUTE).at is None
    odd = rule(start_at=BASE + timedelta(seconds=0.5))
    assert odd.next_after(BASE - timedelta(days=1)).at == BASE + MINUTE


def test_jitter_differs_by_schedule_and_instant_and_by_nothing_else() -> None:
    one, other = rule(jitter_seconds=50.0), rule(jitter_seconds=50.0, name="m")
    delays = [one.due(instant) - instant for instant in minutes(*range(50))]
    assert delays == [rule(jitter_seconds=50.0).due(instant) - instant for instant in minutes(*range(50))]
    assert delays != [other.due(instant) - instant for instant in minutes(*range(50))]
    assert len(set(delays)) > 45
    assert all(timedelta() <= delay < timedelta(seconds=50) for delay in delays)


def test_what_is_not_due_for_its_jitter_is_neither_run_nor_lost() -> None:
    jittered = rule("* * * * * *", jitter_seconds=30.0, missed=Missed.ALL, max_missed=1000)
    now = BASE + timedelta(seconds=100)
    next_at: datetime | None = BASE
    run: list[datetime] = []
    while next_at is not None and jittered.due(next_at) <= now:
        decided = plan(jittered, next_at, now, 60)
        assert decided.misfires is None
        assert all(jittered.due(instant) <= now for instant in decided.run)
        run += decided.run
        next_at = decided.next.at
    assert run == [BASE + timedelta(seconds=n) for n in range(len(run))]
    assert len(run) > 70


@pytest.mark.parametrize("jitter_seconds", [50.0, 3000.0])
def test_of_late_instants_one_is_run_also_where_those_within_the_jitter_have_rounds_of_their_own(
    jitter_seconds: float,
) -> None:
    jittered = rule(jitter_seconds=jitter_seconds)
    now = BASE + timedelta(minutes=90, seconds=49)
    next_at: datetime | None = BASE
    plans = []
    while next_at is not None and jittered.due(next_at) <= now:
        plans.append(plan(jittered, next_at, now, 1))
        next_at = plans[-1].next.at
    run = [instant for decided in plans for instant in decided.run]
    assert run == [plans[-1].last]
    assert sum(one.misfires.instants for one in plans if one.misfires) == (run[0] - BASE) // MINUTE


def test_of_a_year_of_seconds_the_newest_are_made_up_for() -> None:
    now = BASE + timedelta(days=365)
    decided = plan(rule("* * * * * *", missed=Missed.ALL, max_missed=1000), BASE, now, 60)
    assert decided.run == [now - timedelta(seconds=n) for n in reversed(range(1000))]
    assert decided.misfires == Misfires(COUNTED - 1000, BASE, now - timedelta(seconds=1000))
    assert decided.next.at == now + timedelta(seconds=1)


@pytest.mark.parametrize("missed", [Missed.ONE, Missed.SKIP])
def test_where_one_at_most_is_made_up_for_a_year_of_minutes_is_counted_in_part(missed: Missed) -> None:
    now = BASE + timedelta(days=365, seconds=100)
    decided = plan(rule(missed=missed), BASE, now, 60)
    newest = now - timedelta(seconds=40)
    assert decided.run == [newest]
    assert decided.misfires == Misfires(FEW_COUNTED - 1, BASE, newest - MINUTE)
    assert decided.next.at == newest + MINUTE


def test_every_minute_of_a_year_is_counted_to_the_last() -> None:
    decided = plan(rule("@every 1m", missed=Missed.SKIP), BASE, BASE + timedelta(days=365, seconds=50), 60)
    assert decided.run == [BASE + timedelta(days=365)]
    assert decided.misfires == Misfires(365 * 1440, BASE, BASE + timedelta(days=365) - MINUTE)


@given(
    st.sampled_from(list(Missed)),
    st.integers(1, 50),
    st.none() | st.floats(0, 10_000),
    st.floats(0, 10_000),
    st.integers(0, 300),
    st.floats(0, 60),
)
def test_every_instant_that_has_passed_is_run_or_lost_once(
    missed: Missed, most: int, lateness: float | None, grace: float, later: int, more: float
) -> None:
    now = BASE + later * MINUTE + timedelta(seconds=more)
    decided = plan(rule(missed=missed, max_missed=most, max_lateness_seconds=lateness), BASE, now, grace)
    all_passed = minutes(*range(int((now - BASE) / MINUTE) + 1))
    assert len(decided.run) + (decided.misfires.instants if decided.misfires else 0) == len(all_passed)
    assert decided.run == sorted(decided.run)
    assert set(decided.run) <= set(all_passed)
    if decided.misfires is not None:
        assert decided.misfires.since == BASE
        assert decided.misfires.until not in decided.run
    if lateness is not None:
        assert all((now - instant).total_seconds() <= lateness for instant in decided.run)
    if missed is Missed.ALL:
        assert len(decided.run) <= most
    assert decided.last == all_passed[-1]
    assert decided.next.at == all_passed[-1] + MINUTE


@given(st.sampled_from(list(Missed)), st.integers(1, 50), st.integers(0, 300), st.integers(1, 7), st.floats(0, 90))
def test_rounds_of_a_few_instants_run_and_lose_what_one_round_would(
    missed: Missed, max_missed: int, later: int, most: int, jitter: float
) -> None:
    now = BASE + later * MINUTE
    given = rule(missed=missed, max_missed=max_missed, jitter_seconds=jitter, max_lateness_seconds=7200.0)
    whole = plan(given, BASE, now, 600)
    run: list[datetime] = []
    lost, last = 0, BASE - MINUTE
    while last < whole.last:
        decided = plan(given, last + MINUTE, now, 600, most)
        assert 0 <= len(decided.run) <= most
        run += decided.run
        lost += decided.misfires.instants if decided.misfires else 0
        last = decided.last
    assert (run, lost, last) == (whole.run, whole.misfires.instants if whole.misfires else 0, whole.last)


# Templates


def test_a_large_payload_is_filled_in_fast() -> None:
    """A round may have to fill in hundreds."""
    payload, seconds = json.dumps({"at": "{{scheduled_time}}", "text": "x" * 250_000}), []
    for _ in range(5):
        began = thread_time()
        assert render(payload, "n", 7, BASE).startswith('{"at": "2026-05-01T12:00:00.000000Z"')
        seconds.append(thread_time() - began)
    assert min(seconds) < 0.008


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["{{run}}", "{{schedule}}", "a{{run}}b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("{{run}}"), inner, max_size=3),
    max_leaves=8,
)


def filled(value: Any, name: str) -> Any:
    """The oracle: on the values, not on the text."""
    if isinstance(value, dict):
        return {key: filled(inner, name) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, name) for inner in value]
    if isinstance(value, str) and value in ("{{run}}", "{{schedule}}", "a{{run}}b"):
        run = run_name(7, BASE)
        return {"{{run}}": run, "{{schedule}}": name, "a{{run}}b": f"a{run}b"}[value]
    return value


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.text(max_size=20), st.booleans())
def test_templates_change_string_values_and_leave_valid_json(
    payload: dict[str, Any], name: str, ascii_only: bool
) -> None:
    text = json.dumps(payload, ensure_ascii=ascii_only)
    assert json.loads(render(text, name, 7, BASE)) == filled(payload, name)


def test_numbers_and_everything_else_stay_as_they_were_written() -> None:
    text = '{"n" : 1.500, "big":12345678901234567890, "at":"{{ scheduled_time }}", "\\u007b{run}}": "\\"{{run"}'
    assert render(text, "n", 7, BASE) == text.replace("{{ scheduled_time }}", "2026-05-01T12:00:00.000000Z")
