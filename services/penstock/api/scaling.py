"""GET /scaling: the load of each route as plain numbers, for a tool that starts and stops workers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import msgspec

from penstock.db.context import Recent
from penstock.db.pool import Store
from penstock.limits.scaling import DRAIN_SECONDS, RouteLoad, read_route_loads
from penstock.protocol.errors import InvalidParams, RouteNotFound

_DRAIN = "drain_seconds"
_DRAIN_MOST = 86_400.0
_FRESH_SECONDS = 1.0
_REST = 20  # a count is good for so many times what it took, for it must stay cheap however often it is asked for,
_REST_SECONDS = 30.0  # yet no longer than this


@dataclass(slots=True)
class Scaling:
    """Answers from one count for all who ask at about the same time."""

    _store: Store
    _recent: Recent = field(default_factory=Recent)
    _good_seconds: float = _FRESH_SECONDS

    async def answer(self, name: str | None, query: Mapping[str, str]) -> bytes:
        """The load of one route, or of all by name, as JSON. Raises InvalidParams, RouteNotFound, Unavailable."""
        drain_seconds = _drain_seconds(query)
        loads: dict[str, RouteLoad] = await self._recent.get("loads", "", self._count, self._good_seconds)
        if name is None:
            routes = {load.name: _figures(load, drain_seconds) for load in loads.values()}
            return msgspec.json.encode({"routes": routes})
        if name not in loads:
            raise RouteNotFound(name[:200])
        return msgspec.json.encode(_figures(loads[name], drain_seconds))

    async def _count(self) -> dict[str, RouteLoad]:
        began = monotonic()
        loads = {load.name: load for load in await read_route_loads(self._store)}
        self._good_seconds = min(_REST_SECONDS, max(_FRESH_SECONDS, _REST * (monotonic() - began)))
        return loads


def _drain_seconds(query: Mapping[str, str]) -> float:
    for name in query:
        if name != _DRAIN:
            raise InvalidParams(name[:200], f"is unknown here; {_DRAIN} is known")
    given = query.get(_DRAIN, str(DRAIN_SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _DRAIN_MOST:
        raise InvalidParams(_DRAIN, f"must be seconds from 1 to {_DRAIN_MOST:g}, not {given[:100]!r}")
    return seconds


def _figures(load: RouteLoad, drain_seconds: float) -> dict[str, Any]:
    return {
        "tasks": load.waiting + load.in_flight,
        "waiting": load.waiting,
        "in_flight": load.in_flight,
        "oldest_seconds": round(load.oldest_seconds, 3),
        "slots": round(load.slots(drain_seconds), 3),
    }
