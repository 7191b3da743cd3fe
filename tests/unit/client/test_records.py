"""Records: dicts with attributes, generated from the api's structs; and options, which are the api's parameters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from penstock.client import records
from penstock.client.record import read
from penstock.limits.model import ActionSetParams, TenantSetParams
from penstock.protocol import options
from penstock.schedules.model import ScheduleCreateParams
from penstock.tasks.params import BulkParams, BulkRescheduleParams, EnqueueParams
from penstock.workflows.model import StepParams

PAGE = {"tasks": [{"id": 1, "state": "ERROR", "error": {"code": 3}}, {"id": 2, "tenant": "a"}], "cursor": None}


def test_a_record_is_the_dict_that_it_was_with_attributes() -> None:
    page = read(records.TaskPage, PAGE)
    assert page == PAGE
    assert json.dumps(page) == json.dumps(PAGE)
    assert (page.tasks[0].id, page["tasks"][1].tenant, page.cursor) == (1, "a", None)
    assert page.tasks[0].error == {"code": 3}
    assert {**page.tasks[1]} == {"id": 2, "tenant": "a"}
    assert isinstance(page.tasks[0], records.Task)


def test_a_member_that_was_left_out_has_its_default_and_an_unknown_one_is_an_error() -> None:
    first = read(records.TaskPage, PAGE).tasks[0]
    assert (first.tenant, first.result_gone, first.reason) == (None, False, None)
    assert read(records.TaskDetail, {"id": 1, "result_gone": True}).result_gone is True
    with pytest.raises(AttributeError, match="this Task has no 'payload'; it has id, state, error"):
        _ = first.payload
    with pytest.raises(KeyError):
        _ = first["tenant"]


def test_parts_and_arrays_are_records_and_anything_else_stays() -> None:
    detail = read(records.TaskDetail, {"waits_for": {"token": "t"}, "failures": [{"attempt": 1}], "payload": {"id": 1}})
    assert (detail.waits_for.token, detail.failures[0].attempt, type(detail.payload)) == ("t", 1, dict)
    assert read(records.TaskDetail, {"waits_for": None}).waits_for is None
    error = ValueError()
    (found, none, kept) = read(records.Task, [{"id": 1}, None, error])
    assert (found.id, none, kept) == (1, None, error)
    assert read(None, [{"id": 1}]) == [{"id": 1}]


def test_the_records_are_those_of_the_api() -> None:
    script = Path(__file__).parents[3] / ".ci" / "records.py"
    run = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("kind", "params", "others"),
    [
        (options.EnqueueOptions, EnqueueParams, {"action", "payload", "sealed_payload"}),
        (options.StepOptions, StepParams, {"action", "payload", "name", "after", "over", "item_as"}),
        (options.LimitOptions, ActionSetParams, {"action"}),
        (options.TenantLimitOptions, TenantSetParams, {"tenant"}),
        (options.BulkOptions, BulkParams, set()),
        (options.BulkRescheduleOptions, BulkRescheduleParams, set()),
        (options.ScheduleOptions, ScheduleCreateParams, {"name", "expression", "action", "payload", "replace"}),
        (options.ScheduleUpdates, ScheduleCreateParams, {"name", "replace"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_options_are_the_parameters_of_their_method(kind: Any, params: Any, others: set[str]) -> None:
    assert get_type_hints(kind).keys() == set(params.__struct_fields__) - others
