from __future__ import annotations

import json
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.keys import CreateKey, KeysListParams, KeysRevokeParams
from penstock.api.params import (
    DlqListParams,
    DlqShowParams,
    ListRejected,
    RejectedShowParams,
    ReplayDead,
    WhichDead,
    WhichRejected,
)  # fmt: skip
from penstock.api.table import METHODS
from penstock.methods import table
from penstock.methods.inbound import read_inbound
from penstock.methods.table import read_command
from penstock.protocol.answers import Accepted
from penstock.protocol.api_key import Permission
from penstock.protocol.checks import LONGEST_DELAY_SECONDS
from penstock.protocol.errors import InvalidParams, MethodNotFound, RpcError, TooLarge
from penstock.protocol.method import NoParams
from penstock.protocol.reports import digest_of_answer
from penstock.protocol.requests import ClaimId
from penstock.protocol.task import NewTask, State
from penstock.results.methods import AnswerWait
from penstock.runtime import metrics
from penstock.settings.model import Settings, load_settings
from penstock.tasks.enqueue import count_enqueued
from penstock.tasks.params import (
    CancelParams,
    ListParams,
    OrderingListParams,
    OrderingReleaseParams,
    RescheduleParams,
    ResultParams,
    RetryParams,
    StatsParams,
    StatusParams,
)
from penstock.workflows.model import CreateWorkflow


@pytest.fixture(scope="module")
def limits() -> Settings:
    return load_settings(payload_limit_bytes=1000, max_attempts=7, batch_limit=20, inbound_methods="*")


def read(limits: Settings, method: str, params: Any = None) -> Any:
    raw = params if isinstance(params, str) else "" if params is None else json.dumps(params)
    return read_command(method, msgspec.Raw(raw.encode()), limits, METHODS)


def answer(token: str, text: str) -> AnswerWait:
    return AnswerWait(token, text, digest_of_answer(text))


def new_task(limits: Settings, method: str, params: Any = None) -> NewTask:
    command = read(limits, method, params)
    assert isinstance(command, NewTask)
    return command


def test_values_of_any_size_are_refused_and_harm_no_other_entry(limits: Settings) -> None:
    schedule = {"name": "n", "expression": "@daily", "action": "a"}
    huge = [
        schedule | {"max_missed": 10**400}, schedule | {"name": "n" * 500, "payload": ["{{schedule}}"] * 50},
        schedule | {"expression": "@robfig @every " + "1" * 500_000}, schedule | {"expression": "@every " + "1d" * 200},
    ]  # fmt: skip
    calls = [{"jsonrpc": "2.0", "method": "schedule.create", "params": params} for params in huge]
    inbound = read_inbound(json.dumps([*calls, {"jsonrpc": "2.0", "method": "a", "params": {}}]), limits)
    reasons = [reason for _, reason in inbound.refused[: len(huge)]]
    assert [reason.split()[2] for reason in reasons] == ["max_missed", "name", "expression", "expression"], reasons


def test_names_that_postgres_cannot_store_are_refused_where_they_are_sought(limits: Settings) -> None:
    assert mistake(limits, "schedule.list", {"action": "a\0"}) == ("action", "holds a control character")


def mistake(limits: Settings, method: str, params: Any = None) -> tuple[str, str]:
    with pytest.raises(InvalidParams) as caught:
        read(limits, method, params)
    return caught.value.data["field"], caught.value.data["problem"]


# enqueue


def test_an_action_is_enough_and_the_rest_has_defaults(limits: Settings) -> None:
    assert new_task(limits, "enqueue", {"action": "a"}) == NewTask("a", "{}", max_attempts=7)


def test_every_parameter_of_enqueue_arrives(limits: Settings) -> None:
    params = (
        '{"action":"a","payload":{"n": 1.50},"run_at":"2030-01-31T08:00:00+01:00","priority":-5,'
        '"unique_key":"u","ordering_key":"o","max_attempts":3,"timeout":1.5}'
    )
    assert new_task(limits, "enqueue", params) == NewTask(
        "a", '{"n": 1.50}', datetime(2030, 1, 31, 7, tzinfo=UTC), None, -5, "u", "o", 3, 1.5
    )


def test_labels_expiry_limit_key_and_uniqueness_arrive(limits: Settings) -> None:
    given = {
        "action": "a", "priority": 0, "unique_key": "u", "labels": {"tenant": "é", "empty": ""}, "expires_in": 60,
        "limit_key": "l", "unique": 3600, "on_duplicate": "replace",
    }  # fmt: skip
    assert new_task(limits, "enqueue", given) == NewTask(
        "a", max_attempts=7, unique_key="u", labels='{"tenant":"é","empty":""}', expires_in_seconds=60.0, limit_key="l",
        unique=3600.0, on_duplicate="replace", replaces_priority=True,
    )  # fmt: skip
    expiring = new_task(limits, "enqueue", {"action": "a", "expires_at": 0, "labels": {}})
    assert expiring == NewTask("a", max_attempts=7, expires_at=datetime(1970, 1, 1, tzinfo=UTC))


