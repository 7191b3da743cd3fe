from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.protocol.task import (
    BEGINNING,
    EVERYTHING,
    FINAL_STATES,
    PRIORITY_MAX,
    PRIORITY_MIN,
    Claimed,
    Failure,
    NewTask,
    Position,
    State,
    Stretch,
)
from tests.transitions import READY_STATES, TRANSITIONS

LIVE_STATES = set(State) - FINAL_STATES


def test_states_are_final_or_live_and_a_claim_takes_only_live_ones() -> None:
    assert {state for state in State if state.final} == FINAL_STATES
    assert READY_STATES < LIVE_STATES


def test_every_state_can_be_entered_and_left() -> None:
    assert {before for before, _ in TRANSITIONS} == set(State) - {State.SUCCESS}
    assert {after for _, after in TRANSITIONS} == set(State)


def test_success_is_for_ever() -> None:
    assert State.SUCCESS not in {before for before, _ in TRANSITIONS}


def test_only_a_claim_leads_to_acquired_from_a_ready_state_or_where_a_turn_has_come() -> None:
    assert {before for before, after in TRANSITIONS if after is State.ACQUIRED} == READY_STATES | {State.WAITING}


def test_only_a_claimed_task_succeeds_or_fails_and_one_that_waits_with_its_claim() -> None:
    for outcome in (State.SUCCESS, State.ERROR, State.CRITICAL_ERROR):
        assert {before for before, after in TRANSITIONS if after is outcome} == {State.ACQUIRED, State.WAITING}


def test_every_live_state_can_be_cancelled_and_no_final_one() -> None:
    assert {before for before, after in TRANSITIONS if after is State.CANCELLED} == LIVE_STATES


def test_a_state_is_its_own_name_in_text_and_json() -> None:
    assert [f"{state}" for state in State] == [state.name for state in State]


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (NewTask("a"), "action"),
        (Claimed(1, 2, "a", "{}", None, 0.0, False), "claim"),
        (Failure(1, 2, "{}", None), "claim"),
        (Stretch(1, 2, BEGINNING), "after"),
        (BEGINNING, "id"),
    ],
)
def test_records_cannot_be_changed(record: object, field: str) -> None:
    with pytest.raises(AttributeError):  # of a dataclass: FrozenInstanceError
        setattr(record, field, getattr(record, field))


def test_everything_is_one_stretch_over_all_priorities_behind_every_beginning() -> None:
    assert (Stretch(PRIORITY_MIN, PRIORITY_MAX, BEGINNING),) == EVERYTHING
    assert Position(datetime(1, 1, 2, tzinfo=UTC), 1) > BEGINNING
