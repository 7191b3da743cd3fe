"""Encryption (decisions/027): AES-256-GCM with a derived key a value; its text names the parent by a fingerprint.

The associated data (AAD: what the value belongs to) is authenticated, so a ciphertext moved to another place does not
decrypt there. Values of a tenant have a format of their own, and decrypt only with the tenant in the AAD.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.protocol.errors import PayloadLost, PayloadUnavailable, needing
from penstock.settings.payload_texts import fingerprint, read_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_MAGIC = b"PSK1"
_TENANT_MAGIC = b"PSK2"  # of values of a tenant
_SALT_BYTES = 28
_HEAD_BYTES = len(_MAGIC) + _SALT_BYTES
_NONCE = bytes(12)  # a derived key encrypts one value


class TenantAad(NamedTuple):
    """Associated data of a tenant's value. older: that of a value written without the tenant."""

    text: str
    older: str


class Cipher:
    """Encrypts with the first key and decrypts with any. keys: by fingerprint. Raises SettingsError without library."""

    def __init__(self, keys: Sequence[str], *, binds_tenants: bool) -> None:
        with needing("PENSTOCK_PAYLOAD_KEYS", "encryption"):
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        self._invalid = InvalidTag
        read = [read_key(text) for text in keys]
        self._make = AESGCM
        self._binds_tenants = binds_tenants
        self.keys = {fingerprint(key): key for key in read}
        self.key_id = fingerprint(read[0])

    def encrypt(self, data: bytes, aad: str | TenantAad) -> bytes:
        """Return magic, salt and ciphertext."""
        salt = os.urandom(_SALT_BYTES)
        key = self.keys[self.key_id]
        if isinstance(aad, str) or not self._binds_tenants:
            text = aad if isinstance(aad, str) else aad.older
            return _MAGIC + salt + self._derived(key, salt).encrypt(_NONCE, data, text.encode())
        head = _TENANT_MAGIC + salt
        return head + self._derived(key, head).encrypt(_NONCE, data, aad.text.encode())

    def _derived(self, key: bytes, salt: bytes) -> AESGCM:
        return self._make(hmac.digest(key, salt, "sha256"))

    def decrypt(self, key_id: str, data: bytes, aad: str | TenantAad) -> bytes:
        """Raises PayloadUnavailable for an unknown key, PayloadLost for changed data or other associated data."""
        key = self.keys.get(key_id)
        if key is None:
            raise missing_key(key_id)
        text, older = (aad, aad) if isinstance(aad, str) else aad
        head, sealed = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
        with suppress(self._invalid, ValueError):
            if head.startswith(_TENANT_MAGIC):
                return self._derived(key, head).decrypt(_NONCE, sealed, text.encode())
            if head.startswith(_MAGIC):
                return self._derived(key, head[len(_MAGIC) :]).decrypt(_NONCE, sealed, older.encode())
        raise PayloadLost(
            f"what is encrypted with key {key_id} was changed, or belongs to something else: it does not open"
        )


def missing_key(key_id: str) -> PayloadUnavailable:
    return PayloadUnavailable(
        f"it is encrypted with key {key_id}, which this process does not have: add it to PENSTOCK_PAYLOAD_KEYS"
    )
