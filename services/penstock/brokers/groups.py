"""Group ids as SQS takes them: 1 to 128 of its characters, for whatever text a group is named by."""

from __future__ import annotations

import hashlib
import re

_TAKEN = re.compile(r"[!-~]{1,128}")  # letters, digits and punctuation of ASCII, all of which SQS takes


def group_id(group: str) -> str:
    """The group's own name where SQS takes it, else SHA-256 of it; the id of an id is itself."""
    return group if _TAKEN.fullmatch(group) else hashlib.sha256(group.encode("utf-8", "surrogatepass")).hexdigest()