def test_parameters_may_stand_by_position(limits: Settings) -> None:
    by_position = new_task(limits, "enqueue", ["a", {"n": 1}, None, 5, 9, "u", "o", 2, 3])
    assert by_position == NewTask("a", '{"n": 1}', None, 5.0, 9, "u", "o", 2, 3.0)


@pytest.mark.parametrize(
    ("run_at", "expected"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (1893456000123, datetime(2030, 1, 1, 0, 0, 0, 123000, tzinfo=UTC)),
        (-1, datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)),
        ("2030-01-01T00:00:00Z", datetime(2030, 1, 1, tzinfo=UTC)),
        ("2030-01-01T00:00:00.5-05:30", datetime(2030, 1, 1, 5, 30, 0, 500000, tzinfo=UTC)),
    ],
)
def test_run_at_is_rfc_3339_or_epoch_milliseconds(limits: Settings, run_at: Any, expected: datetime) -> None:
    assert new_task(limits, "enqueue", {"action": "a", "run_at": run_at}).run_at == expected


@pytest.mark.parametrize("number", ["1e400", "-1E+999999", "9" * 500, "1e-999999", "0.1" + "0" * 400])
def test_a_number_of_any_size_or_precision_is_kept_as_it_was_written(limits: Settings, number: str) -> None:
    given = f'{{"n": {number} }}'
    for method, params in (("enqueue", f'{{"action":"a","payload":{given}}}'), ("submit:a", given)):
        assert new_task(limits, method, params).payload == given
    flow = read(limits, "workflow.create", f'{{"steps":[{{"action":"a","payload":{given}}}]}}')
    other = read(limits, "workflow.create", f'{{"steps":[{{"action":"a","payload":{given.replace(number, "7")}}}]}}')
    assert isinstance(flow, CreateWorkflow)
    assert isinstance(other, CreateWorkflow)
    assert flow.steps[0].task is not None
    assert flow.steps[0].task.payload == given
    assert flow.definition != other.definition


