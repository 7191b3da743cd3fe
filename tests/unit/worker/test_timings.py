"""What a worker notes of run times, and how long it waits for a batch, with a clock that the tests turn."""

from __future__ import annotations

import itertools
import json

import pytest

from penstock.protocol.reports import RunTimes, decode_reports
from penstock.runtime import periodic
from penstock.runtime.periodic import Linger, Pace
from penstock.worker import result_sender
from penstock.worker.result_sender import Timings
from tests.integration.doors import sample

_numbers = itertools.count()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(result_sender, "monotonic", clock)
    monkeypatch.setattr(periodic, "monotonic", clock)
    return clock


@pytest.fixture
def action() -> str:
    """An action whose metrics no other test has touched."""
    return f"timed-{next(_numbers)}"


def told(text: str | None) -> dict[str, tuple[int, float]]:
    assert text is not None
    (report,) = decode_reports(text, batch_limit=1)
    assert isinstance(report, RunTimes)
    return report.actions


# Timings


def test_run_times_are_told_added_up_by_action_whatever_the_outcome(clock: Clock) -> None:
    kept = Timings()
    for action, outcome, seconds in [("a", "ok", 0.5), ("a", "error", 0.25), ("b", "timeout", 9.0), ("a", "ok", 0.25)]:
        kept.add(action, outcome, seconds)
    assert told(kept.unsent()) == {"a": (3, 1.0), "b": (1, 9.0)}


def test_there_is_nothing_to_tell_before_and_after(clock: Clock) -> None:
    kept = Timings()
    assert kept.unsent() is None
    kept.add("a", "ok", 1.0)
    assert kept.unsent() is not None
    clock.now += 60
    assert kept.unsent() is None


def test_they_are_told_every_quarter_of_a_second_at_the_most_and_none_is_lost(clock: Clock) -> None:
    kept = Timings()
    kept.add("a", "ok", 1.0)
    assert told(kept.unsent()) == {"a": (1, 1.0)}
    kept.add("a", "ok", 2.0)
    clock.now += 0.2
    kept.add("a", "ok", 3.0)
    assert kept.unsent() is None
    clock.now += 0.05
    assert told(kept.unsent()) == {"a": (2, 5.0)}


def test_one_notification_names_a_thousand_actions_and_the_next_one_the_rest(clock: Clock) -> None:
    kept = Timings()
    for number in range(1001):
        kept.add(f"a{number}", "ok", 1.0)
    first = told(kept.unsent())
    clock.now += 0.25
    assert len(first) == 1000
    assert told(kept.unsent()).keys() == {f"a{number}" for number in range(1001)} - first.keys()


def test_run_times_enter_the_metrics_once_each(clock: Clock, action: str) -> None:
    kept = Timings()
    for seconds in (0.002, 0.02, 20):
        kept.add(action, "ok", seconds)
    kept.add(action, "error", 1.0)
    kept.unsent()
    kept.unsent()
    assert sample("penstock_run_seconds_count", action=action, outcome="ok") == 3
    assert sample("penstock_run_seconds_sum", action=action, outcome="ok") == pytest.approx(20.022)
    assert sample("penstock_run_seconds_bucket", action=action, outcome="ok", le="0.025") == 2
    assert sample("penstock_run_seconds_count", action=action, outcome="error") == 1


def test_an_action_of_any_name_is_told(clock: Clock) -> None:
    kept = Timings()
    kept.add('ünïcode "quoted" \u20ac', "ok", 0.5)
    text = kept.unsent()
    assert told(text) == {'ünïcode "quoted" \u20ac': (1, 0.5)}
    assert json.loads(text or "")["method"] == "run_times"


# Linger


def at_rate(clock: Clock, per_second: float, *, full: int = 1000, longest_seconds: float = 0.05) -> Linger:
    """After two seconds of so many items a second, in ten calls a second."""
    lingering = Linger(full, longest_seconds=longest_seconds)
    for _ in range(20):
        clock.now += 0.1
        lingering.record(round(per_second / 10))
    return lingering


def test_an_idle_worker_does_not_wait(clock: Clock) -> None:
    assert Linger(1000, longest_seconds=0.05).seconds(1) == 0
    assert at_rate(clock, 10).seconds(1) == 0
    assert at_rate(clock, 700).seconds(1) == 0


def test_the_busier_the_longer_up_to_the_longest(clock: Clock) -> None:
    waits = [at_rate(clock, rate).seconds(1) for rate in (2000, 5000, 10_000, 20_000, 80_000)]
    assert waits == pytest.approx([0.005, 0.0125, 0.025, 0.05, 0.05], rel=0.01)


def test_a_full_call_does_not_wait(clock: Clock) -> None:
    lingering = at_rate(clock, 20_000)
    assert lingering.seconds(999) > 0
    assert lingering.seconds(1000) == 0


def test_a_worker_that_has_become_idle_soon_waits_no_more(clock: Clock) -> None:
    lingering = at_rate(clock, 20_000)
    clock.now += 1
    lingering.record(1)
    assert lingering.seconds(1) == 0


def test_the_first_items_after_a_long_rest_are_no_rush(clock: Clock) -> None:
    lingering = Linger(1000, longest_seconds=0.05)
    clock.now += 600
    lingering.record(500)
    assert lingering.seconds(1) == 0


# Pace


def turns(clock: Clock, per_second: float, longest_seconds: float = 0.025) -> list[float]:
    """The waits before three sends at once, after two seconds of so many items a second."""
    pace = Pace(longest_seconds)
    for _ in range(20):
        clock.now += 0.1
        pace.record(round(per_second / 10))
    return [pace.turn_seconds() for _ in range(3)]


@pytest.mark.parametrize(
    ("per_second", "seconds"), [(10, 0), (50, 0.0026), (200, 0.0104), (480, 0.025), (1200, 0.01), (20_000, 0.0006)]
)
def test_sends_are_as_far_apart_as_a_dozen_items_take_and_no_further(
    clock: Clock, per_second: float, seconds: float
) -> None:
    assert turns(clock, per_second) == pytest.approx([0, seconds, 2 * seconds], abs=0.0001)


def test_a_longer_pace_shares_more_and_none_shares_nothing(clock: Clock) -> None:
    assert turns(clock, 50, longest_seconds=1)[1] == pytest.approx(12 / 50, rel=0.01)
    assert turns(clock, 500, longest_seconds=0) == [0, 0, 0]


def test_a_send_after_a_rest_is_not_late(clock: Clock) -> None:
    pace = Pace(1.0)
    clock.now += 1
    pace.record(100)
    assert pace.turn_seconds() == 0
    clock.now += 10
    assert pace.turn_seconds() == 0


def test_two_calls_at_the_same_instant_do_no_harm(clock: Clock) -> None:
    lingering = Linger(1000, longest_seconds=0.05)
    lingering.record(1)
    lingering.record(1)
    assert lingering.seconds(1) == 0
