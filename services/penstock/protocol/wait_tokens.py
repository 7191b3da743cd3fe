"""Tokens of waits, and digests of answers. A token that Penstock makes names its attempt."""

from __future__ import annotations

import hashlib
import json
import re
import secrets

from penstock.protocol.requests import ClaimId, parse_claim_id
from penstock.protocol.tenant import stored_key

_MADE = re.compile(r"wait:([0-9]{1,19}:[0-9]{1,19}):[A-Za-z0-9_-]{22}")


def make_token(task_id: int, claim: int) -> str:
    """A token of one attempt with 128 random bits, in characters that need no escape in a URL."""
    return f"wait:{task_id}:{claim}:{secrets.token_urlsafe(16)}"


def claim_of_token(token: str) -> ClaimId | None:
    """The attempt of a token; None for one that a handler chose."""
    match = _MADE.fullmatch(token)
    return None if match is None else parse_claim_id(match[1])


def stored_token(token: str, tenant: str | None) -> str:
    """A token as it is stored: one that a handler chose is prefixed with the tenant of its task."""
    return token if claim_of_token(token) is not None else stored_key(tenant, token)


def digest_of(answer: str) -> bytes:
    """SHA-256 of an answer, regardless of the order of members and white space."""
    try:
        text = json.dumps(json.loads(f"{{{answer}}}"), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # such as a number of 5,000 digits, which is compared as text
        text = answer
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