@pytest.mark.parametrize(
    ("params", "field", "problem"),
    [
        ({}, "action", "is missing"),
        ([], "action", "is missing"),
        ({"action": ""}, "action", "is empty"),
        ({"action": "a" * 10_000}, "action", "is 10000 characters long; the limit is 200"),
        ({"action": "a\nb"}, "action", "control character"),
        ({"action": "a\0b"}, "action", "control character"),
        ({"action": "rpc.a"}, "action", "reserves"),
        ({"action": 1}, "action", "Expected `str`, got `int`"),
        ({"action": None}, "action", "Expected `str`, got `null`"),
        ({"action": "a", "payload": 1}, "payload", "must be an object or an array, not a number"),
        ({"action": "a", "payload": None}, "payload", "not null"),
        ({"action": "a", "payload": "text"}, "payload", "not a string"),
        ('{"action":"a","payload":{"a":"\\u0000"}}', "payload", "\\u0000"),
        ('{"action":"a","payload":{"n":[1e999,%s]}}' % ("[" * 99 + "]" * 99), "payload", "nested"),
        ({"action": "a", "run_at": "tomorrow"}, "run_at", "must be RFC 3339"),
        ({"action": "a", "run_at": "2030-01-01"}, "run_at", "must be RFC 3339"),
        ({"action": "a", "run_at": "2030-01-01T00:00:00"}, "run_at", "needs a zone"),
        ({"action": "a", "run_at": "+275760-09-13T00:00:00Z"}, "run_at", "must be RFC 3339"),
        ({"action": "a", "run_at": 8_640_000_000_000_000}, "run_at", "must be RFC 3339"),
        ({"action": "a", "run_at": 10**400}, "run_at", "must be RFC 3339"),
        ({"action": "a", "run_at": "9999-12-31T23:59:59-12:00"}, "run_at", "out of range"),
        ({"action": "a", "run_at": "0001-01-01T00:00:00+12:00"}, "run_at", "out of range"),
        ({"action": "a", "run_at": "0001-01-01T00:00:00Z"}, "run_at", "out of range"),
        ({"action": "a", "run_at": "9999-12-31T23:59:59.999999Z"}, "run_at", "out of range"),
        ({"action": "a", "expires_at": "9999-12-31T23:59:59.999999Z"}, "expires_at", "out of range"),
        ({"action": "a", "run_at": -62_135_596_800_000}, "run_at", "out of range"),
        ({"action": "a", "run_at": 1.5}, "run_at", "got `float`"),
        ({"action": "a", "run_at": True}, "run_at", "got `bool`"),
        ({"action": "a", "run_at": 0, "delay": 0}, "delay", "exclude each other"),
        ({"action": "a", "delay": -1}, "delay", "must be between 0"),
        ({"action": "a", "delay": LONGEST_DELAY_SECONDS * 2}, "delay", "must be between 0"),
        ('{"action":"a","delay":1e999}', "delay", "out of range"),
        ({"action": "a", "delay": "1"}, "delay", "got `str`"),
        ({"action": "a", "priority": 32768}, "priority", "must be between -32768 and 32767, not 32768"),
        ({"action": "a", "priority": -32769}, "priority", "not -32769"),
        ({"action": "a", "priority": 10**30}, "priority", "must be between"),
        ({"action": "a", "priority": 1.5}, "priority", "got `float`"),
        ({"action": "a", "unique_key": ""}, "unique_key", "must have 1 to 500 characters, not 0"),
        ({"action": "a", "unique_key": "k" * 501}, "unique_key", "not 501"),
        ({"action": "a", "unique_key": "k\0"}, "unique_key", "control character"),
        ({"action": "a", "unique_key": 5}, "unique_key", "got `int`"),
        ({"action": "a", "ordering_key": "\x85"}, "ordering_key", "control character"),
        ({"action": "a", "max_attempts": 0}, "max_attempts", "must be between 1 and 1000, not 0"),
        ({"action": "a", "max_attempts": 1001}, "max_attempts", "not 1001"),
        ({"action": "a", "timeout": 0}, "timeout", "must be above 0"),
        ({"action": "a", "timeout": 43_201}, "timeout", "at most 43200 seconds"),
        ({"action": "a", "prioritty": 1}, "prioritty", "is unknown; did you mean priority?"),
        ({"action": "a", "x" * 500: 1}, "x" * 100, "is unknown"),
        ([*["a"] * 18], "params", "has 18 positions; at most 17"),
        ({"action": "a", "tenant": ""}, "tenant", "must have 1 to 128 characters, not 0"),
        ({"action": "a", "tenant": "x" * 129}, "tenant", "must have 1 to 128 characters, not 129"),
        ({"action": "a", "tenant": "a\x1fb"}, "tenant", "holds a control character"),
        ({"action": "a", "tenant": "*"}, "tenant", "must not be *, which stands for every tenant in rules"),
        ({"action": "a", "tenant": 7}, "tenant", "Expected `str | null`, got `int`"),
        ({"action": "a", "labels": {"a": 1}}, "labels[...]", "Expected `str`, got `int`"),
        ({"action": "a", "labels": {str(n): "" for n in range(17)}}, "labels", "are 17; the limit is 16"),
        ({"action": "a", "labels": {"": "x"}}, "labels", "names of 1 to 60 characters"),
        ({"action": "a", "labels": {"n" * 61: "x"}}, "labels", "names of 1 to 60 characters"),
        ({"action": "a", "labels": {"n": "x" * 201}}, "labels.n", "at most 200 characters"),
        ({"action": "a", "labels": {"n": "\0"}}, "labels.n", "control character"),
        ({"action": "a", "expires_at": "soon"}, "expires_at", "must be RFC 3339"),
        ({"action": "a", "expires_at": 1, "expires_in": 1}, "expires_in", "and expires_at exclude each other"),
        ({"action": "a", "expires_in": 0}, "expires_in", "must be above 0"),
        ({"action": "a", "limit_key": ""}, "limit_key", "must have 1 to 500 characters, not 0"),
        ({"action": "\U0001f600" * 151}, "action", "has 604 bytes in UTF-8; the limit is 600"),
        ({"action": "a", "unique_key": "\U0001f600" * 376}, "unique_key", "has 1504 bytes in UTF-8; the limit is 1500"),
        ({"action": "a", "tenant": "\U0001f600" * 97}, "tenant", "has 388 bytes in UTF-8; the limit is 384"),
        ({"action": "a", "unique": "live"}, "unique", "goes with unique_key"),
        ({"action": "a", "on_duplicate": "error"}, "on_duplicate", "goes with unique_key"),
        ({"action": "a", "unique_key": "k", "unique": "forever"}, "unique", "is wrong"),
        ({"action": "a", "unique_key": "k", "unique": -1}, "unique", "must be above 0"),
        ({"action": "a", "unique_key": "k", "on_duplicate": "fail"}, "on_duplicate", "is wrong"),
    ],
)
def test_a_wrong_parameter_of_enqueue_is_named_with_its_problem(
    limits: Settings, params: Any, field: str, problem: str
) -> None:
    seen_field, seen_problem = mistake(limits, "enqueue", params)
    assert seen_field == field
    assert problem in seen_problem


