"""Sealed texts: JSON strings with a mark, for what is encrypted or an object; others that begin so are escaped."""

import re
from typing import NamedTuple

MARK = '"penstock+'
_PLAIN = f"{MARK}plain:"
_SEALED = f"{MARK}sealed:"
_OBJECT = f"{MARK}object:"
SEALED_ENCODING = "penstock"  # of a response whose result the worker has sealed
_KEY_ID = r"[0-9a-f]{16}"
# The folder, a day and 128 random bits; earlier versions used no folder but offered/.
OBJECT_NAME = r"(?:offered/|queues/(?!\.{1,2}/)[A-Za-z0-9._~%-]{1,800}/)?[0-9]{8}/[0-9a-f]{32}"
_SEALED_HEAD = re.compile(rf'"penstock\+sealed:({_KEY_ID}):')  # the rest may be long, and is decoded anyway
_OBJECT_TEXT = re.compile(rf'"penstock\+object:({OBJECT_NAME}):({_KEY_ID}|-):([0-9]{{1,12}}):([0-9a-f]{{64}})"')


class Sealed(NamedTuple):
    """An encrypted text. data: nonce and ciphertext in base64."""

    key_id: str
    data: str


class Reference(NamedTuple):
    """An object of the bucket. key_id: None if it is not encrypted. size: bytes of the text. digest: its SHA-256."""

    name: str
    key_id: str | None
    size: int
    digest: str

    @property
    def is_offered(self) -> bool:
        return self.name.startswith("offered/")


def is_sealed(text: str | None) -> bool:
    """Whether a stored JSON text is encrypted, a reference or escaped."""
    return text is not None and text.startswith(MARK)


def is_encrypted(text: str) -> bool:
    """Whether a JSON text begins as an encrypted one does, not as a reference or an escaped one."""
    return _SEALED_HEAD.match(text) is not None


def escape_plain(text: str) -> str:
    """A plain result as it is stored: escaped if it begins with the mark."""
    return f"{_PLAIN}{text[1:]}" if text.startswith(MARK) else text


def encode_sealed(sealed: Sealed) -> str:
    return f'{_SEALED}{sealed.key_id}:{sealed.data}"'


def encode_reference(reference: Reference) -> str:
    key_id = reference.key_id or "-"
    return f'{_OBJECT}{reference.name}:{key_id}:{reference.size}:{reference.digest}"'


def decode_sealed(text: str) -> str | Sealed | Reference:
    """The plain text of a stored text, or what to decrypt or fetch. Raises ValueError."""
    if not text.startswith(MARK):
        return text
    if text.startswith(_PLAIN):
        return f'"{text[len(_PLAIN) :]}'
    if match := _SEALED_HEAD.match(text):
        return Sealed(match[1], text[match.end() : -1])
    if match := _OBJECT_TEXT.fullmatch(text):
        return Reference(match[1], None if match[2] == "-" else match[2], int(match[3]), match[4])
    raise ValueError(f"{text[:60]!r} is no text that Penstock has sealed")


def reference_of(text: str | None) -> Reference | None:
    """The object of a stored text; None if it is no reference."""
    if text is None or not text.startswith(_OBJECT):
        return None
    found = decode_sealed(text)
    return found if isinstance(found, Reference) else None
