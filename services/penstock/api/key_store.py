"""API keys in Postgres: made, listed, revoked; the secret is shown once, at its making, and never stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.db.session import Session
from penstock.protocol.api_key import PREFIX_CHARS, ApiKey, Permission, digest_of, implied, new_secret


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as operators see it; ``prefix`` is the beginning of its secret."""

    id: int
    name: str
    prefix: str
    permissions: tuple[Permission, ...]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    tenant: str | None
    actions: tuple[str, ...] | None


async def create_key(
    session: Session,
    name: str,
    permissions: Sequence[Permission],
    expires_in_seconds: float | None,
    tenant: str | None = None,
    actions: Sequence[str] | None = None,
) -> tuple[KeyRecord, str] | None:
    """Make a key; returns its record and its secret, or None when the name is in use.

    tenant: to which it is bound. actions: patterns of those that it may enqueue.
    """
    secret = new_secret()
    digest = digest_of(secret.encode("ascii"))
    kept = [permission.value for permission in Permission if permission in permissions]
    given = kept, expires_in_seconds, tenant, actions
    rows = await session.fetch("create_api_key", name, secret[:PREFIX_CHARS], digest, *given)
    return (_record(rows[0]), secret) if rows else None


async def list_keys(session: Session, *, before: int | None, limit: int, revoked: bool) -> list[KeyRecord]:
    """Newest first, from behind the id ``before``; ``revoked``: with those too."""
    return [_record(row) for row in await session.fetch("list_api_keys", before, limit, revoked)]


async def find_key(session: Session, name: str) -> int | None:
    """The id of the key that has the name now."""
    found: int | None = await session.value("find_api_key", name)
    return found


async def revoke_key(session: Session, key_id: int) -> KeyRecord | None:
    """Revoke a key, for good; None when there is no such key."""
    rows = await session.fetch("revoke_api_key", key_id)
    return _record(rows[0]) if rows else None


async def active_keys(session: Session) -> list[ApiKey]:
    """The keys that are accepted now."""
    rows = await session.fetch("read_active_keys")
    return [
        ApiKey(
            row["name"], bytes(row["hash"]), implied(row["permissions"]), row["id"], row["tenant"],
            _tuple(row["actions"]),
        )
        for row in rows
    ]  # fmt: skip


def _record(row: Any) -> KeyRecord:
    values = {name: row[name] for name in KeyRecord.__slots__}
    permissions = tuple(map(Permission, row["permissions"]))
    return KeyRecord(**values | {"permissions": permissions, "actions": _tuple(row["actions"])})


def _tuple(values: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)
