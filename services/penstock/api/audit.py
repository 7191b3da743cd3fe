"""Who changes what by hand: recorded before it is carried out, and then with its outcome."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Annotated, Any

import msgspec

from penstock.db.session import OpenSession, Session
from penstock.methods.audit import AuditEntry, begin_audit, end_audit, shown_params
from penstock.protocol.api_key import Permission
from penstock.protocol.checks import LIMIT, MAX_LIST, NUMBERED, read_cursor
from penstock.protocol.errors import RpcError, Unavailable
from penstock.protocol.method import Scope, method
from penstock.protocol.record import Record, view_of
from penstock.protocol.views import CURSOR, NEXT_CURSOR, Instant, about
from penstock.runtime.batcher import Batcher
from penstock.runtime.logs import log


class Audited(Record):
    """Something that was changed by hand."""

    id: int
    at: Instant
    who: Annotated[str, about("Name of the API key; empty where none is asked for.")]
    address: Annotated[str, about("Where the request came from, as the api saw it.")]
    door: Annotated[
        str,
        about(
            "dashboard, http, mcp, inbound: the inbound queue, `who` being SQS's SenderId, or scheduler0: its API, "
            "`who` being `scheduler0:` and the number of the credential."
        ),
    ]
    method: str
    params: Annotated[str, about("As JSON text, payloads left out, cut where it is long.")]
    outcome: Annotated[str | None, about("ok, or the error; null: under way, or the api died before it finished.")]
    ended_at: Instant | None


class AuditPage(Record):
    audit: list[Audited]
    cursor: Annotated[str | None, NEXT_CURSOR]


class AuditListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, about(f"Maximum number of entries; 1 to {MAX_LIST}."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, NUMBERED] = None


@method("audit.list", permission=Permission.ADMIN, scope=Scope.CLOSED, audited=False)
async def list_(session: Session, page: AuditListParams) -> AuditPage:
    """List what was changed by hand and by whom, newest first."""
    rows = await session.fetch("list_audit", read_cursor(page.cursor), page.limit)
    records = [view_of(Audited, row) for row in rows]
    return AuditPage(audit=records, cursor=str(records[-1].id) if len(records) == page.limit else None)


class Declined(Exception):
    """A request that is answered with an error of another API than JSON-RPC. Its text is recorded as the outcome."""


_actor: ContextVar[tuple[str, str, str]] = ContextVar("actor", default=("", "", "unknown"))


def set_actor(name: str, address: str, source: str) -> None:
    """Remember the caller of the request in hand. name: of the API key, empty where none is needed."""
    _actor.set((name, address, source))


class Audit:
    def __init__(self, session: OpenSession) -> None:
        self._session = session
        # A batch of a thousand requests is recorded by one statement before and few after.
        self._begin: Batcher[AuditEntry, int] = Batcher(self._begin_many)
        self._end: Batcher[tuple[int, str], None] = Batcher(self._end_many)

    @asynccontextmanager
    async def recording(self, method: str, params: bytes) -> AsyncIterator[None]:
        """Record what the block does. Raises Unavailable if it cannot be recorded: then the block is not entered."""
        recorded = await self._begin.submit(AuditEntry(*_actor.get(), method, shown_params(method, params)))
        outcome = "cut off"
        try:
            yield
            outcome = "ok"
        except (RpcError, Declined) as exc:
            outcome = str(exc)
            raise
        except Unavailable:
            outcome = "unavailable; perhaps done"
            raise
        except Exception as exc:
            outcome = f"failed: {type(exc).__name__}"
            raise
        finally:
            self._end.submit_soon((recorded, outcome)).add_done_callback(_warn_of_loss)

    async def drain(self) -> None:
        await self._end.drain()

    async def _begin_many(self, entries: Sequence[AuditEntry]) -> list[int]:
        async with self._session() as session:
            return await begin_audit(session, entries)

    async def _end_many(self, outcomes: Sequence[tuple[int, str]]) -> list[None]:
        async with self._session() as session:
            await end_audit(session, dict(outcomes))
        return [None] * len(outcomes)


def _warn_of_loss(future: Any) -> None:
    """Log that the call was carried out, and that its record lacks the outcome."""
    if not future.cancelled() and future.exception() is not None:
        log.warning("outcome_not_noted", reason=str(future.exception()))
