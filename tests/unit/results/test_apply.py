from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.json_text import utf8_size
from penstock.protocol.reports import NO_HINTS, BackoffHint, Hints
from penstock.protocol.retry import Backoff
from penstock.results.apply import ERROR_LIMIT_BYTES, LONGEST_RETRY_SECONDS, bounded_error, delay_after

BACKOFF = Backoff(base_seconds=1, factor=2, cap_seconds=100, jitter=0)


@pytest.mark.parametrize(("attempt", "expected"), [(1, 1.0), (2, 2.0), (3, 4.0), (9, 100.0), (10, None), (11, None)])
def test_delays_grow_until_the_last_attempt_which_has_none(attempt: int, expected: float | None) -> None:
    assert delay_after(attempt, 10, NO_HINTS, BACKOFF) == expected


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        (Hints(final=True), None),
        (Hints(final=True, retry_after=5), None),
        (Hints(retry_after=7.5), 7.5),
        (Hints(retry_after=0), 0),
        (Hints(retry_after=-1), 2.0),
        (Hints(retry_after=1e12), 2.0),
        (Hints(max_attempts=2), None),
        (Hints(max_attempts=3), 2.0),
        (Hints(max_attempts=99), 2.0),
        (Hints(max_attempts=0), 2.0),
        (Hints(max_attempts=-5), 2.0),
        (Hints(max_attempts=2, retry_after=5), None),
        (Hints(backoff=BackoffHint(10, 3, 100, 0)), 30.0),
        (Hints(backoff=BackoffHint(10, 3, 20, 0)), 20.0),
        (Hints(backoff=BackoffHint(0, 3, 20, 0)), 2.0),
        (Hints(backoff=BackoffHint(10, 0.5, 20, 0)), 2.0),
        (Hints(backoff=BackoffHint(10, 3, 5, 0)), 2.0),
        (Hints(backoff=BackoffHint(10, 3, 100, 0), retry_after=1), 1),
        (Hints(backoff=BackoffHint(1e300, 1, 1e300, 0)), LONGEST_RETRY_SECONDS),
    ],
)
def test_hints_steer_the_second_attempt_of_ten_and_senseless_ones_are_ignored(
    hints: Hints, expected: float | None
) -> None:
    assert delay_after(2, 10, hints, BACKOFF) == expected


hints = st.builds(
    Hints,
    st.none() | st.floats(),
    st.booleans(),
    st.none() | st.integers(),
    st.none() | st.builds(BackoffHint, st.floats(), st.floats(), st.floats(), st.floats()),
)


@given(attempt=st.integers(1, 1000), max_attempts=st.integers(1, 1000), given_hints=hints)
def test_no_hint_leads_beyond_the_tasks_own_cap_or_to_a_delay_that_no_clock_takes(
    attempt: int, max_attempts: int, given_hints: Hints
) -> None:
    delay = delay_after(attempt, max_attempts, given_hints, BACKOFF)
    if attempt >= max_attempts or given_hints.final:
        assert delay is None
    if delay is not None:
        assert 0 <= delay <= LONGEST_RETRY_SECONDS


def error_of(size: int, filler: str = "x") -> str:
    text = json.dumps({"code": -32000, "message": "boom", "data": ""}, ensure_ascii=False)
    return text.replace('""', '"' + filler * ((size - utf8_size(text)) // utf8_size(filler)) + '"')


def test_an_error_at_the_limit_is_kept_as_it_came() -> None:
    error = error_of(ERROR_LIMIT_BYTES)
    assert utf8_size(error) == ERROR_LIMIT_BYTES
    assert bounded_error(error) is error


@pytest.mark.parametrize(
    "error",
    [
        error_of(ERROR_LIMIT_BYTES + 1),
        error_of(ERROR_LIMIT_BYTES + 10, "\u20ac"),
        '{"code":-32000,"message":"boom","data":' + "9" * 40_000 + "}",
        '{"code":-32000,"message":"boom","data":' + "[" * 400 + " " * 40_000 + "]" * 400 + "}",
    ],
    ids=["one byte over", "in bytes, not characters", "a number of 40,000 digits", "deep"],
)
def test_an_error_over_the_limit_keeps_its_code_and_message(error: str) -> None:
    kept = bounded_error(error)
    expected = {"code": -32000, "message": "boom", "data": {"truncated_from": utf8_size(error)}}
    assert json.loads(kept) == expected


def test_a_message_over_the_limit_is_cut_too() -> None:
    kept = json.loads(bounded_error(json.dumps({"code": 1, "message": "m" * 100_000})))
    assert kept["message"] == "m" * 2000
