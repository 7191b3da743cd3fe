from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.methods.audit import shown_params


@pytest.mark.parametrize(("params", "shown"), [
    ({"name": "n", "payload": {"secret": 1}}, {"name": "n", "payload": "(12 bytes)"}),
    (["n", "@daily", "a", {"secret": 1}],
     {"name": "n", "expression": "@daily", "action": "a", "payload": "(12 bytes)"}),
    ([], {}),
])  # fmt: skip
def test_payloads_are_left_out_by_name_and_by_position(params: Any, shown: Any) -> None:
    assert json.loads(shown_params("schedule.create", json.dumps(params).encode())) == shown


def test_parameters_of_another_api_and_unreadable_ones_are_shown_as_far_as_they_can_be() -> None:
    assert shown_params("PUT /jobs/{id}", b"[1]") == "[1]"
    assert shown_params("cancel", b"{") == "?"
    assert shown_params("cancel", b"") == "{}"
