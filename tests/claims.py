"""Claim ids as schedulers make them, in databases of tests, whose key is known."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.fence import ClaimKey, Fence
from penstock.protocol.message_attributes import name_pack

CLAIM_SECRET = b"the key of claim ids in each test"[:32]
_FENCE = Fence([ClaimKey(CLAIM_SECRET)])


def use_known_key(server: EmbeddedPostgres, database: str, schema: str = "penstock") -> None:
    """Have a migrated database make the claim ids of ``claim_id``."""
    server.execute(f"update {schema}.claim_key set secret = '\\x{CLAIM_SECRET.hex()}'", database=database)


def pack_id(claim: int, task_ids: Sequence[int]) -> str:
    plain = name_pack(claim, task_ids)
    assert plain is not None
    return _FENCE.sign(plain)


def claim_id(task_id: int, claim: int) -> str:
    return _FENCE.name(task_id, claim)
