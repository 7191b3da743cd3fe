from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import SettingsError
from penstock.protocol.retry import Backoff

seconds = st.floats(min_value=1e-3, max_value=1e6)
shares = st.floats(min_value=0, max_value=1)


def test_delays_double_from_the_base_to_the_cap() -> None:
    backoff = Backoff(base_seconds=5, factor=2, cap_seconds=60, jitter=0)
    assert [backoff.delay_seconds(attempt) for attempt in range(1, 7)] == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize(("drawn", "expected"), [(0.0, 10.0), (0.5, 9.0), (1.0, 8.0)])
def test_jitter_shortens_a_delay_by_at_most_its_share(drawn: float, expected: float) -> None:
    assert Backoff(10, 2, 100, jitter=0.2).delay_seconds(1, rand=lambda: drawn) == pytest.approx(expected)


@given(base=seconds, factor=st.floats(1, 1e3), more=st.floats(0, 1e6), jitter=shares, attempt=st.integers(1, 10**6))
def test_every_delay_lies_within_its_jitter_and_the_cap(
    base: float, factor: float, more: float, jitter: float, attempt: int
) -> None:
    backoff = Backoff(base, factor, base + more, jitter)
    longest = backoff.delay_seconds(attempt, rand=lambda: 0.0)
    assert 0 <= backoff.delay_seconds(attempt) <= longest <= backoff.cap_seconds
    assert backoff.delay_seconds(attempt, rand=lambda: 1.0) == pytest.approx(longest * (1 - jitter))


@given(drawn=st.lists(shares, min_size=10, max_size=10))
def test_with_the_default_jitter_delays_grow_until_the_cap_whatever_is_drawn(drawn: list[float]) -> None:
    delays = [Backoff().delay_seconds(n, rand=lambda n=n: drawn[n - 1]) for n in range(1, 10)]  # type: ignore[misc]
    assert all(earlier < later for earlier, later in pairwise(delays))


def test_an_attempt_beyond_the_floats_range_waits_for_the_cap() -> None:
    assert Backoff(1, 2, 30, 0).delay_seconds(5000) == 30


@pytest.mark.parametrize("attempt", [0, -1])
def test_an_attempt_below_the_first_is_a_mistake(attempt: int) -> None:
    with pytest.raises(ValueError, match=f"not {attempt}"):
        Backoff().delay_seconds(attempt)


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"base_seconds": 0}, "base"),
        ({"base_seconds": -1.0}, "base"),
        ({"base_seconds": math.nan}, "base"),
        ({"base_seconds": math.inf, "cap_seconds": math.inf}, "base"),
        ({"factor": 0.5}, "factor"),
        ({"factor": math.nan}, "factor"),
        ({"factor": math.inf}, "factor"),
        ({"base_seconds": 10.0, "cap_seconds": 9.0}, "cap"),
        ({"cap_seconds": math.inf}, "cap"),
        ({"cap_seconds": math.nan}, "cap"),
        ({"jitter": -0.1}, "jitter"),
        ({"jitter": 1.1}, "jitter"),
        ({"jitter": math.nan}, "jitter"),
    ],
)
def test_a_policy_out_of_range_is_refused_with_the_value_seen(values: dict[str, float], seen: str) -> None:
    with pytest.raises(SettingsError, match=seen):
        Backoff(**values)
