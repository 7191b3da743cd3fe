"""Parameters and results of `action.*`, `route.*` and `tenant.*`; without I/O. Parameters raise InvalidParams."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.protocol.checks import ACTION, CONTROL, ID, LIMIT, Checked, TaskId, check_labels
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import EVERY_TENANT, TENANT_MAX_CHARS, read_tenant
from penstock.protocol.views import CURSOR, about

ROUTE_NAME_MAX_CHARS = 60
MAX_PATTERNS = 100
MOST_IN_FLIGHT = 1_000_000
MOST_A_SECOND = 1_000_000.0
SECONDS_OF = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Per = Literal["second", "minute", "hour"]
NewCount = int | UnsetType | None
NewRate = float | UnsetType | None

_TENANT = f"The tenant; 1 to {TENANT_MAX_CHARS} characters."


def _check_route_name(route: str, name: str) -> None:
    if not 1 <= len(route) <= ROUTE_NAME_MAX_CHARS or not _NAME.fullmatch(route):
        problem = f"must be 1 to {ROUTE_NAME_MAX_CHARS} letters, digits, dots, dashes or underscores"
        raise InvalidParams(name, f"{problem}, not {route[:ROUTE_NAME_MAX_CHARS]!r}")


def _check_tenant_or_all(tenant: str, name: str) -> None:
    if tenant != EVERY_TENANT:
        read_tenant(tenant, name)


def _check_one_tenant(tenant: str, name: str) -> None:
    if tenant == EVERY_TENANT:
        raise InvalidParams(name, "must be one tenant's name: to send nothing at all, pause actions")
    read_tenant(tenant, name)


class ActionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    action: Annotated[str, about("The action, exactly."), ACTION]


class ActionSetParams(ActionName, frozen=True, forbid_unknown_fields=True):
    max_in_flight: Annotated[
        NewCount, about("How many of its tasks may be claimed and unsettled; null for no limit.")
    ] = UNSET
    rate: Annotated[NewRate, about("How many may go in each `per`; null for no limit.")] = UNSET
    burst: Annotated[
        NewCount, about("How many may go at once after a rest; null for what the rate gives in a second.")
    ] = UNSET
    key_max_in_flight: Annotated[NewCount, about("As max_in_flight, for each limit_key separately.")] = UNSET
    key_rate: Annotated[NewRate, about("As rate, for each limit_key separately.")] = UNSET
    key_burst: Annotated[NewCount, about("As burst, for each limit_key separately.")] = UNSET
    per: Annotated[Per, about("What the rates of this call are counted in.")] = "second"

    def __post_init__(self) -> None:
        limits_of(self)


# An action without limits, in the order of the parameters of ``set_action``.
UNLIMITED: dict[str, Any] = {"paused": False} | dict.fromkeys(ActionSetParams.__struct_fields__[1:-1])


class RouteSetParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[
        str, about(f"The route's name; 1 to {ROUTE_NAME_MAX_CHARS} letters, digits, dots, dashes or underscores.")
    ]
    queue: Annotated[str, about("Its queue, by name or URL; the queue must exist.")]
    actions: Annotated[
        list[str], about("Patterns, of which a task's action has to match one; * stands for anything.")
    ] = msgspec.field(default_factory=lambda: ["*"])
    labels: Annotated[dict[str, str], about("Labels that a task must have.")] = {}
    position: Annotated[int, about("If several routes match a task, the lowest position wins.")] = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.queue) <= 1000 or CONTROL.search(self.queue) or " " in self.queue:
            raise InvalidParams("queue", f"must be a queue's name or URL, not {self.queue[:60]!r}")
        if not 1 <= len(self.actions) <= MAX_PATTERNS:
            raise InvalidParams("actions", f"must hold 1 to {MAX_PATTERNS} patterns, not {len(self.actions)}")
        for place, pattern in enumerate(self.actions):
            if not 1 <= len(pattern) <= 200 or CONTROL.search(pattern) or "\\" in pattern:
                problem = f"must be an action or a pattern such as video.*, not {pattern[:60]!r}"
                raise InvalidParams(f"actions[{place}]", problem)
        check_labels(self.labels, most=16, name_chars=200, value_chars=200)
        if not -(2**31) <= self.position < 2**31:
            raise InvalidParams("position", f"must fit into 32 bits, not {self.position}")
        _check_route_name(self.name, "name")


class RouteName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, about("The route."), Checked(_check_route_name)]


class TenantOrAll(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: Annotated[
        str, about(f"{_TENANT} Or *, for every tenant that has no limits of its own."), Checked(_check_tenant_or_all)
    ]


class TenantSetParams(TenantOrAll, frozen=True, forbid_unknown_fields=True):
    max_in_flight: Annotated[
        NewCount, about("Maximum number of claimed, unsettled tasks of all its actions; null for no limit.")
    ] = UNSET
    rate: Annotated[NewRate, about("Tasks that may go in each `per`; null for no limit.")] = UNSET
    burst: Annotated[
        NewCount, about("Tasks that may go at once after a rest; null: what the rate gives in a second, at least one.")
    ] = UNSET
    per: Annotated[Per, about("What the rate counts by.")] = "second"

    def __post_init__(self) -> None:
        limits_of(self)


class TenantName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: Annotated[str, about(_TENANT), Checked(_check_one_tenant)]


class TenantListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about("Maximum number of tenants; 1 to 1000."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, Checked(_check_tenant_or_all)] = None


class TaskExplainParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[TaskId, about("The task."), ID]


# Results


# Checks


def limits_of(given: ActionSetParams | TenantSetParams) -> dict[str, Any]:
    """The given limits by name; rates per second. There is at least one."""
    subject, *names, _ = given.__struct_fields__
    change = {name: value for name in names if (value := getattr(given, name)) is not UNSET}
    for name, value in change.items():
        if value is None:
            continue
        if name.endswith("rate"):
            change[name] = value / SECONDS_OF[given.per]
            if not 0 < change[name] <= MOST_A_SECOND:
                problem = f"must be above 0 and at most {MOST_A_SECOND:.0f} a second, or null for no limit"
                raise InvalidParams(name, f"{problem}, not {value} a {given.per}")
        elif not 1 <= value <= MOST_IN_FLIGHT:
            hint = f"; to send none, use {subject}.pause" if value == 0 and name.endswith("max_in_flight") else ""
            problem = f"must be between 1 and {MOST_IN_FLIGHT}, or null for no limit, not {value}{hint}"
            raise InvalidParams(name, problem)
    if not change:
        raise InvalidParams(subject, f"alone changes nothing: give any of {', '.join(names)}")
    return change
