"""What stands in the place of a payload, a result or an error that is encrypted, or kept as an object in a bucket.

It is a JSON string that begins with a mark. Payloads are objects or arrays, so no caller's payload is taken for one; a
result or an error that happens to begin like one is escaped where it enters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARK = '"penstock+'
_PLAIN = f"{MARK}plain:"
_SEALED = f"{MARK}sealed:"
_OBJECT = f"{MARK}object:"
SEALED_ENCODING = "penstock"
"""``encoding`` of a response whose result was sealed by the worker."""

_KEY_ID = r"[0-9a-f]{16}"
OBJECT_NAME = r"(?:offered/|queues/(?!\.{1,2}/)[A-Za-z0-9._~%-]{1,800}/)?[0-9]{8}/[0-9a-f]{32}"
"""Names of objects: the folder, a day and 128 random bits; earlier versions used no folder but ``offered/``."""
_SEALED_HEAD = re.compile(rf'"penstock\+sealed:({_KEY_ID}):')  # what follows may be long, and is decoded anyway
_OBJECT_TEXT = re.compile(rf'"penstock\+object:({OBJECT_NAME}):({_KEY_ID}|-):([0-9]{{1,12}}):([0-9a-f]{{64}})"')


@dataclass(frozen=True, slots=True)
class Sealed:
    """An encrypted text: the id of its key, and the nonce and ciphertext in base64."""

    key_id: str
    data: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A text that is an object in the bucket of the settings.

    name: behind the bucket's prefix; it says neither bucket nor prefix. key_id: of the key it is encrypted with, None
    where it is not. size: bytes of the text. digest: SHA-256 of the object, in hexadecimal.
    """

    name: str
    key_id: str | None
    size: int
    digest: str

    @property
    def is_offered(self) -> bool:
        """Whether a client has put it into the bucket, and no process of the pipeline."""
        return self.name.startswith("offered/")


def is_sealed(text: str | None) -> bool:
    """Whether a stored JSON text is not the value itself."""
    return text is not None and text.startswith(MARK)


def escape_plain(text: str) -> str:
    """A worker's own result as it is stored: unchanged unless it begins with the mark."""
    return f"{_PLAIN}{text[1:]}" if text.startswith(MARK) else text


def encode_sealed(sealed: Sealed) -> str:
    return f'{_SEALED}{sealed.key_id}:{sealed.data}"'


def encode_reference(reference: Reference) -> str:
    key_id = reference.key_id or "-"
    return f'{_OBJECT}{reference.name}:{key_id}:{reference.size}:{reference.digest}"'


def decode_sealed(text: str) -> str | Sealed | Reference:
    """What a stored text means: the plain text itself, or what has to be opened. Raises ValueError."""
    if not text.startswith(MARK):
        return text
    if text.startswith(_PLAIN):
        return f'"{text[len(_PLAIN) :]}'
    match = _SEALED_HEAD.match(text)
    if match is not None:
        return Sealed(match[1], text[match.end() : -1])
    match = _OBJECT_TEXT.fullmatch(text)
    if match is not None:
        return Reference(match[1], None if match[2] == "-" else match[2], int(match[3]), match[4])
    raise ValueError(f"{text[:60]!r} is no text that Penstock has sealed")


def reference_of(text: str | None) -> Reference | None:
    """The object that a stored text names, None for one that names none."""
    if text is None or not text.startswith(_OBJECT):
        return None
    found = decode_sealed(text)
    return found if isinstance(found, Reference) else None
