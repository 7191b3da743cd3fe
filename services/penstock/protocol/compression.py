"""Packed results: gzip in base64, since SQS bills each started 64 KiB of a message. The unpacked size is bounded."""

import base64
import binascii
import gzip
import zlib

import msgspec

from penstock.protocol.errors import HANDLER_ERROR, TOO_LARGE
from penstock.protocol.json_text import short_reason

ENCODING = "gzip"
PACKED_PREFIX = f'{{"jsonrpc":"2.0","encoding":"{ENCODING}"'
PACKED_PER_MESSAGE = 16  # results of the largest size, which a resulter can unpack
UNPACKED_RESULT_BYTES = 900_000  # the highest limit that the settings allow
UNPACKED_BODY_BYTES = 16 * 1024 * 1024  # of all results of one message; a megabyte could become a thousand of them


class Unpackable(Exception):
    """A packed result that cannot be used; ``code`` is that of the failed attempt's error."""

    def __init__(self, text: str, code: int = HANDLER_ERROR) -> None:
        super().__init__(text)
        self.code = code


def pack_result(text: str) -> str:
    """JSON text as base64 of its gzip, which needs no escapes in JSON."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def unpack_result(raw: bytes, encoding: str, room: int) -> str:
    """raw: a JSON string. room: bytes it may unpack to. Returns the JSON text that was packed. Raises Unpackable."""
    if encoding != ENCODING:
        raise Unpackable(f"the result has the encoding {encoding[:40]!r}; {ENCODING} is known")
    limit = min(UNPACKED_RESULT_BYTES, room)
    unpacker = zlib.decompressobj(wbits=31)  # the largest window, and the header of gzip
    try:
        unpacked = unpacker.decompress(base64.b64decode(msgspec.json.decode(raw, type=str), validate=True), limit + 1)
        if len(unpacked) > limit:
            limits = f"{UNPACKED_RESULT_BYTES} are the limit of one, {UNPACKED_BODY_BYTES} of a message"
            raise Unpackable(f"the result unpacks to more than {limit} bytes; {limits}", TOO_LARGE)
        if not unpacker.eof or unpacker.unused_data:
            raise Unpackable("the packed result is cut off, or followed by something else")
        msgspec.json.decode(unpacked, type=msgspec.Raw)
        return unpacked.decode("utf-8")
    except (msgspec.MsgspecError, binascii.Error, zlib.error, ValueError, RecursionError) as exc:
        raise Unpackable(f"the packed result cannot be read: {short_reason(exc)}") from None
