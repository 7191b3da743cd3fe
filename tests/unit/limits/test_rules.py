"""What may be asked about limits and routes, and how mistakes are reported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.limits.model import ActionName, RouteName, RouteSetParams, limits_of
from penstock.methods.table import read_command
from penstock.protocol.errors import InvalidParams
from penstock.settings.model import load_settings

SETTINGS = load_settings()


def command(method: str, **params: Any) -> Any:
    return read_command(method, json.dumps(params).encode(), SETTINGS)


def test_a_limit_left_out_stays_and_null_takes_it_away() -> None:
    given = command("action.set", action="a", max_in_flight=3, key_rate=None)
    assert (given.action, limits_of(given)) == ("a", {"max_in_flight": 3, "key_rate": None})


@pytest.mark.parametrize(("per", "rate"), [("second", 120.0), ("minute", 2.0), ("hour", 120 / 3600)])
def test_rates_are_counted_in_what_the_call_says(per: str, rate: float) -> None:
    assert limits_of(command("action.set", action="a", rate=120, per=per)) == {"rate": pytest.approx(rate)}


def test_the_other_methods_become_their_commands() -> None:
    for method in ("action.pause", "action.resume", "action.get"):
        assert command(method, action="a") == ActionName("a")
    assert command("route.delete", name="video") == RouteName("video")
    assert command("route.set", name="video", queue="q") == RouteSetParams("video", "q", ["*"], {})
    assert command("route.set", name="v", queue="q", actions=["a.*"], labels={"x": "y"}, position=-1) == RouteSetParams(
        "v", "q", ["a.*"], {"x": "y"}, -1
    )


@pytest.mark.parametrize(
    ("method", "params", "field", "seen"),
    [
        ("action.set", {"action": "a"}, "action", "max_in_flight"),
        ("action.set", {"action": "", "burst": 1}, "action", "empty"),
        ("action.set", {"action": "a", "max_in_flight": 0}, "max_in_flight", "action.pause"),
        ("action.set", {"action": "a", "max_in_flight": 1.5}, "max_in_flight", "int"),
        ("action.set", {"action": "a", "key_burst": -1}, "key_burst", "-1"),
        ("action.set", {"action": "a", "rate": 0}, "rate", "0"),
        ("action.set", {"action": "a", "rate": 2e6}, "rate", "2000000"),
        ("action.set", {"action": "a", "rate": 1, "per": "day"}, "per", "day"),
        ("action.set", {"action": "a", "rat": 1}, "rat", "did you mean rate"),
        ("action.pause", {}, "action", "missing"),
        ("route.set", {"name": "v"}, "queue", "missing"),
        ("route.set", {"name": "v w", "queue": "q"}, "name", "v w"),
        ("route.set", {"name": "v", "queue": "a b"}, "queue", "a b"),
        ("route.set", {"name": "v", "queue": "q", "actions": []}, "actions", "0"),
        ("route.set", {"name": "v", "queue": "q", "actions": ["a", "b\\*"]}, "actions[1]", "b"),
        ("route.set", {"name": "v", "queue": "q", "labels": {"": "x"}}, "labels", "''"),
        ("route.set", {"name": "v", "queue": "q", "labels": {str(n): "x" for n in range(17)}}, "labels", "17"),
        ("route.set", {"name": "v", "queue": "q", "position": 2**31}, "position", "2147483648"),
        ("route.delete", {"name": "../x"}, "name", "../x"),
    ],
)
def test_a_mistake_names_the_field_and_what_was_seen(
    method: str, params: dict[str, Any], field: str, seen: str
) -> None:
    with pytest.raises(InvalidParams) as caught:
        command(method, **params)
    assert caught.value.data["field"] == field
    assert seen in caught.value.message
