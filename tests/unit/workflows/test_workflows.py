from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.methods.table import read_command
from penstock.protocol.errors import InvalidParams, TooLarge
from penstock.settings.model import load_settings
from penstock.workflows.model import CreateWorkflow, StepKind

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
        ({"chain": [[]]}, "chain[0]", "is an empty group"),
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
