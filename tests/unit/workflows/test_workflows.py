from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.methods.table import read_command
from penstock.protocol.answers import StepKind
from penstock.protocol.errors import InvalidParams, TooLarge
from penstock.settings.model import load_settings
from penstock.workflows import step_inputs
from penstock.workflows.definition import read_children
from penstock.workflows.model import CreateWorkflow

SETTINGS = load_settings()


def created(**params: Any) -> CreateWorkflow:
    command = read_command("workflow.create", json.dumps(params).encode(), SETTINGS)
    assert isinstance(command, CreateWorkflow)
    return command


@pytest.mark.parametrize(
    ("params", "field", "problem"),
    [
        ({}, "steps", "or chain must be given"),
        ({"steps": []}, "steps", "must hold 1 to"),
        ({"steps": [{"action": "a"}, {"action": "a"}]}, "steps[1].name", "is that of step 0 too: 'a'"),
        ({"steps": [{"action": "a", "after": ["b"]}]}, "steps[0].after", "names 'b', and there is no such step"),
        ({"steps": [{"action": "a", "after": ["a"]}]}, "steps[0].after", "names itself"),
        ({"steps": [{"action": "a", "after": ["c"]}, {"action": "b", "after": ["a"]}, {"action": "c", "after": ["b"]}]},
         "steps[0].after", "goes in a circle: 'a' after 'c' after 'b' after 'a'"),
        ({"steps": [{"action": "a", "priority": 99999}]}, "steps[0].priority", "must be between"),
        ({"steps": [{"action": "a", "unique_key": "u"}]}, "unique_key", "is unknown"),
        ({"steps": [{"action": "a", "payload": 7}]}, "steps[0].payload", "must be an object"),
        ({"steps": [{"name": "j"}]}, "steps[0].action", "is missing"),
        ({"steps": [{"action": "a/b", "name": "x/y"}]}, "steps[0].name", "holds a /"),
        ({"steps": [{"action": "a"}, {"action": "b", "after": ["a"], "results_as": "x", "payload": {"x": 1}}]},
         "steps[1].results_as", "names a member that the payload has already"),
        ({"steps": [{"action": "a", "compensate": "rpc.undo"}]}, "steps[0].compensate", "must not begin with rpc."),
        ({"steps": [{"action": "a"}, {"name": "j", "after": ["a"]}, {"action": "b", "over": "j"}]},
         "steps[2].over", "has no action"),
        ({"chain": [[]]}, "chain[0]", "is an empty group"),
        ({"chain": [[{"action": "a"}, {"action": "b"}], {"action": "c", "priority": 99999}]},
         "chain[1].priority", "must be between"),
        ({"chain": [[{"action": "a"}, {"action": "b", "timeout": -1}]]}, "chain[0][1].timeout", "must be above 0"),
        ({"chain": [{"action": "a"}, {"action": "b", "after": ["a"]}]}, "chain[1].after", "goes with steps"),
    ],
)  # fmt: skip
def test_a_definition_that_makes_no_sense_is_refused_by_name(params: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        created(**params)
    assert refused.value.data["field"] == field
    assert problem in refused.value.message


def test_steps_of_a_chain_are_named_after_their_actions_and_numbered_where_that_is_taken() -> None:
    command = created(chain=[{"action": "a"}, [{"action": "a"}, {"action": "b", "name": "a-3"}], {"action": "a"}])
    assert [(step.name, list(step.after)) for step in command.steps] == [
        ("a", []), ("a-2", [0]), ("a-3", [0]), ("a-4", [1, 2]),
    ]  # fmt: skip


def test_wide_groups_one_after_the_other_are_linked_by_as_many_edges_as_they_have_steps() -> None:
    group = [{"action": "a"} for _ in range(1000)]
    command = created(chain=[group, group])
    assert sum(len(step.after) for step in command.steps) == 2000
    assert [step.name for step in command.steps if step.kind is StepKind.JOIN] == ["join"]


def test_the_definition_is_the_same_whatever_the_order_of_members_and_not_that_of_steps() -> None:
    first = created(steps=[{"action": "a", "payload": {"x": 1, "y": [2]}}, {"action": "b"}], key="one")
    same = created(steps=[{"payload": {"y": [2], "x": 1}, "action": "a"}, {"action": "b"}], key="two")
    other = created(steps=[{"action": "b"}, {"action": "a", "payload": {"x": 1, "y": [2]}}], key="one")
    assert first.definition == same.definition != other.definition


def test_a_payload_over_its_limit_is_refused_with_its_place() -> None:
    with pytest.raises(TooLarge, match=r"steps\[1\].payload is"):
        created(steps=[{"action": "a"}, {"action": "b", "payload": {"x": "y" * 300_000}}])


def test_too_many_steps_that_follow_each_other_are_refused_with_a_way_out() -> None:
    first = [{"action": "a", "name": f"a{n}"} for n in range(800)]
    second = [{"action": "b", "name": f"b{n}", "after": [step["name"] for step in first]} for n in range(800)]
    with pytest.raises(InvalidParams, match="put a step without an action"):
        created(steps=first + second)


@pytest.mark.parametrize("undo", ["", "x\0", "x" * 201, "rpc.undo"])
def test_a_child_with_a_policy_that_names_no_action_is_refused(undo: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        read_children(json.dumps([{"action": "a", "on_failure": {"compensate": undo}}]), SETTINGS)
    assert refused.value.data["field"] == "spawn[0].on_failure.compensate"


def test_children_of_children_are_found_however_deep() -> None:
    rows: list[Any] = [
        {
            "workflow_id": 1, "number": n, "parent": n - 1 if n else None, "name": f"s{n}", "kind": "task",
            "state": "SUCCESS",
        }
        for n in range(3000)
    ]  # fmt: skip
    known = step_inputs._Steps({(1, 0): rows[0]}, {(1, n): [rows[n + 1]] for n in range(2999)})
    found = step_inputs._sources_of({"workflow_id": 1, "after": [0]}, known)
    assert [name for name, _, _ in found] == [row["name"] for row in rows]