@pytest.mark.parametrize(
    ("value", "accepted"),
    [({"delay": 0}, True), ({"delay": LONGEST_DELAY_SECONDS}, True), ({"priority": 32767}, True),
     ({"priority": -32768}, True), ({"max_attempts": 1}, True), ({"max_attempts": 1000}, True),
     ({"timeout": 43_200}, True), ({"action": "\u00e4" * 200}, True), ({"unique_key": "k" * 500}, True)],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_inside(limits: Settings, value: dict[str, Any], accepted: bool) -> None:
    assert isinstance(read(limits, "enqueue", {"action": "a"} | value), NewTask) is accepted


def test_a_payload_over_the_limit_is_too_large_and_one_at_the_limit_is_not(limits: Settings) -> None:
    payload = {"a": "\u20ac" * 330}
    size = len(json.dumps(payload, ensure_ascii=False).encode())
    assert size == 999
    for method in ("enqueue", "submit:a"):
        for padding, accepted in ((1, True), (2, False)):
            text = json.dumps(payload, ensure_ascii=False).replace("}", " " * padding + "}")
            params = text if method == "submit:a" else f'{{"action":"a","payload":{text}}}'
            if accepted:
                assert new_task(limits, method, params).payload == text
            else:
                with pytest.raises(TooLarge) as caught:
                    read(limits, method, params)
                assert caught.value.data == {"size": 1001, "limit": 1000}


# submit:<action>


@pytest.mark.parametrize(
    ("payload", "unique_key"),
    [
        ({"objectID": 23}, "23"),
        ({"objectID": "23"}, "23"),
        ({"objectID": "uuid-1"}, "uuid-1"),
        ({"objectID": 10**30 + 1}, str(10**30 + 1)),
        ({"objectID": None}, None),
        ({"object_id": 23}, None),
        ([23], None),
        ({}, None),
    ],
)
def test_the_object_id_of_a_submission_makes_it_unique(limits: Settings, payload: Any, unique_key: str | None) -> None:
    task = new_task(limits, "submit:export", payload)
    assert task == NewTask("export", json.dumps(payload), unique_key=unique_key, max_attempts=7)


def test_a_submission_without_params_has_an_empty_payload(limits: Settings) -> None:
    assert new_task(limits, "submit:export").payload == "{}"


@pytest.mark.parametrize(
    ("method", "payload", "field"),
    [
        ("submit:", {}, "action"),
        ("submit:" + "a" * 201, {}, "action"),
        ("submit:a\tb", {}, "action"),
        ("submit:a", {"objectID": True}, "objectID"),
        ("submit:a", {"objectID": {}}, "objectID"),
        ("submit:a", {"objectID": [1]}, "objectID"),
        ("submit:a", {"objectID": ""}, "objectID"),
        ("submit:a", {"objectID": "x" * 501}, "objectID"),
        ("submit:a", {"objectID": 10**600}, "objectID"),
        ("submit:a", {"objectID": "a\nb"}, "objectID"),
        ("submit:a", '{"objectID":1e400}', "objectID"),
        ("submit:a", '{"a":"\\u0000"}', "params"),
    ],
)
def test_a_wrong_submission_names_the_field(limits: Settings, method: str, payload: Any, field: str) -> None:
    assert mistake(limits, method, payload)[0] == field


# The other methods


@pytest.mark.parametrize(
    ("method", "params", "command"),
    [
        ("status", {"id": 1}, StatusParams(1)),
        ("status", {"id": "1", "detail": True}, StatusParams("1", detail=True)),
        ("status", {"ids": [1, "2"]}, StatusParams(ids=[1, "2"])),
        ("status", [7], StatusParams(7)),
        ("result", {"id": "1"}, ResultParams("1")),
        ("result", {"ids": [1, 2], "timeout": 0, "wait": "any"}, ResultParams(ids=[1, 2], timeout=0, wait="any")),
        ("cancel", {"id": 2**63 - 1}, CancelParams(2**63 - 1)),
        ("retry", {"id": "0"}, RetryParams("0")),
        ("list", None, ListParams()),
        (
            "list",
            {"state": "ERROR", "action": "a", "limit": 1000, "cursor": "5"},
            ListParams(State.ERROR, "a", 1000, "5"),
        ),
        ("stats", None, StatsParams()),
        ("stats", [], StatsParams()),
        ("stats", {"tenant": "acme"}, StatsParams("acme")),
        ("rejected.list", {"limit": 1, "cursor": "9"}, ListRejected(1, "9", None)),
        ("rejected.list", {"source": "results"}, ListRejected(50, None, "results")),
        ("rejected.show", ["3"], RejectedShowParams("3")),
        ("rejected.retry", {"ids": [1]}, WhichRejected([1])),
        (
            "rejected.retry",
            {"limit": 5, "cursor": "9", "source": "inbound"},
            WhichRejected(None, 5, "9", "inbound"),
        ),
        ("rejected.purge", {"ids": ["1"]}, WhichRejected(["1"])),
        ("rejected.purge", {"limit": 5}, WhichRejected(None, 5)),
        ("dlq.stats", None, NoParams()),
        ("dlq.list", {"queue": "inbound"}, DlqListParams("inbound", 50)),
        ("dlq.show", ["outbound", "a-b"], DlqShowParams("outbound", "a-b")),
        ("dlq.replay", {"queue": "results", "ids": ["a", "b"]}, ReplayDead("results", ["a", "b"])),
        ("dlq.replay", {"queue": "inbound", "limit": 7, "force": True}, ReplayDead("inbound", None, 7, True)),
        ("dlq.purge", {"queue": "inbound", "limit": 7}, WhichDead("inbound", None, 7)),
        (
            "keys.create",
            {"name": " ci ", "permissions": ["read", "enqueue"], "expires_in": 60},
            CreateKey("ci", [Permission.READ, Permission.ENQUEUE], 60.0),
        ),
        ("keys.list", {"cursor": "7", "revoked": True}, KeysListParams(50, "7", True)),
        ("keys.revoke", {"id": "7"}, KeysRevokeParams("7")),
        ("cancel", {"id": 1, "reason": "no longer wanted"}, CancelParams(1, "no longer wanted")),
        (
            "reschedule",
            {"id": "7", "run_at": 0, "priority": -3},
            RescheduleParams("7", 0, None, -3),
        ),
        ("reschedule", {"id": 7, "delay": 1.5}, RescheduleParams(7, None, 1.5, None)),
        ("ordering.list", {"limit": 3, "cursor": "k"}, OrderingListParams(3, "k")),
        ("ordering.release", ["k"], OrderingReleaseParams("k")),
        ("claims.check", {"claims": ["42:7"]}, {"42:7": ClaimId(42, 7)}),
        ("task.complete", ["t"], answer("t", '"result":null')),
        ("task.complete", {"token": "t", "result": {"a": 1.0}}, answer("t", '"result":{"a": 1.0}')),
        ("task.fail", ["t", "no"], answer("t", '"error":{"code":-32000,"message":"no"}')),
        (
            "task.fail",
            {"token": "t", "error": {"message": "no", "code": 7, "data": {"a": 1}}, "final": True, "retry_after": 0},
            answer("t", '"error":{"code":7,"message":"no","data":{"a":1,"final":true,"retry_after":0.0}}'),
        ),
        ("rpc.discover", None, NoParams()),
    ],
)
def test_each_method_becomes_its_command(limits: Settings, method: str, params: Any, command: Any) -> None:
    assert read(limits, method, params) == command


LEAST: dict[str, Any] = {
    "enqueue": {"action": "a"}, "status": {"id": 1}, "result": {"id": 1}, "cancel": {"id": 1}, "retry": {"id": 1},
    "task.explain": {"id": 1},
    "rejected.show": {"id": 1}, "rejected.retry": {"ids": [1]}, "rejected.purge": {"ids": [1]},
    "dlq.list": {"queue": "inbound"}, "dlq.show": {"queue": "inbound", "id": "a"},
    "dlq.replay": {"queue": "inbound", "limit": 1}, "dlq.purge": {"queue": "inbound", "limit": 1},
    "keys.create": {"name": "k", "permissions": ["read"]}, "keys.revoke": {"id": 1},
    "action.set": {"action": "a", "burst": 1}, "action.get": {"action": "a"},
    "action.announced": {}, "action.pause": {"action": "a"},
    "tenant.set": {"tenant": "*", "burst": 1}, "tenant.get": {"tenant": "t"}, "tenant.delete": {"tenant": "t"},
    "tenant.pause": {"tenant": "t"}, "tenant.resume": {"tenant": "t"},
    "action.resume": {"action": "a"}, "route.set": {"name": "r", "queue": "q"}, "route.delete": {"name": "r"},
    "bulk.cancel": {"all": True}, "bulk.retry": {"all": True}, "bulk.delete": {"all": True},
    "bulk.reschedule": {"all": True, "delay": 1}, "job.get": {"id": 1}, "job.cancel": {"id": 1},
    "reschedule": {"id": 1, "delay": 0}, "ordering.release": {"key": "k"}, "claims.check": {"claims": ["1:2"]},
    "task.complete": {"token": "t"}, "task.fail": {"token": "t", "error": "e"},
    "schedule.create": {"name": "n", "expression": "@daily", "action": "a"},
    "schedule.update": {"name": "n", "priority": 1}, "schedule.get": {"name": "n"}, "schedule.delete": {"name": "n"},
    "schedule.pause": {"name": "n"}, "schedule.resume": {"name": "n"}, "schedule.run_now": {"name": "n"},
    "schedule.runs": {"name": "n"}, "schedule.create_many": {"schedules": [{}]}, "schedule.import_status": {"id": 1},
    "workflow.create": {"chain": [{"action": "a"}]}, "workflow.status": {"id": 1}, "workflow.cancel": {"id": 1},
    "workflow.retry": {"key": "k"},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_read_from_its_least_parameters(limits: Settings, method: str) -> None:
    read(limits, method, LEAST.get(method))


@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("status", {}, "id"),
        ("status", {"id": 1, "ids": [1]}, "id"),
        ("status", {"id": -1}, "id"),
        ("status", {"id": 2**63}, "id"),
        ("status", {"id": "9" * 20}, "id"),
        ("status", {"id": "\u0661"}, "id"),
        ("status", {"id": "1:2"}, "id"),
        ("status", {"id": ""}, "id"),
        ("status", {"id": 1.5}, "id"),
        ("status", {"ids": []}, "ids"),
        ("status", {"ids": [1] * 1001}, "ids"),
        ("status", {"ids": [1, "x"]}, "ids[1]"),
        ("status", {"ids": 1}, "ids"),
        ("status", {"ids": [1, None]}, "ids[1]"),
        ("result", {}, "id"),
        ("result", {"id": 1, "ids": [1]}, "id"),
        ("result", {"ids": [1] * 1001}, "ids"),
        ("result", {"id": 1, "timeout": 60.5}, "timeout"),
        ("result", {"id": 1, "timeout": -1}, "timeout"),
        ("result", {"ids": [1], "wait": "some"}, "wait"),
        ("cancel", {}, "id"),
        ("cancel", None, "id"),
        ("retry", {"id": None}, "id"),
        ("cancel", {"id": 1, "reason": ""}, "reason"),
        ("cancel", {"id": 1, "reason": "x" * 501}, "reason"),
        ("reschedule", {"id": 1}, "run_at"),
        ("reschedule", {"id": 1, "run_at": 1, "delay": 1}, "delay"),
        ("reschedule", {"id": 1, "priority": 40_000}, "priority"),
        ("ordering.release", {"key": ""}, "key"),
        ("claims.check", {"claims": []}, "claims"),
        ("claims.check", {"claims": ["1:1", "1"]}, "claims[1]"),
        ("claims.check", {"claims": ["1:1"] * 1001}, "claims"),
        ("task.complete", {}, "token"),
        ("task.complete", {"token": ""}, "token"),
        ("task.complete", {"token": "t\n"}, "token"),
        ("task.complete", {"token": "t" * 201}, "token"),
        ("task.complete", {"token": 1}, "token"),
        ("task.complete", {"token": "t", "result": "\0"}, "result"),
        ("task.complete", {"token": "t", "error": "x"}, "error"),
        ("task.fail", {"token": "t"}, "error"),
        ("task.fail", {"token": "t", "error": ""}, "error"),
        ("task.fail", {"token": "t", "error": 5}, "error"),
        ("task.fail", {"token": "t", "error": {}}, "error"),
        ("task.fail", {"token": "t", "error": {"message": "m", "code": "x"}}, "error.code"),
        ("task.fail", {"token": "t", "error": {"message": "m", "data": [1]}}, "error.data"),
        ("task.fail", {"token": "t", "error": {"message": "m", "final": True}}, "error.final"),
        ("task.fail", {"token": "t", "error": "e", "retry_after": -1}, "retry_after"),
        ("list", {"state": "DONE"}, "state"),
        ("list", {"limit": 0}, "limit"),
        ("list", {"limit": 1001}, "limit"),
        ("list", {"cursor": "x"}, "cursor"),
        ("list", {"cursor": 5}, "cursor"),
        ("stats", {"x": 1}, "x"),
        ("stats", [1], "tenant"),
        ("stats", ["a", "b"], "params"),
        ("stats", {"tenant": "*"}, "tenant"),
        ("rejected.purge", {"ids": []}, "ids"),
        ("rejected.purge", {}, "ids"),
        ("rejected.purge", {"ids": [1], "limit": 1}, "ids"),
        ("rejected.retry", {"ids": [1], "cursor": "1"}, "cursor"),
        ("rejected.retry", {"ids": [1], "source": "inbound"}, "source"),
        ("rejected.retry", {"limit": 1, "source": "outbound"}, "source"),
        ("rejected.show", {}, "id"),
        ("dlq.list", {}, "queue"),
        ("dlq.list", {"queue": "inbound-dlq"}, "queue"),
        ("dlq.show", {"queue": "inbound", "id": ""}, "id"),
        ("dlq.replay", {"queue": "inbound"}, "ids"),
        ("dlq.replay", {"queue": "inbound", "ids": ["a"], "limit": 1}, "ids"),
        ("dlq.replay", {"queue": "inbound", "ids": ["a", "b" * 101]}, "ids[1]"),
        ("dlq.purge", {"queue": "inbound", "ids": []}, "ids"),
        ("dlq.purge", {"queue": "inbound", "limit": 1001}, "limit"),
        ("dlq.purge", {"queue": "inbound", "limit": 1, "force": True}, "force"),
    ],
)
def test_a_wrong_parameter_of_another_method_is_named(limits: Settings, method: str, params: Any, field: str) -> None:
    assert mistake(limits, method, params)[0] == field


