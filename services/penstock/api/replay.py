"""Rejected messages, read again: what is accepted now leaves the record, what is not stays with its new reason."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from penstock.api.message_views import Replayed, StillRejected
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.methods.inbound import accept_inbound, read_inbound, take_in
from penstock.protocol.errors import Refused
from penstock.protocol.reports import decode_reports
from penstock.results.apply import apply_reports
from penstock.runtime.logs import get_logger
from penstock.settings.model import Settings

log = get_logger()


async def retry_rejected(
    store: Store, ids: Sequence[int], settings: Settings, *, cursor: str | None = None
) -> Replayed:
    """Process these records again, each in a transaction of its own; ``cursor`` is passed on with the answer.

    Raises Unavailable; what was done until then holds.
    """
    retried = 0
    still: list[StillRejected] = []
    unknown: list[int] = []
    await store.read_fence(older_than_seconds=0)
    for rejected_id in dict.fromkeys(ids):
        try:
            async with store.transaction() as session:
                refused = await _retry_one(session, rejected_id, settings)
        except Refused as exc:
            refused = [StillRejected(rejected_id, str(exc))]
            async with store.session() as session:
                await session.fetch("explain_rejected", rejected_id, str(exc).replace("\0", "\ufffd"))
        if refused is None:
            unknown.append(rejected_id)
        elif refused:
            still += refused
        else:
            retried += 1
    log.info("rejected_retried", retried=retried, still_rejected=len(still), unknown=len(unknown))
    return Replayed(retried, still, unknown, cursor)


async def _retry_one(session: Session, rejected_id: int, settings: Settings) -> list[StillRejected] | None:
    """Process one record inside a transaction: what of it is refused again, or None when there is no such record."""
    rows = await session.fetch("take_rejected", [rejected_id])
    if not rows:
        return None
    source, body = rows[0]["source"], bytes(rows[0]["body"])
    if source not in ("inbound", "results"):
        return [StillRejected(rejected_id, f"it came from {source}: publish a corrected record to its topic")]
    try:
        text = body.decode("utf-8", "surrogatepass")  # bodies are kept as they came, half surrogate pairs included
    except UnicodeDecodeError as exc:
        return await _keep_whole(session, rejected_id, f"Parse error: not UTF-8 at byte {exc.start}")
    if source == "inbound":
        inbound = read_inbound(text, settings)
        await take_in(inbound, session.codec, settings, lambda: nullcontext(session))
        asked = len(inbound.tasks) + len(inbound.changes) + len(inbound.refused)
        await accept_inbound(session, inbound, settings, source="replay")
        refused = inbound.refused
    else:
        bare_ids = settings.results_bare_ids
        reports = decode_reports(text, batch_limit=settings.packed_limit, fence=session.fence, bare_ids=bare_ids)
        asked = len(reports)
        applied = await apply_reports(session, reports, settings)
        refused = [(report.text, report.reason) for report in applied.unreadable]
    if refused and len(refused) == asked:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        return await _keep_whole(session, rejected_id, refused[0][1] + more)
    # What was accepted must not be accepted again by the next retry: only the rest is kept, entry by entry.
    await session.fetch("delete_rejected", [rejected_id])
    if not refused:
        return []
    rows = await session.fetch(
        "insert_rejected",
        [source] * len(refused),
        [part.encode("utf-8", "surrogatepass") for part, _ in refused],
        [reason.replace("\0", "\ufffd") for _, reason in refused],
    )
    return [StillRejected(row["id"], reason) for row, (_, reason) in zip(rows, refused, strict=True)]


async def _keep_whole(session: Session, rejected_id: int, reason: str) -> list[StillRejected]:
    reason = reason.replace("\0", "\ufffd")
    await session.fetch("explain_rejected", rejected_id, reason)
    return [StillRejected(rejected_id, reason)]


async def purge_rejected(session: Session, ids: Sequence[int]) -> int:
    """Delete these records for good; returns how many there were."""
    purged = len(await session.fetch("delete_rejected", list(ids)))
    log.info("rejected_purged", purged=purged)
    return purged
