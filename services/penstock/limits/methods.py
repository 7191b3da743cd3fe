"""The methods about limits, pauses and routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any

from penstock.db.session import Session
from penstock.limits import views
from penstock.limits.model import DeleteRoute, GetAction, ListActions, ListRoutes, RuleChange, SetLimits, SetRoute
from penstock.limits.store import ActionRecord, change_rule, list_actions, list_routes, read_action
from penstock.protocol.views import timestamp


class Rules:
    """Changes and shows rules. session, transaction: open one. changed: called after a change, to wake schedulers."""

    def __init__(
        self,
        session: Callable[[], AbstractAsyncContextManager[Session]],
        transaction: Callable[[], AbstractAsyncContextManager[Session]],
        changed: Callable[[], None],
    ) -> None:
        self._session = session
        self._transaction = transaction
        self._changed = changed

    @property
    def commands(self) -> Mapping[type, Callable[[Any], Awaitable[Any]]]:
        """What carries out each command."""
        return {
            SetLimits: self.change, SetRoute: self.change, DeleteRoute: self.change, GetAction: self.get_action,
            ListActions: self.list_actions, ListRoutes: self.list_routes,
        }  # fmt: skip

    async def change(self, command: RuleChange) -> views.Action | views.RouteChanged:
        """Raises RouteNotFound."""
        async with self._transaction() as session:
            await change_rule(session, command)
        self._changed()
        if isinstance(command, SetLimits):
            return await self.get_action(GetAction(command.action))
        name = command.name if isinstance(command, DeleteRoute) else command.route.name
        return views.RouteChanged(name, isinstance(command, DeleteRoute))

    async def get_action(self, command: GetAction) -> views.Action:
        async with self._session() as session:
            return _action(await read_action(session, command.action))

    async def list_actions(self, _command: ListActions) -> views.Actions:
        async with self._session() as session:
            return views.Actions([_action(record) for record in await list_actions(session)])

    async def list_routes(self, _command: ListRoutes) -> views.Routes:
        async with self._session() as session:
            found = await list_routes(session)
        return views.Routes(
            [
                views.Route(route.name, route.queue, list(route.actions), dict(route.labels), route.position, count)
                for route, count in found
            ]
        )


def _action(record: ActionRecord) -> views.Action:
    updated = None if record.updated_at is None else timestamp(record.updated_at)
    return views.Action(record.name, **asdict(record.limits), in_flight=record.in_flight, updated_at=updated)