def test_a_name_of_megabytes_is_refused_in_few_words_and_little_memory(limits: Settings) -> None:
    """difflib keeps an index of each character of what it compares."""
    name = "limi" * 1_000_000
    body = json.dumps({"jsonrpc": "2.0", "method": name})
    tracemalloc.start()
    try:
        field, problem = mistake(limits, "list", {name: 1})
        ((_, reason),) = read_inbound(body, limits).refused
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (field, problem) == (name[:100], "is unknown")
    assert len(reason) < 300
    assert peak < 64 * 1024 * 1024
    assert mistake(limits, "list", {"limi": 1}) == ("limi", "is unknown; did you mean limit?")


def test_a_value_that_looks_like_the_place_of_a_mistake_is_not_taken_for_it(limits: Settings) -> None:
    field, problem = mistake(limits, "list", {"state": " - at `$.limit`" * 1000})
    assert field == "state"
    assert len(problem) < 300


def test_an_answer_is_bounded_as_a_result_is(limits: Settings) -> None:
    with pytest.raises(TooLarge) as caught:
        read(limits, "task.complete", {"token": "t", "result": "x" * limits.result_limit_bytes})
    assert caught.value.data == {"size": limits.result_limit_bytes + 2, "limit": limits.result_limit_bytes}


def test_an_answer_is_known_again_however_it_is_written() -> None:
    assert digest_of_answer('"result":{"a":1,"b":[2]}') == digest_of_answer('"result": {"b": [2], "a": 1}')
    assert digest_of_answer('"result":1') != digest_of_answer('"error":1')
    assert digest_of_answer(f'"result":{"9" * 5000}') != digest_of_answer(f'"result":{"9" * 5001}')


