from __future__ import annotations

import dataclasses

import pytest

from penstock.tasks import FINAL_STATES, READY_STATES, TRANSITIONS, Claimed, Failure, NewTask, State, is_legal

LIVE_STATES = set(State) - FINAL_STATES


def test_states_are_final_or_live_and_a_claim_takes_only_live_ones() -> None:
    assert {state for state in State if state.final} == FINAL_STATES
    assert READY_STATES < LIVE_STATES


def test_every_state_can_be_entered_and_left() -> None:
    assert {before for before, _ in TRANSITIONS} == set(State) - {State.SUCCESS}
    assert {after for _, after in TRANSITIONS} == set(State)


def test_success_is_for_ever() -> None:
    assert not any(is_legal(State.SUCCESS, after) for after in State)


def test_only_a_claim_leads_to_acquired_and_only_from_a_ready_state() -> None:
    assert {before for before, after in TRANSITIONS if after is State.ACQUIRED} == READY_STATES


def test_only_a_claimed_task_succeeds_or_fails() -> None:
    outcomes = {State.SUCCESS, State.ERROR, State.CRITICAL_ERROR}
    assert {before for before, after in TRANSITIONS if after in outcomes} == {State.ACQUIRED}


def test_every_live_state_can_be_cancelled_and_no_final_one() -> None:
    assert {before for before, after in TRANSITIONS if after is State.CANCELLED} == LIVE_STATES


def test_a_state_is_its_own_name_in_text_and_json() -> None:
    assert [f"{state}" for state in State] == [state.name for state in State]


@pytest.mark.parametrize("record", [NewTask("a"), Claimed(1, 2, "a", "{}", None, 0.0), Failure(1, 2, "{}", None)])
def test_records_cannot_be_changed(record: object) -> None:
    field = dataclasses.fields(record)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, "other")
