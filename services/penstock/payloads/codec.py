"""Encode texts before they are stored or sent, and decode them where they are used.

A text over the threshold is stored as an object, encrypted if keys are set; a smaller one is encrypted inline, or
unchanged without keys. Nothing is cached: a decoded text belongs to one attempt.

Encryption (decisions/027) is AES-256-GCM with a derived key a value; its text names the parent by a fingerprint. The
associated data (AAD: what the value belongs to) is authenticated, so a ciphertext moved to another place does not
decrypt there. Values of a tenant have a format of their own, and decrypt only with the tenant in the AAD.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import hmac
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.payloads.bucket import OFFERED, Bucket, folder_of, new_name
from penstock.protocol.errors import PayloadLost, PayloadUnavailable, needing
from penstock.protocol.json_text import utf8_size
from penstock.protocol.sealed import Reference, Sealed, decode_sealed, encode_reference, encode_sealed, is_sealed
from penstock.settings.payload_texts import fingerprint, read_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from penstock.settings.model import Settings

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
        self._make = AESGCM
        self._binds_tenants = binds_tenants
        self.keys = {fingerprint(key): key for key in map(read_key, keys)}
        self.key_id = next(iter(self.keys))

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
        problem = "was changed, or belongs to something else: it does not open"
        raise PayloadLost(f"what is encrypted with key {key_id} {problem}")


def missing_key(key_id: str) -> PayloadUnavailable:
    return PayloadUnavailable(
        f"it is encrypted with key {key_id}, which this process does not have: add it to PENSTOCK_PAYLOAD_KEYS"
    )


def payload_aad(action: str, tenant: str | None) -> str | TenantAad:
    """Associated data of a payload; its task has no id yet when it is encoded."""
    older = f"payload\0{action}"
    return older if tenant is None else TenantAad(f"payload\0{tenant}\0{action}", older)


def offered_aad(action: str, tenant: str | None) -> str:
    """Associated data of a payload that a client encoded; a stored payload never has it."""
    return f"offered\0{tenant or ''}\0{action}"


def aad_of(kind: Literal["result", "error", "output", "spawn", "step", "options", "answer"], *of: int | str) -> str:
    """Associated data of what a task gives out, by its id; error: of a progress note, too.

    step: a durable step's result or error, by task, name and repetition. options: those that a workflow's step, by
    workflow and number, keeps for its children. answer: one that came before its task waits, by token.
    """
    return "\0".join([kind, *map(str, of)])


class PayloadCodec:
    """Encrypts or offloads texts by the settings; None: encodes nothing, and decodes plain texts only."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._cipher: Cipher | None = None
        if settings is not None and settings.payload_keys:
            keys = [key.get_secret_value() for key in settings.payload_keys]
            self._cipher = Cipher(keys, binds_tenants=settings.payload_bind_tenants)
        self.bucket: Bucket | None = None
        self.threshold_bytes = 0
        self._own_folder = ""
        if settings is not None and settings.payload_bucket is not None:
            self.bucket = Bucket(
                settings.payload_bucket, endpoint_url=settings.payload_s3_endpoint_url, region=settings.aws_region
            )
            self.threshold_bytes = settings.payload_threshold_bytes
            self._own_folder = folder_of(settings.outbound_queue)
        self._calls = asyncio.Semaphore(16)  # bounds memory and connections
        self.taking = asyncio.Semaphore(4)  # for payloads that are loaded and stored again, each held in between

    @property
    def is_on(self) -> bool:
        """Whether any text is encoded: keys or a bucket are set."""
        return self._cipher is not None or self.bucket is not None

    @property
    def encrypts(self) -> bool:
        return self._cipher is not None

    def is_large(self, text: str) -> bool:
        """Whether a text is stored as an object."""
        return self.bucket is not None and not is_sealed(text) and utf8_size(text) > self.threshold_bytes

    def encode(self, text: str, aad: str | TenantAad) -> str:
        """Encode a text inline; one that is already encoded is returned unchanged."""
        if self._cipher is None:
            return text
        plain = decode_sealed(text)
        if not isinstance(plain, str):
            return text
        data = self._cipher.encrypt(plain.encode(), aad)
        return encode_sealed(Sealed(self._cipher.key_id, binascii.b2a_base64(data, newline=False).decode()))

    def decode_inline(self, text: str, aad: str | TenantAad) -> str:
        """Decode a text that was encoded inline. Raises PayloadUnavailable (also for an object), PayloadLost."""
        found = _decoded(text)
        if isinstance(found, Reference):
            raise PayloadUnavailable(f"{found.size} bytes, stored as an object: too large to show here")
        return self._decrypted(found, aad)

    async def store(self, text: str, aad: str | TenantAad, *, queue: str | None = None) -> str:
        """Encode a text, a large one as an object of the task's queue, by name or URL. Raises PayloadUnavailable."""
        return await self._kept(text, aad, self._own_folder if queue is None else folder_of(queue))

    async def offer(self, text: str, aad: str | TenantAad) -> str:
        """Encode a text for a message; its receiver owns the object. Raises PayloadUnavailable."""
        return await self._kept(text, aad, OFFERED)

    async def load(self, text: str, aad: str | TenantAad) -> str:
        """Decode a text, fetching its object if it has one. Raises PayloadUnavailable, PayloadLost."""
        found = _decoded(text)
        if not isinstance(found, Reference):
            return self._decrypted(found, aad)
        if self.bucket is None:
            raise PayloadUnavailable(
                "it is stored as an object, and this process has no bucket: set PENSTOCK_PAYLOAD_BUCKET"
            )
        if found.key_id is not None and (self._cipher is None or found.key_id not in self._cipher.keys):
            raise missing_key(found.key_id)  # before megabytes are fetched in vain
        with counted("get") as count_bytes:
            async with self._calls:
                data = await self.bucket.get(found.name, found.size + 64)  # bytes of encryption
        count_bytes(len(data))
        if hashlib.sha256(data).hexdigest() != found.digest:
            raise PayloadLost(f"its object {found.name} is not what was stored: it was changed")
        if found.key_id is not None and self._cipher is not None:
            data = self._cipher.decrypt(found.key_id, data, aad)
        return _text_of(data)

    async def close(self) -> None:
        if self.bucket is not None:
            await self.bucket.close()

    async def _kept(self, text: str, aad: str | TenantAad, folder: str) -> str:
        if self.bucket is None or not self.is_large(text):
            return self.encode(text, aad)
        plain = text.encode()
        data = plain if self._cipher is None else self._cipher.encrypt(plain, aad)
        name = new_name(folder)
        with counted("put") as count_bytes:
            async with self._calls:
                await self.bucket.put(name, data)
        count_bytes(len(data))
        key_id = None if self._cipher is None else self._cipher.key_id
        return encode_reference(Reference(name, key_id, len(plain), hashlib.sha256(data).hexdigest()))

    def _decrypted(self, found: str | Sealed, aad: str | TenantAad) -> str:
        if isinstance(found, str):
            return found
        if self._cipher is None:
            raise missing_key(found.key_id)
        try:
            data = binascii.a2b_base64(found.data, strict_mode=True)
        except (binascii.Error, ValueError):
            raise PayloadLost(f"what is encrypted with key {found.key_id} is no base64: it was changed") from None
        return _text_of(self._cipher.decrypt(found.key_id, data, aad))


def _text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise PayloadLost("the stored data is not valid UTF-8") from None


def _decoded(text: str) -> str | Sealed | Reference:
    try:
        return decode_sealed(text)
    except ValueError as exc:
        raise PayloadLost(str(exc)) from None


@contextmanager
def counted(operation: str) -> Iterator[Callable[[int], None]]:
    """Count a call to S3 by outcome; yields a function that counts its bytes."""
    with needing("PENSTOCK_PAYLOAD_BUCKET", "worker"):
        from penstock.runtime import metrics  # here, since a program that only enqueues has no library of metrics

    outcome = "away"
    try:
        yield metrics.PAYLOAD_BYTES.labels(operation).inc
        outcome = "ok"
    except PayloadLost:
        outcome = "lost"
        raise
    finally:
        metrics.PAYLOAD_OBJECTS.labels(operation, outcome).inc()
