"""API keys: permissions, digests of secrets, entries of PENSTOCK_API_KEYS; what the caller in hand is limited to."""

import hashlib
import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from penstock.protocol.checks import CONTROL, check_chars
from penstock.protocol.errors import AccessDenied, InvalidParams
from penstock.protocol.task import ACTION_MAX_CHARS, BUILT_IN_ACTIONS
from penstock.protocol.tenant import read_tenant

SECRET_PREFIX = "pstk_"  # lets scanners for leaked secrets find one
PREFIX_CHARS = 13  # of a secret are stored in clear, to identify keys: 48 of its 256 random bits
NAME_MAX_CHARS = 100
PATTERNS_MAX = 100
PLAIN_MIN_CHARS = 16  # of a plain key in PENSTOCK_API_KEYS; a shorter one can be guessed


class Permission(StrEnum):
    """enqueue: add tasks. read: look at everything. admin: that, and change or delete anything.

    worker: ask which tasks were cancelled, as workers do. scaling: read the figures for autoscaling. read implies both.
    """

    ENQUEUE = "enqueue"
    READ = "read"
    ADMIN = "admin"
    WORKER = "worker"
    SCALING = "scaling"


ALL_PERMISSIONS = frozenset(Permission)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """id: None for a key of the settings. tenant: that it is bound to. actions: patterns; None: see ``may_enqueue``."""

    name: str
    digest: bytes = field(repr=False)
    permissions: frozenset[Permission]
    id: int | None = None
    tenant: str | None = None
    actions: tuple[str, ...] | None = None


def implied(permissions: Iterable[str]) -> frozenset[Permission]:
    """These permissions and those that they imply. Raises ValueError for an unknown one."""
    given = frozenset(map(Permission, permissions))
    if Permission.ADMIN in given:
        return ALL_PERMISSIONS
    return given | {Permission.WORKER, Permission.SCALING} if Permission.READ in given else given


def may_enqueue(action: str, patterns: Iterable[str] | None, tenant: str | None) -> bool:
    """Whether a key with these patterns, names or prefixes with ``*``, may enqueue the action.

    Without patterns it may, unless a key bound to a tenant asks for a delivery, which has the rights of the workers.
    """
    if patterns is None:
        return tenant is None or action not in BUILT_IN_ACTIONS
    return is_covered(action, patterns)


def is_covered(pattern: str, by: Iterable[str]) -> bool:
    """Whether one of the patterns matches every action that this one does."""
    return any(pattern.startswith(one[:-1]) if one.endswith("*") else pattern == one for one in by)


