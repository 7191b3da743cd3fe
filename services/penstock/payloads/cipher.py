"""Encryption of texts: AES-256-GCM with a key of each value's own, derived from one that the text names by fingerprint.

The bound text (what the value belongs to) is authenticated with it, so a ciphertext that is moved to another place
does not open there. The derived key is HMAC-SHA256 of a random salt of 28 bytes, so a key does not wear out: random
nonces of 12 bytes under the key itself would allow only 2^32 values.

What belongs to a tenant has a format of its own, whose magic is part of what the key is derived from: it opens with the
tenant in the bound text alone, and never as a value of an older format, which names no tenant.
"""

from __future__ import annotations

import binascii
import hmac
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.protocol.errors import PayloadLost, PayloadUnavailable, SettingsError
from penstock.protocol.sealed import Sealed
from penstock.settings.payload_values import fingerprint, read_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_MAGIC = b"PSK1"
_TENANT_MAGIC = b"PSK2"  # of what is bound to a tenant
_SALT_BYTES = 28
_HEAD_BYTES = len(_MAGIC) + _SALT_BYTES
_NONCE = bytes(12)  # a derived key encrypts one value
_OLD_NONCE_BYTES = 12  # of a value without the magic: a random nonce, under the key itself


class Bound(NamedTuple):
    """What a tenant's value belongs to. older: what one belongs to that was written without the tenant."""

    text: str
    older: str


class Cipher:
    """Some keys, of which the first encrypts and all decrypt. Raises SettingsError where the library is missing."""

    def __init__(self, keys: Sequence[str]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as exc:
            raise SettingsError(
                'cryptography, which PENSTOCK_PAYLOAD_KEYS needs, is not installed: pip install "penstock[encryption]"'
            ) from exc
        self._invalid = InvalidTag
        read = [read_key(text) for text in keys]
        self._make = AESGCM
        self._keys: dict[str, bytes] = {fingerprint(key): key for key in read}
        self.key_id = fingerprint(read[0])

    def knows(self, key_id: str) -> bool:
        return key_id in self._keys

    def encrypt(self, data: bytes, bound: str | Bound) -> bytes:
        """Magic, salt and ciphertext, by the first key."""
        salt = os.urandom(_SALT_BYTES)
        key = self._keys[self.key_id]
        if isinstance(bound, str):
            return _MAGIC + salt + self._derived(key, salt).encrypt(_NONCE, data, bound.encode())
        head = _TENANT_MAGIC + salt
        return head + self._derived(key, head).encrypt(_NONCE, data, bound.text.encode())

    def _derived(self, key: bytes, salt: bytes) -> AESGCM:
        return self._make(hmac.digest(key, salt, "sha256"))

    def decrypt(self, key_id: str, data: bytes, bound: str | Bound) -> bytes:
        """Raises PayloadUnavailable for a key that is not here, PayloadLost for what does not belong here."""
        key = self._keys.get(key_id)
        if key is None:
            raise missing_key(key_id)
        text, older = (bound, bound) if isinstance(bound, str) else bound
        if data.startswith((_MAGIC, _TENANT_MAGIC)):
            is_tenants = data.startswith(_TENANT_MAGIC)
            derived = self._derived(key, data[0 if is_tenants else len(_MAGIC) : _HEAD_BYTES])
            try:
                return derived.decrypt(_NONCE, data[_HEAD_BYTES:], (text if is_tenants else older).encode())
            except (self._invalid, ValueError):
                pass  # a random nonce of an older value begins like a magic once in 2^31
        try:
            return self._make(key).decrypt(data[:_OLD_NONCE_BYTES], data[_OLD_NONCE_BYTES:], older.encode())
        except (self._invalid, ValueError):
            raise PayloadLost(
                f"what is encrypted with key {key_id} was changed, or belongs to something else: it does not open"
            ) from None

    def seal(self, text: str, bound: str | Bound) -> Sealed:
        return Sealed(self.key_id, binascii.b2a_base64(self.encrypt(text.encode(), bound), newline=False).decode())

    def unseal(self, sealed: Sealed, bound: str | Bound) -> str:
        """Raises as decrypt."""
        try:
            data = binascii.a2b_base64(sealed.data, strict_mode=True)
        except (binascii.Error, ValueError):
            raise PayloadLost(f"what is encrypted with key {sealed.key_id} is no base64: it was changed") from None
        return self.decrypt(sealed.key_id, data, bound).decode()


def missing_key(key_id: str) -> PayloadUnavailable:
    return PayloadUnavailable(
        f"it is encrypted with key {key_id}, which this process does not have: add it to PENSTOCK_PAYLOAD_KEYS"
    )
