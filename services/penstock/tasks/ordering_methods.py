"""The methods about ordering keys and claims."""

from typing import Annotated

import msgspec

from penstock.db.context import Context
from penstock.protocol.api_key import Permission
from penstock.protocol.checks import MAX_IDS
from penstock.protocol.errors import InvalidParams
from penstock.protocol.method import Scope, method
from penstock.protocol.requests import ClaimId, parse_claim_id
from penstock.protocol.tenant import stored_key
from penstock.protocol.views import NEXT_CURSOR, about
from penstock.tasks import ordering, settle
from penstock.tasks.params import ClaimsCheckParams, OrderingListParams, OrderingReleaseParams


class HeldKeys(msgspec.Struct, frozen=True):
    keys: list[ordering.HeldKey]
    cursor: Annotated[str | None, NEXT_CURSOR]


@method("ordering.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_held_keys(context: Context, page: OrderingListParams) -> HeldKeys:
    """List ordering keys that a task in CRITICAL_ERROR holds, by key."""
    async with context.session() as session:
        keys = await ordering.list_held_keys(session, page.limit, page.cursor)
    return HeldKeys(keys, stored_key(keys[-1].tenant, keys[-1].key) if len(keys) == page.limit else None)


class ReleasedKey(msgspec.Struct, frozen=True):
    key: str
    released: Annotated[bool, about("False: it was not held, and nothing was changed.")]
    next: Annotated[int | None, about("The task that waited longest and may run now; null when none did.")]


@method("ordering.release", permission=Permission.ADMIN, scope=Scope.CLOSED)
async def release_key(context: Context, given: OrderingReleaseParams) -> ReleasedKey:
    """Let a held ordering key go: the next task of the key may run."""
    key = stored_key(given.tenant, given.key)
    async with context.transaction() as session:
        released = await ordering.release_keys(session, [key])
    context.wake()
    return ReleasedKey(given.key, key in released, released.get(key))


class CheckedClaims(msgspec.Struct, frozen=True):
    lost: Annotated[
        list[str], about("Claims that no longer hold their task: it was cancelled, settled, or claimed again.")
    ]


def _read_claims(given: ClaimsCheckParams) -> dict[str, ClaimId]:
    """Claims by the ids that were given, with a token or without one."""
    if not 1 <= len(given.claims) <= MAX_IDS:
        raise InvalidParams("claims", f"must hold 1 to {MAX_IDS} claims, not {len(given.claims)}")
    claims = {}
    for position, text in enumerate(given.claims):
        claim = parse_claim_id(text)
        if claim is None:
            raise InvalidParams(f"claims[{position}]", f"must be <task id>:<claim>, not {text[:60]!r}")
        claims[text] = claim
    return claims


@method("claims.check", permission=Permission.WORKER, scope=Scope.CLOSED, read=_read_claims)
async def check_claims(context: Context, claims: dict[str, ClaimId]) -> CheckedClaims:
    """Return which of a worker's claims no longer hold their task."""
    async with context.session() as session:
        held = await settle.read_attempts(session, claims.values())
    return CheckedClaims([text for text, claim in claims.items() if claim not in held])
