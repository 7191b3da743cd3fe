"""API keys: created, listed, revoked, and found among those of the settings and of Postgres. No secret is stored."""

import asyncio
import hmac
from collections.abc import Sequence
from time import monotonic
from typing import Annotated

import msgspec

from penstock.api.context import ApiContext
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol import api_key
from penstock.protocol.api_key import ApiKey, Permission, actions_of_caller
from penstock.protocol.checks import ID, LIMIT, MAX_LIST, NUMBERED, TaskId, check_seconds, read_cursor
from penstock.protocol.errors import AccessDenied, InvalidParams, KeyNotFound, Unavailable
from penstock.protocol.method import Scope, method
from penstock.protocol.record import Record, view_of
from penstock.protocol.tenant import read_tenant
from penstock.protocol.views import CURSOR, NEXT_CURSOR, Instant, about
from penstock.runtime.logs import log

REFRESH_SECONDS = 2.0
BELIEVED_SECONDS = 8.0  # a key that was revoked stops within 10 s, even where Postgres cannot be asked
USE_NOTED_SECONDS = 60.0


class Key(Record):
    id: int
    name: str
    prefix: Annotated[str, about("The beginning of the key, which identifies it to people.")]
    permissions: list[Permission]
    created_at: Instant
    expires_at: Instant | None
    revoked_at: Instant | None
    last_used_at: Annotated[str | None, about("To the minute or so.")]
    tenant: Annotated[str | None, about("To which it is bound: it sees that one's tasks alone. Null: to none.")]
    actions: Annotated[
        list[str] | None,
        about(
            "Patterns of the actions that it may enqueue. Null: all; for a key of a tenant all but the built-in ones."
        ),
    ]


class NewKey(Key):
    key: Annotated[str, about("The key itself; it is kept nowhere and cannot be shown again.")]


class KeyPage(Record):
    keys: list[Key]  # type: ignore[assignment]  # a method of dicts
    cursor: Annotated[str | None, NEXT_CURSOR]


class CreateKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, about(f"Whose it is; one key of a name at a time. 1 to {api_key.NAME_MAX_CHARS} characters.")]
    permissions: Annotated[
        Sequence[Permission],
        about(
            "What it may do: enqueue, read, worker, scaling, admin; admin implies the others, read worker and scaling."
        ),
    ]
    expires_in: Annotated[float | None, about("Seconds until it expires; null for never.")] = None
    tenant: Annotated[str | None, about("Bind it to a tenant, whose tasks alone it sees; null for none.")] = None
    actions: Annotated[
        Sequence[str] | None,
        about(
            "It may enqueue these actions alone, such as mail.send or mail.*; null for all, with a tenant all but the "
            "built-in ones."
        ),
    ] = None


async def create_key(session: Session, command: CreateKey) -> NewKey | None:
    """None when the name is in use."""
    secret = api_key.new_secret()
    rows = await session.fetch(
        "create_api_key", command.name, secret[:api_key.PREFIX_CHARS], api_key.digest_of(secret.encode("ascii")),
        [permission.value for permission in Permission if permission in command.permissions],
        command.expires_in, command.tenant, command.actions,
    )  # fmt: skip
    return view_of(NewKey, rows[0], key=secret) if rows else None


class KeysListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about(f"Maximum number of keys; 1 to {MAX_LIST}."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, NUMBERED] = None
    revoked: Annotated[bool, about("With those that are revoked.")] = False


async def list_keys(session: Session, page: KeysListParams) -> list[Key]:
    """Newest first."""
    rows = await session.fetch("list_api_keys", read_cursor(page.cursor), page.limit, page.revoked)
    return [view_of(Key, row) for row in rows]


async def revoke_key(session: Session, key_id: int | None, name: str | None = None) -> Key | None:
    """Revoke the key that has a name now, or else that of an id, permanently; None when it is unknown."""
    rows = await session.fetch("revoke_api_key", key_id, name)
    return view_of(Key, rows[0]) if rows else None


async def active_keys(session: Session) -> list[ApiKey]:
    return [
        ApiKey(
            row["name"], bytes(row["hash"]), api_key.implied(row["permissions"]), row["id"], row["tenant"],
            None if row["actions"] is None else tuple(row["actions"]),
        )
        for row in await session.fetch("read_active_keys")
    ]  # fmt: skip


def _read_create(given: CreateKey) -> CreateKey:
    name = api_key.check_name(given.name)
    if not given.permissions:
        raise InvalidParams("permissions", f"must hold at least one of {', '.join(Permission)}")
    check_seconds(given.expires_in, "expires_in")
    read_tenant(given.tenant)
    return msgspec.structs.replace(given, name=name, actions=api_key.check_patterns(given.actions))


