"""Filters of bulk operations: what is refused, by which field, and what is kept."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.methods.table import read_command
from penstock.protocol.checks import like_pattern
from penstock.protocol.errors import InvalidParams
from penstock.protocol.task import FINAL_STATES, State
from penstock.settings.model import Settings, load_settings
from penstock.tasks.bulk import STATES, BulkWork, Operation


@pytest.fixture(scope="module")
def limits() -> Settings:
    return load_settings()


def read(limits: Settings, method: str, params: Any) -> Any:
    return read_command(method, json.dumps(params).encode(), limits)


@pytest.mark.parametrize("operation", Operation)
def test_an_operation_is_about_live_tasks_or_about_settled_ones(operation: Operation) -> None:
    assert len({state in FINAL_STATES for state in STATES[operation]}) == 1


@pytest.mark.parametrize("operation", Operation)
def test_an_empty_filter_is_refused_and_all_must_be_said(limits: Settings, operation: Operation) -> None:
    more = {"delay": 1} if operation is Operation.RESCHEDULE else {}
    for params in ({}, {"all": False}, {"dry_run": True}, {"action": None, "states": None}):
        with pytest.raises(InvalidParams) as refused:
            read(limits, operation, params | more)
        assert refused.value.data["field"] == "all"
    command = read(limits, operation, {"all": True} | more)
    assert not command.dry_run
    assert command == BulkWork(all=True, states=list(STATES[operation]), **more)


def test_a_dry_run_is_another_command(limits: Settings) -> None:
    command = read(limits, "bulk.delete", {"states": ["SUCCESS", "SUCCESS"], "dry_run": True})
    assert command.dry_run
    assert command.states == [State.SUCCESS]


@pytest.mark.parametrize(
    ("method", "params", "field", "seen"),
    [
        ("bulk.cancel", {"all": True, "action": "a"}, "all", "without action"),
        ("bulk.cancel", {"action": ""}, "action", "is empty"),
        ("bulk.cancel", {"action": "a\nb"}, "action", "control character"),
        ("bulk.cancel", {"action": "a" * 201}, "action", "201"),
        ("bulk.cancel", {"states": []}, "states", "is empty"),
        ("bulk.cancel", {"states": ["WAITING", "SUCCESS"]}, "states[1]", "is SUCCESS"),
        ("bulk.retry", {"states": ["SCHEDULED"]}, "states[0]", "is SCHEDULED"),
        ("bulk.delete", {"states": ["ERROR"]}, "states[0]", "is ERROR"),
        ("bulk.reschedule", {"states": ["ACQUIRED"], "delay": 1}, "states[0]", "is ACQUIRED"),
        ("bulk.cancel", {"states": ["DONE"]}, "states[0]", "'DONE'"),
        ("bulk.cancel", {"labels": {}}, "labels", "is empty"),
        ("bulk.cancel", {"labels": {"a": 1}}, "labels[...]", "int"),
        ("bulk.cancel", {"labels": {"ten\u0000ant": "b"}}, "labels", "ten"),
        ("bulk.cancel", {"older_than": -1}, "older_than", "-1"),
        ("bulk.cancel", {"newer_than": 1e18}, "newer_than", "1e+18"),
        ("bulk.cancel", {"older_than": 60, "newer_than": 30}, "newer_than", "30"),
        ("bulk.cancel", {"ids_from": "x"}, "ids_from", "'x'"),
        ("bulk.cancel", {"ids_from": 9, "ids_to": 8}, "ids_to", "8"),
        ("bulk.cancel", {"acton": "a"}, "acton", "did you mean action"),
        ("bulk.cancel", {"action": "a", "delay": 1}, "delay", "is unknown"),
        ("bulk.reschedule", {"action": "a"}, "run_at", "must be given"),
        ("bulk.reschedule", {"action": "a", "delay": 1, "run_at": 5}, "delay", "exclude"),
        ("bulk.reschedule", {"action": "a", "delay": -5}, "delay", "-5"),
        ("bulk.reschedule", {"action": "a", "priority": 1, "spread": 9}, "spread", "9"),
        ("bulk.reschedule", {"action": "a", "delay": 1, "spread": -9}, "spread", "-9"),
        ("bulk.reschedule", {"action": "a", "priority": 40000}, "priority", "40000"),
        ("bulk.reschedule", {"action": "a", "run_at": "noon"}, "run_at", "'noon'"),
        ("bulk.reschedule", {"action": "a", "run_at": "9999-12-31T00:00:00Z", "spread": 1}, "run_at", "9999"),
        ("bulk.cancel", {"labels": {"a": "b" * 201}}, "labels.a", "at most 200 characters"),
        ("bulk.cancel", {"labels": {"b" * 61: "a"}}, "labels", "need names of 1 to 60 characters"),
        ("list", {"labels": {str(n): "" for n in range(17)}}, "labels", "are 17"),
        ("job.get", {}, "id", "is missing"),
        ("job.cancel", {"id": "one"}, "id", "'one'"),
        ("job.list", {"limit": 0}, "limit", "0"),
    ],
)
def test_a_mistake_is_told_by_its_field_with_the_value_seen(
    limits: Settings, method: str, params: Any, field: str, seen: str
) -> None:
    with pytest.raises(InvalidParams) as refused:
        read(limits, method, params)
    assert refused.value.data["field"] == field
    assert seen in refused.value.message


@pytest.mark.parametrize(
    ("action", "like"), [("a", "a"), ("a*", "a%"), ("*", "%"), ("a_b%", r"a\_b\%"), (r"a\*b", r"a\\%b")]
)
def test_a_pattern_knows_the_star_and_nothing_else(action: str, like: str) -> None:
    assert like_pattern(action) == like


def test_the_parameters_of_a_job_come_back_as_they_went(limits: Settings) -> None:
    params = {
        "action": "a*", "states": ["ERROR"], "labels": {"x": "y"}, "older_than": 1, "newer_than": 2.5, "ids_from": 3,
        "ids_to": "4", "run_at": "2040-01-02T03:04:05.678901+01:00", "spread": 60, "priority": -1,
    }  # fmt: skip
    work = read(limits, "bulk.reschedule", params)
    kept = msgspec.json.decode(msgspec.json.encode(work))
    assert msgspec.convert(kept, BulkWork) == work
