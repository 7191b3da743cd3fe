"""What operators ask: rejected messages, dead letters, keys, ordering keys, claims."""

from __future__ import annotations

from penstock.protocol.api_key import Permission, check_name, check_patterns
from penstock.protocol.checks import CONTROL, MAX_IDS, check_seconds, read_cursor, read_ids, read_limit
from penstock.protocol.errors import InvalidParams
from penstock.protocol.tenant import read_tenant
from penstock.tasks.commands import CreateKey, ListRejected
from penstock.tasks.params import (
    DlqPurgeParams,
    DlqReplayParams,
    KeysCreateParams,
    RejectedPurgeParams,
    RejectedRetryParams,
)

MESSAGE_ID_MAX_CHARS = 100


def read_which_rejected(given: RejectedRetryParams | RejectedPurgeParams) -> list[int] | ListRejected:
    if (given.ids is None) == (given.limit is None):
        raise InvalidParams("ids", "or limit must be given, not both")
    if given.ids is None:
        assert given.limit is not None
        return ListRejected(read_limit(given.limit), read_cursor(given.cursor), given.source)
    for name in ("cursor", "source"):
        if getattr(given, name) is not None:
            raise InvalidParams(name, "goes with limit, not with ids")
    return read_ids(given.ids)


def read_which_dead(given: DlqReplayParams | DlqPurgeParams) -> list[str] | int:
    if (given.ids is None) == (given.limit is None):
        raise InvalidParams("ids", "or limit must be given, not both")
    if given.ids is None:
        assert given.limit is not None
        return read_limit(given.limit)
    if not 1 <= len(given.ids) <= MAX_IDS:
        raise InvalidParams("ids", f"must hold 1 to {MAX_IDS} ids, not {len(given.ids)}")
    return [read_message_id(value, f"ids[{position}]") for position, value in enumerate(given.ids)]


def read_message_id(value: str, name: str) -> str:
    if not 1 <= len(value) <= MESSAGE_ID_MAX_CHARS or CONTROL.search(value):
        raise InvalidParams(name, f"must be a message's id, of 1 to {MESSAGE_ID_MAX_CHARS} characters")
    return value


def read_new_key(given: KeysCreateParams) -> CreateKey:
    try:
        name = check_name(given.name)
    except ValueError as exc:
        raise InvalidParams("name", str(exc)) from None
    if not given.permissions:
        raise InvalidParams("permissions", f"must hold at least one of {', '.join(Permission)}")
    check_seconds(given.expires_in, "expires_in")
    try:
        actions = check_patterns(given.actions)
    except ValueError as exc:
        raise InvalidParams("actions", str(exc)) from None
    return CreateKey(name, given.permissions, given.expires_in, read_tenant(given.tenant), actions)
