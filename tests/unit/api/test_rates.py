from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import access
from penstock.api.access import Rates
from penstock.protocol.errors import RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(limits: Rates, caller: str, requests: int) -> float | None:
    """Seconds to wait, None when the requests were taken."""
    try:
        limits.charge(caller, requests)
    except RateLimited as exc:
        return exc.retry_after_seconds
    return None


def test_burst_is_taken_at_once_and_the_rate_afterwards() -> None:
    clock = Clock()
    limits = Rates(10, 5, clock=clock)
    assert [refused(limits, "a", 1) for _ in range(5)] == [None] * 5
    assert refused(limits, "a", 1) == pytest.approx(0.1)
    clock.now += 0.1
    assert refused(limits, "a", 1) is None
    assert refused(limits, "a", 1) == pytest.approx(0.1)


def test_callers_do_not_share_a_bucket() -> None:
    limits = Rates(1, 1, clock=Clock())
    assert refused(limits, "a", 1) is None
    assert refused(limits, "a", 1) is not None
    assert refused(limits, "b", 1) is None


def test_batch_above_the_burst_is_taken_from_a_full_bucket_and_paid_for_afterwards() -> None:
    clock = Clock()
    limits = Rates(100, 50, clock=clock)
    assert refused(limits, "a", 1000) is None
    assert refused(limits, "a", 1) == pytest.approx(9.51)
    clock.now += 9.51
    assert refused(limits, "a", 1) is None


def test_refused_requests_cost_nothing_and_the_wait_told_is_enough() -> None:
    clock = Clock()
    limits = Rates(10, 10, clock=clock)
    limits.charge("a", 8)
    waits = [refused(limits, "a", 5) for _ in range(3)]
    assert waits == [pytest.approx(0.3)] * 3
    clock.now += 0.3
    assert refused(limits, "a", 5) is None


def test_caller_in_debt_is_refused_before_its_body_is_read() -> None:
    clock = Clock()
    limits = Rates(1, 1, clock=clock)
    limits.check("a")
    limits.check("a")
    limits.charge("a", 1)
    with pytest.raises(RateLimited):
        limits.check("a")


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 30)), max_size=60))
def test_over_any_time_no_more_pass_than_burst_and_rate_allow(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    limits = Rates(5, 10, clock=clock)
    passed = 0
    for pause, requests in steps:
        clock.now += pause
        before = passed
        if refused(limits, "a", requests) is None:
            passed += requests
            # What is over is the debt of the last batch alone.
            assert before + min(requests, 10) <= 10 + 5 * (clock.now - 1000) + 1e-6


def test_memory_is_bounded_by_forgetting_full_buckets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_BUCKETS_KEPT", 3)
    clock = Clock()
    limits = Rates(1, 10, clock=clock)
    limits.charge("idle", 1)
    clock.now += 5
    limits.charge("busy", 10)
    limits.charge("busier", 20)
    limits.charge("new", 1)
    assert set(limits._full_at) == {"busy", "busier", "new"}
    limits.charge("newer", 10)
    assert set(limits._full_at) == {"busy", "busier", "newer"}
    assert refused(limits, "busier", 1) is not None
