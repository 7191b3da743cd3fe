"""The OpenRPC document against the parameters and results that the api really knows."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.api import table
from penstock.api.table import METHODS
from penstock.protocol import answers


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    text = msgspec.json.encode(table.describe())
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def methods(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {method["name"]: method for method in document["methods"]}


def references(value: Any) -> list[str]:
    """Every ``$ref`` in a document."""
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [ref for inner in value.values() for ref in references(inner)]
    return [ref for inner in value for ref in references(inner)] if isinstance(value, list) else []


def test_every_method_is_described_and_no_other(document: dict[str, Any]) -> None:
    assert set(methods(document)) == {*METHODS, "submit:<action>"}
    assert document["openrpc"] == "1.3.2"
    assert document["info"]["title"] == "Penstock"


@pytest.mark.parametrize("name", METHODS)
def test_method_lists_the_parameters_it_takes_in_their_positional_order(document: dict[str, Any], name: str) -> None:
    described = methods(document)[name]["params"]
    fields = msgspec.structs.fields(METHODS[name].params)
    assert [param["name"] for param in described] == [field.name for field in fields]
    assert [param["required"] for param in described] == [field.required for field in fields]
    assert all(param["description"].endswith(".") for param in described)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    found = references(document)
    assert found
    for reference in found:
        target: Any = document
        for step in reference.removeprefix("#/").split("/"):
            target = target[step]
        assert target


def test_required_members_come_before_optional_ones(document: dict[str, Any]) -> None:
    for method in document["methods"]:
        required = [param["required"] for param in method["params"]]
        assert required == sorted(required, reverse=True), method["name"]


def test_payload_is_an_object_or_an_array_and_empty_by_default(document: dict[str, Any]) -> None:
    payload = methods(document)["enqueue"]["params"][1]
    assert payload["schema"] == {"type": ["object", "array"], "default": {}}


def test_result_of_status_is_the_record_that_is_sent(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert list(schemas["Task"]["properties"]) == list(answers.Task._members)
    assert set(schemas["TaskDetail"]["properties"]) == set(answers.TaskDetail._members)


def test_every_error_has_its_code(document: dict[str, Any]) -> None:
    codes = {error["code"] for error in document["components"]["errors"].values()}
    assert codes == {-32700, -32600, -32601, -32602, -32603, -32003, -32004, -32005, -32006, -32008, -32009, -32010,
                     -32011, -32012, -32013, -32020, -32022, -32023, -32025, -32029}  # fmt: skip