def check_patterns(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Patterns of actions, stripped. Raises InvalidParams."""
    if patterns is None:
        return None
    found = tuple(one.strip() for one in patterns)
    for one in found:
        name = one.removesuffix("*")
        if not one or "*" in name or len(one) > ACTION_MAX_CHARS or CONTROL.search(one):
            form = "actions such as mail.send, or mail.* for all that begin so"
            raise InvalidParams("actions", f"must be {form}, not {one[:60]!r}")
    if not found or len(found) > PATTERNS_MAX:
        raise InvalidParams("actions", f"must be 1 to {PATTERNS_MAX} patterns, not {len(found)}")
    return found


def digest_of(secret: bytes) -> bytes:
    """SHA-256 of a secret, which is all that is stored. For random secrets only; see docs/decisions/009."""
    return hashlib.sha256(secret).digest()


def new_secret() -> str:
    return SECRET_PREFIX + secrets.token_urlsafe(32)


def check_name(name: str) -> str:
    """A name, stripped. Raises InvalidParams."""
    name = name.strip()
    check_chars(name, "name", max_chars=NAME_MAX_CHARS)
    return name


def parse_entry(entry: str, position: int) -> ApiKey:
    """An entry of PENSTOCK_API_KEYS: a plain key, or ``name:permissions:sha256[:tenant[:actions]]``, joined by +.

    A colon makes it the second form: a misspelt digest, which is no secret, must not become a plain key. Raises
    ValueError, whose text names the position and never the entry.
    """
    if ":" not in entry:
        return ApiKey(f"entry {position}", digest_of(entry.encode("utf-8")), ALL_PERMISSIONS)
    parts = entry.split(":", 4)
    if len(parts) < 3:
        raise ValueError(f"entry {position} must be a key without colons, or name:permissions:sha256")
    name, permissions, digest, *bound = parts
    try:
        name = check_name(name)
        tenant = read_tenant(bound[0].strip()) if bound and (bound[0].strip() or len(bound) == 1) else None
        actions = check_patterns(bound[1].split("+")) if len(bound) > 1 else None
    except InvalidParams as exc:
        raise ValueError(f"entry {position}: its {exc.data['field']} {exc.data['problem']}") from None
    try:
        allowed = implied(part.strip() for part in permissions.split("+"))
    except ValueError:
        raise ValueError(f"entry {position}: its permissions must be of {', '.join(Permission)}, joined by +") from None
    if not re.fullmatch("[0-9a-fA-F]{64}", digest.strip()):
        raise ValueError(f"entry {position}: behind its second colon must stand the 64 digits of the key's SHA-256")
    return ApiKey(name, bytes.fromhex(digest.strip()), allowed, tenant=tenant, actions=actions)


def parse_entries(entries: Iterable[str]) -> tuple[ApiKey, ...]:
    """The keys of PENSTOCK_API_KEYS. Raises ValueError naming the position of every invalid or short entry."""
    keys: list[ApiKey] = []
    places: dict[bytes, int] = {}
    problems = []
    for position, entry in enumerate(entries, 1):
        try:
            if ":" not in entry and len(entry) < PLAIN_MIN_CHARS:
                need = f"it needs {PLAIN_MIN_CHARS} or more, such as openssl rand -hex 32 prints"
                raise ValueError(f"entry {position} is a key of {len(entry)} characters, which can be guessed; {need}")
            key = parse_entry(entry, position)
            if places.setdefault(key.digest, position) != position:
                raise ValueError(f"entry {position} is the key of entry {places[key.digest]} again")
            keys.append(key)
        except ValueError as exc:
            problems.append(str(exc))
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(keys)


_bound: ContextVar[tuple[str | None, tuple[str, ...] | None]] = ContextVar("bound", default=(None, None))


def bind(tenant: str | None, actions: tuple[str, ...] | None = None) -> None:
    """Remember what the key of the request in hand is limited to: a tenant, and patterns of actions to enqueue."""
    _bound.set((tenant, actions))


def bound_to() -> str | None:
    """The tenant that the caller is bound to; None: to no tenant."""
    return _bound.get()[0]


def actions_of_caller() -> tuple[str, ...] | None:
    """Patterns of the actions that the caller may enqueue; None: all."""
    return _bound.get()[1]


def check_actions(actions: Collection[str]) -> None:
    bound, patterns = _bound.get()
    if bound is None and patterns is None:
        return
    refused = sorted(action for action in actions if not may_enqueue(action, patterns, bound))
    if refused:
        may = "no built-in action" if patterns is None else ", ".join(patterns) + " alone"
        message = f"Not permitted: this API key may not enqueue {refused[0]!r}; it may enqueue {may}"
        raise AccessDenied(403, message, {"actions": refused[:10]})


def own_tenant(given: str | None) -> str | None:
    """The tenant that the caller means: the one that it is bound to, or any. Raises InvalidParams for another one."""
    bound = bound_to()
    if bound is not None and given not in (None, bound):
        raise InvalidParams("tenant", f"must be {bound!r}, to which this API key is bound, not {given!r}")
    return given if bound is None else bound


def narrow_tenant(command: Any) -> Any:
    """A command with a ``tenant``, limited to the caller's. Raises InvalidParams."""
    change = msgspec.structs.replace if isinstance(command, msgspec.Struct) else replace
    return change(command, tenant=own_tenant(command.tenant))


def sees(tenant: str | None) -> bool:
    bound = bound_to()
    return bound is None or tenant == bound


def seen(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if sees(row["tenant"])]