@pytest.mark.parametrize("method", ["", "Enqueue", "submit", "rpc.other", "x" * 1000, "enqueue "])
def test_an_unknown_method_is_not_found_and_shown_in_part(limits: Settings, method: str) -> None:
    with pytest.raises(MethodNotFound) as caught:
        read(limits, method)
    assert caught.value.data == {"method": method[:200]}


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters())),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=8,
)
LIMITS = load_settings(payload_limit_bytes=1000, inbound_methods="*")


@given(
    method=st.one_of(st.sampled_from([*METHODS, "submit:a", "submit:"]), st.text()),
    params=st.one_of(
        st.lists(json_values, max_size=10),
        st.dictionaries(
            st.sampled_from(
                sorted(
                    {name for kind in (method.params for method in METHODS.values()) for name in kind.__struct_fields__}
                    | {"objectID"}
                )
            ),
            json_values,
            max_size=6,
        ),
    ),
)
def test_any_params_are_a_command_or_an_answerable_error(method: str, params: Any) -> None:
    try:
        raw = json.dumps(params, allow_nan=False).encode()
    except ValueError:
        return
    try:
        command = read_command(method, raw, LIMITS)
    except RpcError as error:
        json.dumps(error.data)
        return
    if isinstance(command, NewTask):
        assert command.action
        assert len(command.payload.encode()) <= 1000


