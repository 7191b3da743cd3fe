"""The record of who changed what by hand, in Postgres."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.db.session import Session
from penstock.methods.table import METHODS
from penstock.protocol.json_text import decode_any

PARAMS_MAX_CHARS = 2000
OUTCOME_MAX_CHARS = 500
# What is worth knowing of these is that they were there: they are the tasks' own data, or thousands of entries.
_LEFT_OUT = ("payload", "schedules", "result")


class AuditEntry(NamedTuple):
    """A call that is about to be carried out. who: name of the API key. source: the API, `door` on the wire."""

    who: str
    address: str
    source: str
    method: str
    params: str


async def begin_audit(session: Session, entries: Sequence[AuditEntry]) -> list[int]:
    """Record calls before they are carried out; ids in their order."""
    columns = zip(*entries, strict=True)
    return sorted(row["id"] for row in await session.fetch("begin_audit", *map(list, columns)))


async def end_audit(session: Session, outcomes: Mapping[int, str]) -> None:
    texts = [outcome[:OUTCOME_MAX_CHARS].replace("\0", "\ufffd") for outcome in outcomes.values()]
    await session.fetch("end_audit", list(outcomes), texts)


def shown_params(method: str, params: bytes) -> str:
    """Parameters as they are recorded: by name, without payloads, cut where they are long."""
    try:
        given: Any = decode_any(params or b"{}")
    except (ValueError, RecursionError):
        return "?"
    if isinstance(given, list) and method in METHODS:
        given = dict(zip(METHODS[method].params.__struct_fields__, given, strict=False))
    if isinstance(given, dict):
        for name in _LEFT_OUT:
            if name in given:
                given[name] = f"({len(msgspec.json.encode(given[name]))} bytes)"
    text = msgspec.json.encode(given).decode("utf-8").replace("\\u0000", "\\ufffd")
    return text if len(text) <= PARAMS_MAX_CHARS else text[: PARAMS_MAX_CHARS - 1] + "…"
