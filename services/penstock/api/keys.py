"""The methods about API keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from penstock.api import key_views as views
from penstock.api.key_store import create_key, list_keys, revoke_key
from penstock.db.session import Session
from penstock.protocol.errors import InvalidParams, KeyNotFound, Unavailable
from penstock.runtime.logs import get_logger
from penstock.tasks.commands import CreateKey, ListKeys, RevokeKey

log = get_logger()


class Keys:
    """Makes, lists and revokes keys.

    session: opens one. changed: called after a change; None where no keys are asked for.
    """

    def __init__(
        self,
        session: Callable[[], AbstractAsyncContextManager[Session]],
        changed: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._session = session
        self._changed = changed

    async def create(self, command: CreateKey) -> views.NewKey:
        """Raises InvalidParams when the name is taken."""
        async with self._session() as session:
            made = await create_key(
                session, command.name, command.permissions, command.expires_in_seconds, command.tenant, command.actions
            )
        if made is None:
            raise InvalidParams("name", f"{command.name!r} is a key's name already: revoke that, or take another one")
        record, secret = made
        log.info("api_key_created", id=record.id, name=record.name, permissions=",".join(record.permissions))
        await self._spread()
        return views.NewKey(**views.key_members(record), key=secret)

    async def list(self, command: ListKeys) -> views.KeyPage:
        """A page, newest first."""
        async with self._session() as session:
            records = await list_keys(session, before=command.before, limit=command.limit, revoked=command.revoked)
        cursor = str(records[-1].id) if len(records) == command.limit else None
        return views.KeyPage([views.key(record) for record in records], cursor)

    async def revoke(self, command: RevokeKey) -> views.Key:
        """Raises KeyNotFound."""
        async with self._session() as session:
            record = await revoke_key(session, command.id)
        if record is None:
            raise KeyNotFound(command.id)
        log.info("api_key_revoked", id=record.id, name=record.name)
        await self._spread()
        return views.key(record)

    async def _spread(self) -> None:
        """Have the change count here at once; other api processes see it within seconds, as this one would."""
        if self._changed is not None:
            try:
                await self._changed()
            except Unavailable as exc:
                log.warning("api_keys_not_read", reason=str(exc))
