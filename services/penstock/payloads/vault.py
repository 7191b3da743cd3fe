"""The vault: texts are sealed before they are stored or sent, and opened where they are used.

A text that is larger than the threshold becomes an object, encrypted where there are keys; a smaller one is encrypted
in its place, or stays as it is where there are none. Nothing is cached: what is opened belongs to one attempt.
"""

from __future__ import annotations

import asyncio
import hashlib

from penstock.payloads.bucket import Bucket, new_name
from penstock.payloads.cipher import Bound, Cipher, missing_key
from penstock.protocol.errors import PayloadLost, PayloadUnavailable, SettingsError
from penstock.protocol.json_text import utf8_size
from penstock.protocol.sealed import Reference, Sealed, decode_sealed, encode_reference, encode_sealed, is_sealed
from penstock.runtime import metrics
from penstock.settings.model import Settings

_AT_ONCE = 16  # objects on their way, so that memory and connections are bounded
_OVERHEAD_BYTES = 64  # of encryption


def payload_bound(action: str, tenant: str | None) -> str | Bound:
    """What a payload belongs to; its task has no id yet when it is sealed."""
    older = f"payload\0{action}"
    return older if tenant is None else Bound(f"payload\0{tenant}\0{action}", older)


def offered_bound(action: str, tenant: str | None) -> str:
    """What a payload belongs to that a client has sealed, until it is taken in: never what a stored one belongs to."""
    return f"offered\0{tenant or ''}\0{action}"


def options_bound(workflow_id: int, number: int) -> str:
    """Of what a step of a workflow keeps for its children."""
    return f"options\0{workflow_id}\0{number}"


def result_bound(task_id: int) -> str:
    return f"result\0{task_id}"


def error_bound(task_id: int) -> str:
    """Of an error, and of what a handler reports as progress."""
    return f"error\0{task_id}"


def spawn_bound(task_id: int) -> str:
    """Of the tasks that come with a result."""
    return f"spawn\0{task_id}"


def answer_bound(token: str) -> str:
    """Of an answer that came before anybody waits for it."""
    return f"answer\0{token}"


class Vault:
    """Seals and opens by the settings, by none at all: then it changes nothing, and opens what is not sealed."""

    def __init__(self, settings: Settings | None = None) -> None:
        keys = () if settings is None else settings.payload_keys
        self._cipher = Cipher([key.get_secret_value() for key in keys]) if keys else None
        self._binds_tenants = settings is None or settings.payload_bind_tenants
        self.bucket: Bucket | None = None
        self.threshold_bytes = 0
        if settings is not None and settings.payload_bucket is not None:
            self.bucket = Bucket(
                settings.payload_bucket, endpoint_url=settings.payload_s3_endpoint_url, region=settings.aws_region
            )
            self.threshold_bytes = settings.payload_threshold_bytes
        self._turns = asyncio.Semaphore(_AT_ONCE)

    @property
    def is_on(self) -> bool:
        """Whether anything is ever sealed here."""
        return self._cipher is not None or self.bucket is not None

    @property
    def encrypts(self) -> bool:
        return self._cipher is not None

    def is_large(self, text: str) -> bool:
        """Whether a text is to become an object."""
        return self.bucket is not None and not is_sealed(text) and utf8_size(text) > self.threshold_bytes

    def seal(self, text: str, bound: str | Bound) -> str:
        """The text as it is stored in its place; one that is sealed already stays."""
        if self._cipher is None:
            return text
        plain = decode_sealed(text)
        return encode_sealed(self._cipher.seal(plain, self._written(bound))) if isinstance(plain, str) else text

    def unseal(self, text: str, bound: str | Bound) -> str:
        """The text that was sealed in its place. Raises PayloadUnavailable, PayloadLost; for an object too."""
        found = _decoded(text)
        if isinstance(found, Reference):
            raise PayloadUnavailable(f"{found.size} bytes, kept as an object: too large to show here")
        return self._unsealed(found, bound)

    async def keep(self, text: str, bound: str | Bound) -> str:
        """The text as it is stored, an object where it is large. Raises PayloadUnavailable."""
        return await self._store(text, bound) if self.is_large(text) else self.seal(text, bound)

    async def offer(self, text: str, bound: str | Bound) -> str:
        """As ``keep``, for whoever takes the message in: the object is theirs to take."""
        return await self._store(text, bound, offered=True) if self.is_large(text) else self.seal(text, bound)

    async def open(self, text: str, bound: str | Bound) -> str:
        """The text that was sealed. Raises PayloadUnavailable, PayloadLost."""
        found = _decoded(text)
        if not isinstance(found, Reference):
            return self._unsealed(found, bound)
        if self.bucket is None:
            raise PayloadUnavailable(
                "it is kept as an object, and this process has no bucket: set PENSTOCK_PAYLOAD_BUCKET"
            )
        if found.key_id is not None and (self._cipher is None or not self._cipher.knows(found.key_id)):
            raise missing_key(found.key_id)  # before megabytes are fetched for nothing
        with _counted("get"):
            async with self._turns:
                data = await self.bucket.get(found.name, found.size + _OVERHEAD_BYTES)
        metrics.PAYLOAD_BYTES.labels("get").inc(len(data))
        if hashlib.sha256(data).hexdigest() != found.digest:
            raise PayloadLost(f"its object {found.name} is not what was stored: it was changed")
        if found.key_id is not None:
            assert self._cipher is not None
            data = self._cipher.decrypt(found.key_id, data, bound)
        return data.decode()

    async def close(self) -> None:
        if self.bucket is not None:
            await self.bucket.close()

    async def _store(self, text: str, bound: str | Bound, *, offered: bool = False) -> str:
        if self.bucket is None:
            raise SettingsError("there is no bucket to keep it in: set PENSTOCK_PAYLOAD_BUCKET")
        plain = text.encode()
        data = plain if self._cipher is None else self._cipher.encrypt(plain, self._written(bound))
        name = new_name(offered=offered)
        with _counted("put"):
            async with self._turns:
                await self.bucket.put(name, data)
        metrics.PAYLOAD_BYTES.labels("put").inc(len(data))
        key_id = None if self._cipher is None else self._cipher.key_id
        return encode_reference(Reference(name, key_id, len(plain), hashlib.sha256(data).hexdigest()))

    def _written(self, bound: str | Bound) -> str | Bound:
        return bound if isinstance(bound, str) or self._binds_tenants else bound.older

    def _unsealed(self, found: str | Sealed, bound: str | Bound) -> str:
        if isinstance(found, str):
            return found
        if self._cipher is None:
            raise missing_key(found.key_id)
        return self._cipher.unseal(found, bound)


def _decoded(text: str) -> str | Sealed | Reference:
    try:
        return decode_sealed(text)
    except ValueError as exc:
        raise PayloadLost(str(exc)) from None


class _counted:
    """Count a call to S3 by its outcome."""

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _trace: object) -> None:
        outcome = "ok" if exc is None else "lost" if isinstance(exc, PayloadLost) else "away"
        metrics.PAYLOAD_OBJECTS.labels(self._operation, outcome).inc()
