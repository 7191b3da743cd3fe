"""The texts of the settings of payloads, keys and a bucket; without pydantic, which takes long to load."""

import base64
import hashlib
import re
import secrets
from urllib.parse import urlsplit

KEY_BYTES = 32


def parse_bucket_url(url: str) -> tuple[str, str]:
    """``s3://bucket/prefix`` as the bucket and the prefix, which is empty or ends with a slash. Raises ValueError."""
    parts = urlsplit(url)
    is_name = re.fullmatch("[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc)
    if parts.scheme != "s3" or not is_name or parts.query or parts.fragment:
        raise ValueError(f"must be s3://bucket or s3://bucket/prefix, not {url[:100]!r}")
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""


def new_key() -> str:
    """A key as ``PENSTOCK_PAYLOAD_KEYS`` takes it."""
    return base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def read_key(text: str) -> bytes:
    """Raises ValueError, which does not repeat the text."""
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError("a key is 32 bytes in base64; `penstock payload-key` makes one")
    return key


def fingerprint(key: bytes) -> str:
    """The id of a key, by which ciphertexts name it; it says nothing about the key."""
    return hashlib.sha256(b"penstock payload key\0" + key).hexdigest()[:16]