def _narrow_create(given: CreateKey) -> CreateKey:
    """A key that is limited to actions makes none that may enqueue others."""
    own = actions_of_caller()
    if own is not None and not (given.actions and all(api_key.is_covered(one, own) for one in given.actions)):
        raise AccessDenied(
            403, f"Not permitted: this API key may enqueue {', '.join(own)} alone", {"actions": list(own)}
        )
    return given


@method("keys.create", permission=Permission.ADMIN, scope=Scope.CLOSED, read=_read_create, narrow=_narrow_create)
async def create(context: ApiContext, command: CreateKey) -> NewKey:
    """Make an API key; this answer is the only place where it can be read."""
    async with context.session() as session:
        made = await create_key(session, command)
    if made is None:
        raise InvalidParams("name", f"{command.name!r} is a key's name already: revoke that, or take another one")
    log.info("api_key_created", id=made.id, name=made.name, permissions=",".join(made.permissions))
    if context.keys_changed is not None:
        await context.keys_changed()
    return made


@method("keys.list", permission=Permission.ADMIN, scope=Scope.CLOSED, audited=False)
async def list_(session: Session, page: KeysListParams) -> KeyPage:
    """List API keys, newest first, without the keys themselves."""
    keys = await list_keys(session, page)
    return KeyPage(keys=keys, cursor=str(keys[-1].id) if len(keys) == page.limit else None)


class KeysRevokeParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[TaskId, about("From keys.list."), ID]


@method("keys.revoke", permission=Permission.ADMIN, scope=Scope.CLOSED, errors=(KeyNotFound,))
async def revoke(context: ApiContext, given: KeysRevokeParams) -> Key:
    """Revoke an API key permanently; it is refused within 10 seconds."""
    async with context.session() as session:
        key = await revoke_key(session, int(given.id))
    if key is None:
        raise KeyNotFound(int(given.id))
    log.info("api_key_revoked", id=key.id, name=key.name)
    if context.keys_changed is not None:
        await context.keys_changed()
    return key


class KeyCache:
    """Finds keys by their digests, without a query. fixed: keys of the settings. store: where the others are."""

    def __init__(self, fixed: Sequence[ApiKey], store: Store) -> None:
        self._fixed = {key.digest: key for key in fixed}
        self._store = store
        self._kept: dict[bytes, ApiKey] = {}
        self._read_at = float("-inf")
        self._used: set[int] = set()
        self._noted_at = float("-inf")
        self._failed = False

    def find(self, digest: bytes) -> ApiKey | None:
        """The key whose secret has this digest. Raises Unavailable while the keys were last read too long ago."""
        # The time of this look-up depends on digests alone, which lead back to no secret.
        key = self._fixed.get(digest)
        if key is None:
            if monotonic() - self._read_at > BELIEVED_SECONDS:
                raise Unavailable("the API keys in Postgres could not be read for some seconds")
            key = self._kept.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            return None
        if key.id is not None:
            self._used.add(key.id)
        return key

    async def refresh(self) -> None:
        """Read the keys again. Raises Unavailable."""
        asked_at = monotonic()
        async with self._store.session() as session:
            keys = await active_keys(session)
        if asked_at < self._read_at:
            return  # another look, which began later, has ended before
        self._kept = {key.digest: key for key in keys}
        self._read_at = asked_at  # what was asked before must not count as newer than it is

    async def renew(self) -> None:
        """As ``refresh``, for a change that is to count at once; other api processes see it within seconds."""
        try:
            # A pool that is used up would otherwise hold this one for half a minute.
            async with asyncio.timeout(BELIEVED_SECONDS):
                await self.refresh()
        except (Unavailable, TimeoutError) as exc:
            if not self._failed:
                log.warning("api_keys_not_read", reason=str(exc) or "no answer in time")
            self._failed = True
        else:
            self._failed = False

    async def run(self) -> None:
        """Keep the keys fresh; runs beside the requests."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self.renew()
            await self._note_use()

    async def _note_use(self) -> None:
        """From time to time record which keys were used; where that is refused, keys count all the same."""
        now = monotonic()
        if not self._used or now - self._noted_at < USE_NOTED_SECONDS:
            return
        used, self._used, self._noted_at = self._used, set(), now
        try:
            async with asyncio.timeout(BELIEVED_SECONDS / 2):  # within which the keys are read again
                await self._store.fetch("note_key_use", sorted(used))
        except (Unavailable, TimeoutError) as exc:
            self._used |= used
            log.warning("key_use_not_noted", reason=str(exc) or "no answer in time")
