"""The record of who changed what by hand, in Postgres."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.protocol.json_text import decode_any

PARAMS_MAX_CHARS = 2000
OUTCOME_MAX_CHARS = 500
# What is worth knowing of these is that they were there: they are the tasks' own data, or thousands of entries.
_LEFT_OUT = ("payload", "schedules", "result")


@dataclass(frozen=True, slots=True)
class Deed:
    """Something that is about to be done. ``who``: name of the API key, empty where none is asked for."""

    who: str
    address: str
    door: str
    method: str
    params: str


@dataclass(frozen=True, slots=True)
class AuditRecord(Deed):
    """What was done. outcome: ``ok``, the error, or None while it is under way, or where the api died in the middle."""

    id: int
    at: datetime
    outcome: str | None
    ended_at: datetime | None


async def begin_audit(session: Session, deeds: Sequence[Deed]) -> list[int]:
    """Note deeds before they are done; ids in their order."""
    columns = (
        [deed.who for deed in deeds], [deed.address for deed in deeds], [deed.door for deed in deeds],
        [deed.method for deed in deeds], [deed.params for deed in deeds],
    )  # fmt: skip
    return sorted(row["id"] for row in await session.fetch("begin_audit", *columns))


async def end_audit(session: Session, outcomes: Mapping[int, str]) -> None:
    """Note what came of deeds."""
    await session.fetch("end_audit", list(outcomes), list(outcomes.values()))


async def list_audit(session: Session, *, before: int | None, limit: int) -> list[AuditRecord]:
    """Newest first, from behind the id ``before``."""
    names = ("who", "address", "door", "method", "params", "id", "at", "outcome", "ended_at")
    return [
        AuditRecord(**{name: row[name] for name in names}) for row in await session.fetch("list_audit", before, limit)
    ]


def shown_params(params: bytes) -> str:
    """Parameters as they are noted: without payloads, cut where they are long."""
    try:
        given: Any = decode_any(params or b"{}")
    except (ValueError, RecursionError):
        return "?"
    if isinstance(given, dict):
        for name in _LEFT_OUT:
            if name in given:
                given[name] = f"({len(msgspec.json.encode(given[name]))} bytes)"
    text = msgspec.json.encode(given).decode("utf-8").replace("\\u0000", "\\ufffd")
    return text if len(text) <= PARAMS_MAX_CHARS else text[: PARAMS_MAX_CHARS - 1] + "…"
