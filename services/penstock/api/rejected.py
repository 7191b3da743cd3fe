"""Rejected messages: listed, shown, deleted, and read again; what is still refused stays, with its new reason."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any

from penstock.api.context import ApiContext
from penstock.api.params import ListRejected, RejectedShowParams, Source, WhichRejected
from penstock.db.context import Context
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.methods.inbound import accept_inbound, read_inbound, take_in
from penstock.protocol.api_key import Permission
from penstock.protocol.checks import read_cursor, read_ids
from penstock.protocol.errors import Locked, MessageNotFound, PayloadUnavailable, Refused
from penstock.protocol.method import Scope, method
from penstock.protocol.record import Record, view_of
from penstock.protocol.reports import decode_reports
from penstock.protocol.views import NEXT_CURSOR, Instant, about
from penstock.results.apply import apply_reports
from penstock.runtime.logs import log
from penstock.settings.model import Settings

REJECTED_PAGE_BYTES = 8 * 1024 * 1024


class Rejected(Record):
    id: int
    source: Source
    body: Annotated[str, about("As it came; bytes that are not UTF-8 are written as \\xNN.")]
    reason: str
    at: Instant


class RejectedPage(Record):
    rejected: list[Rejected]
    cursor: Annotated[str | None, NEXT_CURSOR]


_NEXT = about("With `limit`: where the next page begins; null at the end, and with `ids`.")


class StillRejected(Record):
    id: Annotated[int, about("Another id than before where a part was accepted and the rest is a new record.")]
    reason: str


class Replayed(Record):
    retried: Annotated[int, about("Records that were accepted whole and are gone.")]
    still_rejected: list[StillRejected]
    unknown: Annotated[list[int], about("Ids that are unknown, or whose message another caller is retrying.")]
    cursor: Annotated[str | None, _NEXT]


class Purged(Record):
    purged: int
    cursor: Annotated[str | None, _NEXT]


@method("rejected.list", permission=Permission.READ, scope=Scope.CLOSED)
async def list_(session: Session, command: ListRejected) -> RejectedPage:
    """List rejected messages, which could not be understood, with their reasons, newest first."""
    before = read_cursor(command.cursor)
    rows = await session.fetch("list_rejected_page", before, command.limit, command.source, REJECTED_PAGE_BYTES)
    more = bool(rows) and (len(rows) == command.limit or len(rows) < rows[0]["found"])
    return RejectedPage(rejected=[_shown(row) for row in rows], cursor=str(rows[-1]["id"]) if more else None)


@method("rejected.show", permission=Permission.READ, scope=Scope.CLOSED, errors=(MessageNotFound,))
async def show(session: Session, given: RejectedShowParams) -> Rejected:
    """Show a rejected message and its body."""
    rows = await session.fetch("read_rejected", int(given.id))
    if not rows:
        raise MessageNotFound(int(given.id), " among the rejected")
    return _shown(rows[0])


def _shown(row: Any) -> Rejected:
    return view_of(Rejected, row, body=bytes(row["body"]).decode("utf-8", "backslashreplace"))


@method("rejected.retry", permission=Permission.ADMIN, scope=Scope.CLOSED)
async def retry(context: ApiContext, which: WhichRejected) -> Replayed:
    """Process rejected messages again, after the reason was fixed; nothing of a message is accepted twice."""
    async with context.session() as session:
        ids, cursor = await _choose(session, which)
    async with context.turns:
        replayed = await retry_rejected(context.store, ids, context.settings)
    context.wake()
    return Replayed(**replayed | {"cursor": cursor})


@method("rejected.purge", permission=Permission.ADMIN, scope=Scope.CLOSED)
async def purge(context: Context, which: WhichRejected) -> Purged:
    """Delete rejected messages permanently."""
    async with context.session() as session:
        ids, cursor = await _choose(session, which)
        purged = len(await session.fetch("delete_rejected", ids))
    log.info("rejected_purged", purged=purged)
    return Purged(purged=purged, cursor=cursor)


async def _choose(session: Session, which: WhichRejected) -> tuple[list[int], str | None]:
    """Ids of rejected messages, and where the next page of them begins."""
    if which.ids is not None:
        return read_ids(which.ids), None
    # Newest first, so that what a retry rejects again, as a record of its own, is on no later page.
    rows = await session.fetch("list_rejected_ids", read_cursor(which.cursor), which.limit, which.source)
    ids = [row["id"] for row in rows]
    return ids, str(ids[-1]) if len(ids) == which.limit else None


async def retry_rejected(store: Store, ids: Sequence[int], settings: Settings) -> Replayed:
    """Process records again, each in a transaction of its own. Raises Unavailable; what was done until then holds."""
    retried = 0
    still: list[StillRejected] = []
    unknown: list[int] = []
    hurried = False
    await store.read_fence(older_than_seconds=0)
    for rejected_id in dict.fromkeys(ids):
        try:
            async with store.transaction(hurried=hurried) as session:
                refused = await _retry_one(session, rejected_id, settings)
        except (Refused, Locked, PayloadUnavailable) as exc:  # others may need no such lock, key or object
            refused = [StillRejected(id=rejected_id, reason=str(exc))]
            hurried = hurried or isinstance(exc, Locked)  # they do not wait for long
            if isinstance(exc, Refused):
                await store.fetch("explain_rejected", rejected_id, str(exc).replace("\0", "\ufffd"))
        if refused is None:
            unknown.append(rejected_id)
        elif refused:
            still += refused
        else:
            retried += 1
    log.info("rejected_retried", retried=retried, still_rejected=len(still), unknown=len(unknown))
    return Replayed(retried=retried, still_rejected=still, unknown=unknown, cursor=None)


async def _retry_one(session: Session, rejected_id: int, settings: Settings) -> list[StillRejected] | None:
    """Process one record inside a transaction: what of it is refused again; None for no such record. Raises Refused."""
    rows = await session.fetch("take_rejected", [rejected_id])
    if not rows:
        return None
    source, body = rows[0]["source"], bytes(rows[0]["body"])
    if source not in ("inbound", "results"):
        return [StillRejected(id=rejected_id, reason=f"it came from {source}: publish a corrected record to its topic")]
    try:
        text = body.decode("utf-8", "surrogatepass")  # bodies are kept as they came, half surrogate pairs included
    except UnicodeDecodeError as exc:
        raise Refused(f"Parse error: not UTF-8 at byte {exc.start}") from None
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
    reasons = [reason.replace("\0", "\ufffd") for _, reason in refused]
    if refused and len(refused) == asked:
        reason = reasons[0] + (f" (and {asked - 1} more)" if asked > 1 else "")
        await session.fetch("explain_rejected", rejected_id, reason)
        return [StillRejected(id=rejected_id, reason=reason)]
    # What was accepted must not be accepted again by the next retry: only the rest is kept, entry by entry.
    await session.fetch("delete_rejected", [rejected_id])
    bodies = [part.encode("utf-8", "surrogatepass") for part, _ in refused]
    rows = await session.fetch("insert_rejected", [source] * len(refused), bodies, reasons) if refused else []
    return [StillRejected(id=row["id"], reason=reason) for row, reason in zip(rows, reasons, strict=True)]