# The inbound queue


def test_a_body_of_good_and_bad_entries_keeps_each_with_its_reason(limits: Settings) -> None:
    entries = [
        {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": 1},
        {"jsonrpc": "2.0", "method": "enqueue", "params": {}, "id": 2},
        {"jsonrpc": "2.0", "method": "enque", "params": {"action": "a"}},
        {"jsonrpc": "2.0", "method": "status", "params": {"id": 1}},
        {"jsonrpc": "2.0", "method": "cancel", "params": {"id": 5}},
        {"jsonrpc": "2.0", "method": "retry", "params": {"id": 6}},
        {"method": "enqueue"},
        5,
        {"jsonrpc": "2.0", "method": "submit:b", "params": {"objectID": 1}},
    ]
    inbound = read_inbound(json.dumps(entries), limits)
    assert [task.action for task in inbound.tasks] == ["a", "b"]
    assert [wanted.change for wanted in inbound.changes] == [CancelParams(5), RetryParams(6)]
    assert [json.loads(bytes(wanted.request.params)) for wanted in inbound.changes] == [{"id": 5}, {"id": 6}]
    assert [json.loads(text) for text, _ in inbound.refused] == [entries[n] for n in (1, 2, 3, 6, 7)]
    reasons = [reason for _, reason in inbound.refused]
    assert reasons[0] == "Invalid params: action is missing"
    assert reasons[1] == "unknown method 'enque'; did you mean enqueue?"
    assert reasons[2] == "status only answers, and a queue has no way back: ask over HTTP"
    assert reasons[3].startswith("Invalid Request")
    assert reasons[4].startswith("Invalid Request")


BY_QUEUE = {
    "enqueue", "cancel", "retry", "bulk.cancel", "bulk.retry", "bulk.delete", "bulk.reschedule", "job.cancel",
    "action.set", "action.pause", "action.resume", "route.set", "route.delete", "reschedule",
    "tenant.set", "tenant.delete", "tenant.pause", "tenant.resume",
    "task.complete", "task.fail",
    "schedule.create", "schedule.update", "schedule.delete", "schedule.pause", "schedule.resume", "schedule.run_now",
    "workflow.create", "workflow.cancel", "workflow.retry",
}  # fmt: skip


def test_methods_of_the_api_alone_have_names_by_which_the_queue_knows_them() -> None:
    added = METHODS.keys() - table.METHODS.keys()
    assert added == {name for name in METHODS if name.startswith(table.API_ONLY)}
    assert {name for name, method in METHODS.items() if method.by_queue} == BY_QUEUE


@pytest.mark.parametrize("method", [name for name in METHODS if name not in BY_QUEUE])
def test_a_method_that_only_answers_is_refused_from_the_queue(limits: Settings, method: str) -> None:
    params = LEAST.get(method, {})
    body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params})
    inbound = read_inbound(body, limits)
    assert (inbound.tasks, inbound.changes) == ([], [])
    ((text, reason),) = inbound.refused
    assert json.loads(text) == json.loads(body)
    assert "ask over HTTP" in reason


