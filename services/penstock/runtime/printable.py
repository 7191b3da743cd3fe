"""Untrusted text, made safe for a terminal or a log."""

from __future__ import annotations

import re

# They move a terminal's cursor, write to its clipboard or title, change the direction of text, or are no characters.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_LINES = re.compile(f"[{_CONTROL}]")
_ONE_LINE = re.compile(f"[\t\n{_CONTROL}]")


def printable(text: str, *, one_line: bool = False) -> str:
    """The text with control characters as escapes such as ``\\x1b``; newlines and tabs stay unless ``one_line``."""
    return (_ONE_LINE if one_line else _LINES).sub(lambda match: ascii(match[0])[1:-1], text)


def printable_json(text: str) -> str:
    """JSON text with the same characters as JSON escapes, which leaves its meaning."""
    return _LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
