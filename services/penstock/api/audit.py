"""Who does what by hand: noted before it is done, so that nothing is done unnoted, and with its outcome afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from penstock.api import audit_views as views
from penstock.db.session import Session
from penstock.methods.audit import OUTCOME_MAX_CHARS, Deed, begin_audit, end_audit, list_audit, shown_params
from penstock.protocol.errors import RpcError, Unavailable
from penstock.runtime.batcher import Batcher
from penstock.runtime.logs import get_logger
from penstock.tasks.commands import ListAudit

log = get_logger()


class Doer(NamedTuple):
    """Whoever sent the request in hand. ``name``: of the API key, empty where none is asked for."""

    name: str
    address: str
    door: str


class Declined(Exception):
    """A request that is answered with an error of another API than JSON-RPC. Its text is noted as the outcome."""


_NOBODY = Doer("", "", "unknown")
_doer: ContextVar[Doer] = ContextVar("doer", default=_NOBODY)


def doing(name: str, address: str, door: str) -> None:
    """Remember who sent the request in hand, for whatever it leads to."""
    _doer.set(Doer(name, address, door))


class Audit:
    """Notes what is done and lists it. session: opens one."""

    def __init__(self, session: Callable[[], AbstractAsyncContextManager[Session]]) -> None:
        self._session = session
        # A batch of a thousand requests is noted by one statement before and few after.
        self._begin: Batcher[Deed, int] = Batcher(self._begin_many)
        self._end: Batcher[tuple[int, str], None] = Batcher(self._end_many)

    @asynccontextmanager
    async def noting(self, method: str, params: bytes) -> AsyncIterator[None]:
        """Note what the block does. Raises Unavailable where it cannot be noted: then the block is not entered."""
        doer = _doer.get()
        deed = Deed(doer.name, doer.address, doer.door, method, shown_params(params))
        noted = await self._begin.submit(deed)
        outcome = "cut off"
        try:
            yield
            outcome = "ok"
        except RpcError as exc:
            outcome = exc.message
            raise
        except Declined as exc:
            outcome = str(exc)
            raise
        except Unavailable:
            outcome = "unavailable; perhaps done"
            raise
        except Exception as exc:
            outcome = f"failed: {type(exc).__name__}"
            raise
        finally:
            future = self._end.submit_soon((noted, outcome[:OUTCOME_MAX_CHARS].replace("\0", "\ufffd")))
            future.add_done_callback(_unnoted)

    async def browse(self, command: ListAudit) -> views.AuditPage:
        """A page, newest first."""
        async with self._session() as session:
            records = await list_audit(session, before=command.before, limit=command.limit)
        cursor = str(records[-1].id) if len(records) == command.limit else None
        return views.AuditPage([views.audited(record) for record in records], cursor)

    async def drain(self) -> None:
        """Wait until every outcome is noted."""
        await self._end.drain()

    async def _begin_many(self, deeds: Sequence[Deed]) -> list[int]:
        async with self._session() as session:
            return await begin_audit(session, deeds)

    async def _end_many(self, outcomes: Sequence[tuple[int, str]]) -> list[None]:
        async with self._session() as session:
            await end_audit(session, dict(outcomes))
        return [None] * len(outcomes)


def _unnoted(future: Any) -> None:
    """The deed is done; that its outcome is unknown in the record is told in the log."""
    if not future.cancelled() and future.exception() is not None:
        log.warning("outcome_not_noted", reason=str(future.exception()))
