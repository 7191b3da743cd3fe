"""Permanent failures grouped by fingerprint: action, kind of error, and message without its numbers. Pure."""

import hashlib
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

_VARYING = re.compile(r"\b[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b|\d+", re.IGNORECASE)


class FailureGroup(NamedTuple):
    """Failures with one fingerprint. action, kind, message: of the newest. ids: newest first."""

    fingerprint: str
    action: str
    kind: str | None
    message: str
    first: datetime
    last: datetime
    ids: list[int]


def grouped(rows: Iterable[Any]) -> list[FailureGroup]:
    """Groups of rows of ``read_recent_failures``, newest first; those with the most failures first."""
    groups: dict[str, FailureGroup] = {}
    for row in rows:
        kind, at = row["kind"], row["finished_at"]
        message = (row["message"] or "no message").removeprefix(f"{kind}: ")
        mark = "\0".join((row["action"], kind or "", _VARYING.sub("0", message)))
        fingerprint = hashlib.sha256(mark.encode("utf-8", "replace")).hexdigest()[:12]
        group = groups.get(fingerprint) or FailureGroup(fingerprint, row["action"], kind, message, at, at, [])
        group.ids.append(row["id"])
        groups[fingerprint] = group._replace(first=min(group.first, at), last=max(group.last, at))
    return sorted(groups.values(), key=lambda group: -len(group.ids))
