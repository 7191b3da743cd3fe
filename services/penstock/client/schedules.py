"""Schedules from a program: ``schedules`` of Client, of AsyncClient and, through the queue, of InboundClient."""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from penstock.protocol.requests import prepared


class Schedules:
    """Cron schedules over HTTP. Every method raises as those of Client do: InvalidParams, RpcError, Unavailable."""

    def __init__(self, call: Callable[[str, Mapping[str, Any]], Any]) -> None:
        self._call = call

    def create(self, name: str, expression: str, action: str, payload: Any = None, **options: Any) -> dict[str, Any]:
        """Have a task made by the clock; returns the schedule, with its ``next_at``.

        options: timezone, start_at and end_at (datetime with a zone, RFC 3339 text or epoch ms), jitter (s), missed
        (skip, one, all), max_missed, max_lateness (s), overlap (allow, skip, queue), priority, max_attempts, timeout
        (s), ordering_key, labels, paused, replace, tenant.
        """
        answer: dict[str, Any] = self._call("schedule.create", _created(name, expression, action, payload, options))
        return answer

    def update(self, name: str, **changes: Any) -> dict[str, Any]:
        """Change what is named, None clearing it where there may be none; returns the schedule."""
        answer: dict[str, Any] = self._call("schedule.update", {"name": name} | prepared(changes))
        return answer

    def get(self, name: str) -> dict[str, Any]:
        """A schedule with its payload and its next few instants."""
        answer: dict[str, Any] = self._call("schedule.get", {"name": name})
        return answer

    def list(self, **given: Any) -> dict[str, Any]:
        """A page of schedules, newest first: ``{"schedules", "cursor"}``.

        given: labels, action, paused, tenant, limit, cursor.
        """
        answer: dict[str, Any] = self._call("schedule.list", given)
        return answer

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a schedule; tasks that it made stay."""
        answer: dict[str, Any] = self._call("schedule.delete", {"name": name})
        return answer

    def pause(self, name: str) -> dict[str, Any]:
        """Stop a schedule until ``resume``; returns it."""
        answer: dict[str, Any] = self._call("schedule.pause", {"name": name})
        return answer

    def resume(self, name: str) -> dict[str, Any]:
        """Let a schedule go on from now; returns it."""
        answer: dict[str, Any] = self._call("schedule.resume", {"name": name})
        return answer

    def run_now(self, name: str) -> dict[str, Any]:
        """Run a schedule once, beside its clock; returns the run, with its ``task_id``."""
        answer: dict[str, Any] = self._call("schedule.run_now", {"name": name})
        return answer

    def runs(self, name: str, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """A page of what became of its instants, newest first: ``{"runs", "cursor"}``."""
        answer: dict[str, Any] = self._call("schedule.runs", {"name": name, "limit": limit, "cursor": cursor})
        return answer

    def create_many(self, schedules: Iterable[Mapping[str, Any]], *, replace: bool = False) -> dict[str, Any]:
        """Hand over up to 50,000 schedules, each a mapping as of ``create``; returns ``{"id", "total"}`` at once."""
        given: builtins.list[dict[str, Any]] = [prepared(schedule) for schedule in schedules]
        answer: dict[str, Any] = self._call("schedule.create_many", {"schedules": given, "replace": replace})
        return answer

    def import_status(self, import_id: int) -> dict[str, Any]:
        """How far a ``create_many`` has come, with the first hundred or so that were refused and why."""
        answer: dict[str, Any] = self._call("schedule.import_status", {"id": import_id})
        return answer


class AsyncSchedules:
    """The same, of AsyncClient."""

    def __init__(self, call: Callable[[str, Mapping[str, Any]], Awaitable[Any]]) -> None:
        self._call = call

    async def create(
        self, name: str, expression: str, action: str, payload: Any = None, **options: Any
    ) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call(
            "schedule.create", _created(name, expression, action, payload, options)
        )
        return answer

    async def update(self, name: str, **changes: Any) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.update", {"name": name} | prepared(changes))
        return answer

    async def get(self, name: str) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.get", {"name": name})
        return answer

    async def list(self, **given: Any) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.list", given)
        return answer

    async def delete(self, name: str) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.delete", {"name": name})
        return answer

    async def pause(self, name: str) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.pause", {"name": name})
        return answer

    async def resume(self, name: str) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.resume", {"name": name})
        return answer

    async def run_now(self, name: str) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.run_now", {"name": name})
        return answer

    async def runs(self, name: str, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.runs", {"name": name, "limit": limit, "cursor": cursor})
        return answer

    async def create_many(self, schedules: Iterable[Mapping[str, Any]], *, replace: bool = False) -> dict[str, Any]:
        """As of Schedules."""
        given: builtins.list[dict[str, Any]] = [prepared(schedule) for schedule in schedules]
        answer: dict[str, Any] = await self._call("schedule.create_many", {"schedules": given, "replace": replace})
        return answer

    async def import_status(self, import_id: int) -> dict[str, Any]:
        """As of Schedules."""
        answer: dict[str, Any] = await self._call("schedule.import_status", {"id": import_id})
        return answer


class InboundSchedules:
    """The changes among them through the inbound queue, where no answer comes back."""

    def __init__(self, send: Callable[[str, Mapping[str, Any]], Awaitable[None]]) -> None:
        self._send = send

    async def create(self, name: str, expression: str, action: str, payload: Any = None, **options: Any) -> None:
        """As of Schedules; give ``replace=True`` where it may be there already."""
        await self._send("schedule.create", _created(name, expression, action, payload, options))

    async def update(self, name: str, **changes: Any) -> None:
        """As of Schedules."""
        await self._send("schedule.update", {"name": name} | prepared(changes))

    async def delete(self, name: str) -> None:
        """As of Schedules."""
        await self._send("schedule.delete", {"name": name})

    async def pause(self, name: str) -> None:
        """As of Schedules."""
        await self._send("schedule.pause", {"name": name})

    async def resume(self, name: str) -> None:
        """As of Schedules."""
        await self._send("schedule.resume", {"name": name})

    async def run_now(self, name: str) -> None:
        """As of Schedules."""
        await self._send("schedule.run_now", {"name": name})


def _created(name: str, expression: str, action: str, payload: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    given = {"name": name, "expression": expression, "action": action}
    return given | ({} if payload is None else {"payload": payload}) | prepared(options)
