"""Records: dicts with attributes; and options, which are the api's parameters."""

from __future__ import annotations

import ast
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from penstock.limits.model import ActionSetParams, TenantSetParams
from penstock.protocol import answers, options
from penstock.protocol.record import read, view_of
from penstock.schedules.model import ScheduleCreateParams
from penstock.tasks.params import BulkParams, BulkRescheduleParams, EnqueueParams
from penstock.workflows.model import StepParams

NOW = datetime(2030, 1, 31, 8, tzinfo=UTC)
PAGE = {"tasks": [{"id": 1, "state": "ERROR", "error": {"code": 3}}, {"id": 2, "tenant": "a"}], "cursor": None}


def test_a_record_is_the_dict_that_it_was_with_attributes() -> None:
    page = read(answers.TaskPage, PAGE)
    assert page == PAGE
    assert json.dumps(page) == json.dumps(PAGE)
    assert (page.tasks[0].id, page["tasks"][1].tenant, page.cursor) == (1, "a", None)
    assert page.tasks[0].error == {"code": 3}
    assert {**page.tasks[1]} == {"id": 2, "tenant": "a"}
    assert isinstance(page.tasks[0], answers.Task)


def test_a_member_that_was_left_out_has_its_default_and_an_unknown_one_is_an_error() -> None:
    first = read(answers.TaskPage, PAGE).tasks[0]
    assert (first.tenant, first.result_gone, first.reason) == (None, False, None)
    assert read(answers.TaskDetail, {"id": 1, "result_gone": True}).result_gone is True
    with pytest.raises(AttributeError, match="this Task has no 'payload'; it has id, state, error"):
        _ = first.payload
    with pytest.raises(KeyError):
        _ = first["tenant"]


def test_a_member_may_have_the_name_of_a_method_of_dicts() -> None:
    page = read(answers.HeldKeys, {"keys": [{"key": "a"}], "cursor": None})
    assert (page.keys[0].key, {**page}, json.loads(json.dumps(page))) == ("a", page, page)


def test_parts_and_arrays_are_records_and_anything_else_stays() -> None:
    detail = read(answers.TaskDetail, {"waits_for": {"token": "t"}, "failures": [{"attempt": 1}], "payload": {"id": 1}})
    assert (detail.waits_for.token, detail.failures[0].attempt, type(detail.payload)) == ("t", 1, dict)
    assert read(answers.TaskDetail, {"waits_for": None}).waits_for is None
    error = ValueError()
    (found, none, kept) = read(answers.Task, [{"id": 1}, None, error])
    assert (found.id, none, kept) == (1, None, error)
    assert read(None, [{"id": 1}]) == [{"id": 1}]


def test_the_names_of_a_word_are_the_values_of_its_enum() -> None:
    source = ast.parse(Path(answers.__file__).read_text("utf-8"))
    (names,) = (node for node in source.body if isinstance(node, ast.If))
    for name in ("State", "Cause", "JobState", "Missed", "Overlap", "WorkflowState", "StepKind"):
        (alias,) = (one.value for one in names.body if ast.unparse(one.targets[0]) == f"{name}Name")
        texts = re.findall(r"'(.*?)'", ast.unparse(alias))
        assert texts == [one.value for one in getattr(answers, name)], name


def test_a_member_that_has_its_default_is_left_out_where_the_api_leaves_it_out() -> None:
    row = {"id": 1, "state": "SCHEDULED", "duplicate": False, "replaced": None}
    assert view_of(answers.Accepted, row) == {"id": 1, "state": "SCHEDULED", "duplicate": False}
    assert view_of(answers.Accepted, row, replaced=True).replaced is True
    held = {"key": "k", "task_id": 1, "action": "a", "since": NOW, "waiting": 2}
    assert view_of(answers.HeldKey, held, tenant=None) == held | {
        "tenant": None,
        "since": "2030-01-31T08:00:00.000000Z",
    }


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
