"""Messages of protobuf, read without their definitions."""

from __future__ import annotations


def fields_of(message: bytes) -> dict[int, bytes]:
    """The fields of a message that hold bytes; none of those that are read here is repeated."""
    found: dict[int, bytes] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(message):
        tag = varint()
        value = varint()
        if tag & 7 == 2:
            found[tag >> 3] = message[at : at + value]
            at += value
    return found
