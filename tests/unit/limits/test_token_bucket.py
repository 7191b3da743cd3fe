"""What a limit leaves, and how it is shared out."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.gates import BUSY_SECONDS, Allowance, allowance, share_out

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def allowed(**given: Any) -> Allowance:
    of_nothing: dict[str, Any] = {
        "max_in_flight": None, "rate": None, "burst": None, "in_flight": 0, "tokens": None, "refilled_at": None,
        "at": NOW, "room": 1000,
    }  # fmt: skip
    row = of_nothing | given
    return allowance(row, row["in_flight"], row["room"])


def test_no_limit_leaves_all_the_room() -> None:
    assert allowed() == Allowance(1000, BUSY_SECONDS, None)


@pytest.mark.parametrize(("in_flight", "tasks"), [(0, 5), (4, 1), (5, 0), (9, 0)])
def test_what_is_in_flight_counts_against_its_limit(in_flight: int, tasks: int) -> None:
    assert allowed(max_in_flight=5, in_flight=in_flight).tasks == tasks


@pytest.mark.parametrize(
    ("rate", "burst", "tasks"), [(10.0, None, 10), (10.0, 3, 3), (0.5, None, 1), (2.5, None, 3), (0.01, 4, 4)]
)
def test_a_rate_that_was_never_used_leaves_its_burst(rate: float, burst: int | None, tasks: int) -> None:
    assert allowed(rate=rate, burst=burst).tasks == tasks


@pytest.mark.parametrize(
    ("tokens", "seconds", "tasks", "retry"),
    [
        (0.0, 0.0, 0, 0.5),
        (0.5, 0.0, 0, 0.25),
        (0.0, 0.5, 1, BUSY_SECONDS),
        (0.0, 60.0, 2, BUSY_SECONDS),
        (1.9, 0.0, 1, BUSY_SECONDS),
    ],
)
def test_a_rate_refills_with_time_up_to_its_burst(tokens: float, seconds: float, tasks: int, retry: float) -> None:
    found = allowed(rate=2.0, tokens=tokens, refilled_at=NOW - timedelta(seconds=seconds))
    assert (found.tasks, found.retry_seconds) == (tasks, pytest.approx(retry))
    assert found.spent(tasks) == pytest.approx(min(2.0, tokens + 2 * seconds) - tasks)


def test_a_clock_that_went_back_refills_nothing() -> None:
    assert allowed(rate=2.0, tokens=0.0, refilled_at=NOW + timedelta(seconds=60)).tasks == 0


@given(st.integers(0, 200), st.lists(st.integers(0, 50), max_size=20))
def test_room_is_shared_to_the_last_and_nobody_gets_more_than_may_go(room: int, tasks: list[int]) -> None:
    gates = {f"g{n}": Allowance(count, 0.0, None) for n, count in enumerate(tasks)}
    shares = share_out(room, gates)
    assert sum(shares.values()) == min(room, sum(tasks))
    assert all(0 < shares[name] <= one.tasks for name, one in gates.items() if name in shares)
    if shares and room >= len([count for count in tasks if count]):
        # No gate gets two more than another that would have taken more.
        for name, one in gates.items():
            got = shares.get(name, 0)
            assert got == one.tasks or got >= max(shares.values()) - 1


@pytest.mark.parametrize("room", [1, 2])
def test_a_room_smaller_than_the_number_of_gates_goes_to_each_of_them_in_turn(room: int) -> None:
    gates = {"small": Allowance(1, 0.0, None), "first": Allowance(room, 0.0, None), "last": Allowance(room, 0.0, None)}
    went = sum((Counter(share_out(room, gates)) for _ in range(300)), Counter[str]())
    assert went.total() == 300 * room
    assert min(went[name] for name in gates) > 50 * room


def test_what_cannot_be_shared_evenly_goes_to_each_gate_in_turn() -> None:
    gates = dict.fromkeys(("first", "last"), Allowance(3, 0.0, None))
    went = sum((Counter(share_out(3, gates)) for _ in range(300)), Counter[str]())
    assert went.total() == 900
    assert min(went.values()) > 350


@given(
    st.floats(0.1, 50), st.one_of(st.none(), st.integers(1, 20)),
    st.lists(st.tuples(st.floats(0, 3), st.integers(0, 30)), max_size=40),
)  # fmt: skip
def test_never_more_than_the_burst_and_the_rate_go(
    rate: float, burst: int | None, steps: list[tuple[float, int]]
) -> None:
    tokens, refilled_at, now, went = None, None, NOW, 0
    full = burst or max(1, -(-rate // 1))
    for seconds, wanted in steps:
        now += timedelta(seconds=seconds)
        found = allowed(rate=rate, burst=burst, tokens=tokens, refilled_at=refilled_at, now=now)
        taken = min(wanted, found.tasks)
        tokens, refilled_at = found.spent(taken), now
        went += taken
        assert went <= full + rate * (now - NOW).total_seconds() + 1e-6