@pytest.mark.parametrize("body", ["", "no json", "[]", "\ud800", "[" * 10_000, "[" + ",".join(["1"] * 21) + "]"])
def test_a_body_of_no_use_is_refused_whole_as_it_came(limits: Settings, body: str) -> None:
    inbound = read_inbound(body, limits)
    assert (inbound.tasks, inbound.changes) == ([], [])
    assert [text for text, _ in inbound.refused] == [body]


@given(body=st.one_of(st.text(st.characters()), json_values.map(json.dumps)))
def test_no_body_is_lost_and_none_raises(body: str) -> None:
    inbound = read_inbound(body, LIMITS)
    assert inbound.tasks or inbound.changes or inbound.refused


def test_accepted_tasks_and_duplicates_are_counted_by_action_and_door() -> None:
    def sample(name: str, **labels: str) -> float:
        return metrics.REGISTRY.get_sample_value(name, labels) or 0

    labels = {"action": "counted", "source": "inbound"}
    before = sample("penstock_enqueued_total", **labels), sample("penstock_duplicates_total", action="counted")
    answers = [Accepted(id=n, state=State.SCHEDULED, duplicate=n == 2) for n in range(3)]
    count_enqueued([NewTask("counted")] * 3, answers, "inbound")
    assert sample("penstock_enqueued_total", **labels) - before[0] == 2
    assert sample("penstock_duplicates_total", action="counted") - before[1] == 1


def test_the_inbound_queue_takes_what_producers_need_and_nothing_else_unless_told() -> None:
    valid = {
        "cancel": {"id": 1}, "retry": {"id": 1}, "route.set": {"name": "r", "queue": "q"},
        "action.pause": {"action": "a"},
        "tenant.pause": {"tenant": "t"}, "bulk.cancel": {"action": "a"}, "reschedule": {"id": 1, "delay": 1},
        "schedule.delete": {"name": "s"}, "workflow.cancel": {"id": 1}, "workflow.retry": {"id": 1},
    }  # fmt: skip
    for method, params in valid.items():
        body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params})
        inbound = read_inbound(body, load_settings())
        assert (inbound.tasks, inbound.changes) == ([], [])
        ((text, reason),) = inbound.refused
        assert (json.loads(text)["method"], "PENSTOCK_INBOUND_METHODS" in reason) == (method, True)
        assert len(read_inbound(body, load_settings(inbound_methods=f"enqueue, {method}")).changes) == 1
    inbound = read_inbound('{"jsonrpc":"2.0","method":"submit:a","params":{"objectID":1}}', load_settings())
    assert [task.action for task in inbound.tasks] == ["a"]
    only = load_settings(inbound_methods="submit:mail.*")
    assert read_inbound('{"jsonrpc":"2.0","method":"submit:a","params":{}}', only).refused
    assert read_inbound('{"jsonrpc":"2.0","method":"submit:mail.a","params":{}}', only).tasks
