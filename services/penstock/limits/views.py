"""What results about limits, pauses and routes look like; see views for the style."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.protocol.views import about


class Action(msgspec.Struct, frozen=True):
    action: str
    paused: Annotated[bool, about("Its tasks are taken and none is sent.")]
    max_in_flight: int | None
    rate: Annotated[float | None, about("Tasks a second.")]
    burst: int | None
    key_max_in_flight: int | None
    key_rate: float | None
    key_burst: int | None
    in_flight: Annotated[int, about("Claimed and not settled; counted while it is limited.")]
    updated_at: Annotated[str | None, about("When its limits were last changed; null when it has none.")]


class Actions(msgspec.Struct, frozen=True):
    actions: Annotated[list[Action], about("Those that are limited or paused.")]


class Route(msgspec.Struct, frozen=True):
    name: str
    queue: str
    actions: list[str]
    labels: dict[str, str]
    position: int
    in_flight: int


class Routes(msgspec.Struct, frozen=True):
    routes: Annotated[list[Route], about("In the order in which they are tried.")]


class RouteChanged(msgspec.Struct, frozen=True):
    name: str
    deleted: bool


class Tenant(msgspec.Struct, frozen=True):
    tenant: str
    paused: Annotated[bool, about("Its tasks are taken and none is sent.")]
    own: Annotated[bool, about("Its limits are its own; false: those of *, the default.")]
    max_in_flight: int | None
    rate: Annotated[float | None, about("Tasks a second.")]
    burst: int | None
    updated_at: Annotated[str | None, about("When its own rule was last changed; null when it has none.")]


class TenantDetail(Tenant, frozen=True):
    in_flight: Annotated[int, about("Claimed and not settled; counted while it is limited.")]
    waiting: Annotated[int, about("Of its tasks, those that a limit or a pause keeps waiting.")]


class TenantPage(msgspec.Struct, frozen=True):
    tenants: list[Tenant]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]
