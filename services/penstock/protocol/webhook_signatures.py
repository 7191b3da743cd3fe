"""Signatures of HTTP requests by Standard Webhooks 1.0.0 (standardwebhooks.com)."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

_PREFIX = "whsec_"


def signing_key(secret: str) -> bytes:
    """The base64 behind ``whsec_`` decoded, or else the secret itself. Raises ValueError for invalid base64."""
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a secret that begins with whsec_ must go on with base64") from None


def signature_headers(secrets: Iterable[str], *, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """secrets: any one of them verifies the request. timestamp: epoch seconds."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    digests = (hmac.digest(signing_key(secret), signed, hashlib.sha256) for secret in secrets)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join("v1," + base64.b64encode(digest).decode() for digest in digests),
    }
