"""What results about the audit look like; see views for the style."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.methods.audit import AuditRecord
from penstock.protocol.views import Instant, about, timestamp


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was changed by hand."""

    id: int
    at: Instant
    who: Annotated[str, about("Name of the API key; empty where none is asked for.")]
    address: Annotated[str, about("Where the request came from, as the api saw it.")]
    door: Annotated[
        str,
        about(
            "dashboard, http, inbound: the inbound queue, `who` being SQS's SenderId, or scheduler0: its API, `who` "
            "being `scheduler0:` and the number of the credential."
        ),
    ]
    method: str
    params: Annotated[str, about("As JSON text, payloads left out, cut where it is long.")]
    outcome: Annotated[
        str | None, about("ok, or the error; null: it is under way, or the api died before it could tell.")
    ]
    ended_at: Instant | None


class AuditPage(msgspec.Struct, frozen=True):
    audit: list[Audited]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


def audited(record: AuditRecord) -> Audited:
    """A record of the audit as it is shown."""
    return Audited(
        id=record.id, at=timestamp(record.at), who=record.who, address=record.address, door=record.door,
        method=record.method, params=record.params, outcome=record.outcome,
        ended_at=None if record.ended_at is None else timestamp(record.ended_at),
    )  # fmt: skip
