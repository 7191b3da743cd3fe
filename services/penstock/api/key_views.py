"""What results about API keys look like; see views for the style."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.api.key_store import KeyRecord
from penstock.protocol.api_key import Permission
from penstock.protocol.views import Instant, about, timestamp


class Key(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    prefix: Annotated[str, about("The beginning of the key, to tell it from others.")]
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


class NewKey(Key, frozen=True, kw_only=True):
    key: Annotated[str, about("The key itself; it is kept nowhere and cannot be shown again.")]


class KeyPage(msgspec.Struct, frozen=True):
    keys: list[Key]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


def key(record: KeyRecord) -> Key:
    """A record as it is shown."""
    return Key(**key_members(record))


def key_members(record: KeyRecord) -> dict[str, Any]:
    """The members of both Key and NewKey."""
    return {
        "id": record.id,
        "name": record.name,
        "prefix": record.prefix,
        "permissions": list(record.permissions),
        "created_at": timestamp(record.created_at),
        "expires_at": record.expires_at and timestamp(record.expires_at),
        "revoked_at": record.revoked_at and timestamp(record.revoked_at),
        "last_used_at": record.last_used_at and timestamp(record.last_used_at),
        "tenant": record.tenant,
        "actions": None if record.actions is None else list(record.actions),
    }
