"""What may be asked about limits, pauses and routes: parameters of `action.*` and `route.*`, and the commands that they
become. Pure; :mod:`penstock.limits.store` carries them out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.protocol.checks import CONTROL
from penstock.protocol.errors import InvalidParams

ROUTE_NAME_MAX_CHARS = 60
MAX_PATTERNS = 100
MAX_ROUTE_LABELS = 16
MOST_IN_FLIGHT = 1_000_000
MOST_A_SECOND = 1_000_000.0
_POSITIONS = range(-(2**31), 2**31)
SECONDS_OF = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Per = Literal["second", "minute", "hour"]


@dataclass(frozen=True, slots=True)
class Route:
    """Which tasks go to a queue of their own.

    queue: name or URL. actions: patterns in which * stands for anything; a task has to match one of them, and to have
    all ``labels``. position: of several routes that fit, the lowest counts, then the first by name.
    """

    name: str
    queue: str
    actions: Sequence[str]
    labels: Mapping[str, str]
    position: int = 0


class ActionSetParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str
    max_in_flight: int | UnsetType | None = UNSET
    rate: float | UnsetType | None = UNSET
    burst: int | UnsetType | None = UNSET
    key_max_in_flight: int | UnsetType | None = UNSET
    key_rate: float | UnsetType | None = UNSET
    key_burst: int | UnsetType | None = UNSET
    per: Per = "second"


class ActionGetParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str


class ActionListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class ActionPauseParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str


class ActionResumeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: str


class RouteSetParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    queue: str
    actions: list[str] = msgspec.field(default_factory=lambda: ["*"])
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    position: int = 0


class RouteListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RouteDeleteParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


RULE_PARAMS: dict[str, type[msgspec.Struct]] = {
    "action.set": ActionSetParams,
    "action.get": ActionGetParams,
    "action.list": ActionListParams,
    "action.pause": ActionPauseParams,
    "action.resume": ActionResumeParams,
    "route.set": RouteSetParams,
    "route.list": RouteListParams,
    "route.delete": RouteDeleteParams,
}
READING = ("action.get", "action.list", "route.list")


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Change what ``change`` names, by the members of ``token_bucket.Limits``; rates are a second's."""

    action: str
    change: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GetAction:
    action: str


@dataclass(frozen=True, slots=True)
class ListActions:
    pass


@dataclass(frozen=True, slots=True)
class SetRoute:
    route: Route


@dataclass(frozen=True, slots=True)
class ListRoutes:
    pass


@dataclass(frozen=True, slots=True)
class DeleteRoute:
    name: str


RuleChange = SetLimits | SetRoute | DeleteRoute
RuleCommand = RuleChange | GetAction | ListActions | ListRoutes


def read_rule(values: Any, check_action: Callable[[str], str]) -> RuleCommand:
    """The command that decoded parameters ask for. Raises InvalidParams."""
    match values:
        case ActionSetParams():
            return SetLimits(check_action(values.action), _change(values))
        case ActionGetParams():
            return GetAction(check_action(values.action))
        case ActionPauseParams():
            return SetLimits(check_action(values.action), {"paused": True})
        case ActionResumeParams():
            return SetLimits(check_action(values.action), {"paused": False})
        case RouteSetParams():
            return SetRoute(_route(values))
        case RouteDeleteParams():
            return DeleteRoute(_route_name(values.name))
        case ActionListParams():
            return ListActions()
    return ListRoutes()


def _change(given: ActionSetParams) -> dict[str, Any]:
    change: dict[str, Any] = {}
    for name in ("max_in_flight", "burst", "key_max_in_flight", "key_burst"):
        value = getattr(given, name)
        if value is UNSET:
            continue
        if value is not None and not 1 <= value <= MOST_IN_FLIGHT:
            hint = "; to send none, use action.pause" if value == 0 and name.endswith("max_in_flight") else ""
            raise InvalidParams(
                name, f"must be between 1 and {MOST_IN_FLIGHT}, or null for no limit, not {value}{hint}"
            )
        change[name] = value
    for name in ("rate", "key_rate"):
        value = getattr(given, name)
        if value is UNSET:
            continue
        if value is not None:
            value /= SECONDS_OF[given.per]
            if not 0 < value <= MOST_A_SECOND:
                raise InvalidParams(
                    name, f"must be above 0 and at most {MOST_A_SECOND:.0f} a second, or null for no limit, "
                    f"not {getattr(given, name)} a {given.per}",
                )  # fmt: skip
        change[name] = value
    if not change:
        raise InvalidParams("action", f"alone changes nothing: give any of {', '.join(_LIMIT_NAMES)}")
    return change


_LIMIT_NAMES = ("max_in_flight", "rate", "burst", "key_max_in_flight", "key_rate", "key_burst")


def _route(given: RouteSetParams) -> Route:
    if not 1 <= len(given.queue) <= 1000 or CONTROL.search(given.queue) or " " in given.queue:
        raise InvalidParams("queue", f"must be a queue's name or URL, not {given.queue[:60]!r}")
    if not 1 <= len(given.actions) <= MAX_PATTERNS:
        raise InvalidParams("actions", f"must hold 1 to {MAX_PATTERNS} patterns, not {len(given.actions)}")
    for place, pattern in enumerate(given.actions):
        if not 1 <= len(pattern) <= 200 or CONTROL.search(pattern) or "\\" in pattern:
            raise InvalidParams(
                f"actions[{place}]", f"must be an action or a pattern such as video.*, not {pattern[:60]!r}"
            )
    if len(given.labels) > MAX_ROUTE_LABELS:
        raise InvalidParams("labels", f"must hold at most {MAX_ROUTE_LABELS}, not {len(given.labels)}")
    for name, value in given.labels.items():
        if not name or len(name) > 200 or len(value) > 200 or CONTROL.search(name + value):
            raise InvalidParams("labels", f"must be text of up to 200 characters by text: {name[:60]!r}")
    if given.position not in _POSITIONS:
        raise InvalidParams("position", f"must fit into 32 bits, not {given.position}")
    return Route(_route_name(given.name), given.queue, given.actions, given.labels, given.position)


def _route_name(name: str) -> str:
    if not 1 <= len(name) <= ROUTE_NAME_MAX_CHARS or not _NAME.fullmatch(name):
        raise InvalidParams(
            "name", f"must be 1 to {ROUTE_NAME_MAX_CHARS} letters, digits, dots, dashes or underscores, "
            f"not {name[:ROUTE_NAME_MAX_CHARS]!r}",
        )  # fmt: skip
    return name
