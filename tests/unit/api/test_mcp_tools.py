"""The methods as tools of agents: which ones, and what is said of them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from penstock.api.access import Caller
from penstock.api.mcp import _LOOKS, CONFIRM, TOOLS, has_dry_run, listed
from penstock.api.table import METHODS
from penstock.protocol.api_key import ALL_PERMISSIONS, Permission
from penstock.protocol.method import Scope

ALL = {tool["name"]: tool for tool in listed(Caller("k", ALL_PERMISSIONS, None))}
NO_TOOLS = {
    "keys.create", "keys.list", "keys.revoke", "claims.check", "rpc.discover", "task.complete", "task.fail",
    "schedule.create_many", "schedule.import_status",
}  # fmt: skip


def test_every_method_is_a_tool_or_is_left_out_by_name() -> None:
    """A method that is added must be placed here by hand if it is to be no tool."""
    assert {method.name for method in TOOLS.values()} == set(METHODS) - NO_TOOLS
    assert set(ALL) == set(TOOLS)
    assert len({method.name for method in TOOLS.values()}) == len(TOOLS)
    assert all(re.fullmatch(r"[a-z_]{1,64}", name) for name in TOOLS)


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_takes_what_its_method_takes(name: str) -> None:
    tool, method = ALL[name], TOOLS[name]
    schema = msgspec.json.decode(msgspec.json.encode(tool["inputSchema"]))
    Draft202012Validator.check_schema(schema)
    taken = {field.name for field in msgspec.structs.fields(method.params)}
    assert CONFIRM not in taken
    if method.audited:
        taken = taken - {"dry_run"} | {CONFIRM}
    assert set(schema["properties"]) == taken
    assert schema["required"] == [field.name for field in msgspec.structs.fields(method.params) if field.required]
    assert set(re.findall(r'"#/\$defs/(\w+)"', str(schema).replace("'", '"'))) <= set(schema.get("$defs", {}))
    assert tool["description"].startswith(method.summary)


def test_a_schema_takes_what_the_method_takes_and_nothing_else() -> None:
    validator = Draft202012Validator(msgspec.json.decode(msgspec.json.encode(ALL["bulk_cancel"]["inputSchema"])))
    assert validator.is_valid({"states": ["ERROR"], "older_than": 5, CONFIRM: "c"})
    assert not validator.is_valid({"states": ["BROKEN"]})
    assert not validator.is_valid({"sates": ["ERROR"]})


@pytest.mark.parametrize("name", TOOLS)
def test_hints_follow_from_the_permission_and_the_audit(name: str) -> None:
    method, hints = TOOLS[name], ALL[name]["annotations"]
    changes = method.audited or method.permission is Permission.ENQUEUE
    assert hints["readOnlyHint"] is not changes
    assert hints.get("destructiveHint", False) is method.audited
    assert method.audited is (changes and method.permission is Permission.ADMIN)
    assert (f"without `{CONFIRM}`" in ALL[name]["description"]) is method.audited


def test_every_change_has_a_dry_run_or_a_tool_that_shows_what_it_is_about() -> None:
    for method in TOOLS.values():
        if method.audited and not has_dry_run(method):
            look: Any = METHODS[_LOOKS[method.name.rpartition(".")[0]]]
            assert look.permission is Permission.READ
            assert look.name.replace(".", "_") in TOOLS
            assert look.scope is not Scope.CLOSED or method.scope is Scope.CLOSED, method.name
