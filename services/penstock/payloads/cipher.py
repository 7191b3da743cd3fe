"""Encryption of texts: AES-256-GCM, with a key that the text names by its fingerprint.

The bound text (what the value belongs to) is authenticated with it, so a ciphertext that is moved to another place
does not open there. The nonce is random: one key is good for four thousand million values.
"""

from __future__ import annotations

import binascii
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import PayloadLost, PayloadUnavailable, SettingsError
from penstock.settings.payload_values import fingerprint, read_key
from penstock.wire import Sealed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12


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
        self._ciphers: dict[str, AESGCM] = {fingerprint(key): AESGCM(key) for key in read}
        self.key_id = fingerprint(read[0])

    def knows(self, key_id: str) -> bool:
        return key_id in self._ciphers

    def encrypt(self, data: bytes, bound: str) -> bytes:
        """Nonce and ciphertext, by the first key."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._ciphers[self.key_id].encrypt(nonce, data, bound.encode())

    def decrypt(self, key_id: str, data: bytes, bound: str) -> bytes:
        """Raises PayloadUnavailable for a key that is not here, PayloadLost for what does not belong here."""
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise missing_key(key_id)
        try:
            return cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], bound.encode())
        except (self._invalid, ValueError):
            raise PayloadLost(
                f"what is encrypted with key {key_id} was changed, or belongs to something else: it does not open"
            ) from None

    def seal(self, text: str, bound: str) -> Sealed:
        return Sealed(self.key_id, binascii.b2a_base64(self.encrypt(text.encode(), bound), newline=False).decode())

    def unseal(self, sealed: Sealed, bound: str) -> str:
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
