"""Resulter: the results queue to Postgres. A message is deleted only after what it reports is committed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import time_ns

from penstock.brokers.base import Message, Queue
from penstock.brokers.consumer import Consumer, Uncommitted
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.protocol.errors import HANDLER_ERROR, Locked, PenstockError, Refused, TooSlow, Unavailable
from penstock.protocol.fence import Fence
from penstock.protocol.reports import (
    NO_HINTS,
    Failed,
    Progress,
    Report,
    RunTimes,
    Succeeded,
    Unreadable,
    Waiting,
    decode_reports,
)
from penstock.protocol.trace_context import Hop
from penstock.protocol.worker_names import worker_of
from penstock.results.apply import ApplySummary, apply_reports
from penstock.results.watermark import ReadingNote
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import get_logger
from penstock.runtime.loop import SideTask
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import enqueue, settle
from penstock.tasks.promotion import Promotions

log = get_logger()


class Resulter(Consumer):
    """One resulter process; ``run_once`` is one receive, committed and deleted."""

    name = "resulter"

    def __init__(self, *, store: Store, results: Queue, settings: Settings) -> None:
        self._store = store
        self._notifier = Notifier(store)
        super().__init__(database=store, notify=self._notifier.run, queue=results, settings=settings)
        self._promotions = Promotions(store=store, notifier=self._notifier)
        self._note = ReadingNote(store, hold_seconds=settings.visibility_timeout_seconds)
        self._rest: dict[str, list[Report]] = {}  # of messages whose other reports are stored, by receipt

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {**super().side_tasks(), "turns": self._promotions.run, "watermark": self._note.run}

    async def run_once(self) -> int:
        try:
            return await super().run_once()
        except Locked:
            raise  # what waits is here, and its tasks show a sign of life
        except Exception:
            self._note.interrupted()
            raise

    async def commit(self, messages: Sequence[Message]) -> Uncommitted:
        left = Uncommitted()
        rest: dict[str, list[Report]] = {}
        stored: set[int] = set()
        await self._store.read_fence()
        told = self._told(messages)
        if any(type(report) is Unreadable and report.is_foreign for report, _ in told):
            # Schedulers may sign with a key that was made since this process last read them.
            await self._store.read_fence(older_than_seconds=0)
            told = self._told(messages)
        for message in messages:
            self._rest.pop(message.receipt, None)

        async def record(part: Sequence[tuple[Report, Message]], hurried: bool) -> None:
            await self._record([report for report, _ in part], hurried=hurried)
            stored.update(id(report) for report, _ in part)

        async def leave(one: tuple[Report, Message], error: PenstockError) -> None:
            report, message = one
            if isinstance(error, Refused):
                try:
                    await self._record_refused(report, str(error))
                    stored.add(id(report))
                    return
                except (Locked, TooSlow) as exc:
                    error = exc
            left.add(message, error)
            rest.setdefault(message.receipt, []).append(report)

        with self._note.recording(messages):
            try:
                await in_halves(told, record, leave)
            except BaseException:
                if stored:  # what is tried again must not be recorded twice: rejected texts have no fence
                    for report, message in told:
                        self._rest.setdefault(message.receipt, [])
                        if id(report) not in stored:
                            self._rest[message.receipt].append(report)
                raise
            if rest:
                self._rest |= rest
                await self._keep_alive([report for reports in rest.values() for report in reports])
        return left

    def _told(self, messages: Sequence[Message]) -> list[tuple[Report, Message]]:
        """What is to be recorded of each: all, or what was left of it before."""
        reports = {m.receipt: self._rest[m.receipt] if m.receipt in self._rest else self._read(m) for m in messages}
        return [(report, message) for message in messages for report in reports[message.receipt]]

    def _read(self, message: Message) -> list[Report]:
        return decode_reports(
            message.body, batch_limit=self._settings.packed_limit, worker=worker_of(message.attributes),
            fence=self._store.fence, bare_ids=self._settings.results_bare_ids,
        )  # fmt: skip

    async def drain(self, seconds: float) -> None:
        """Give back what was kept, and leave no turn to a version that knows of none."""
        await super().drain(seconds)
        await self._promotions.end_all()
        await self._note.forget()

    def forget(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._rest.pop(message.receipt, None)

    async def _keep_alive(self, reports: Sequence[Report]) -> None:
        """Tasks whose results wait here for another transaction are not silent."""
        claims = {
            report.task_id: report.claim
            for report in reports
            if isinstance(report, Succeeded | Failed | Waiting) and report.claim is not None
        }
        try:
            async with self._store.transaction(hurried=True) as session:
                await settle.note_heartbeats(session, dict.fromkeys(claims.items()))
        except Unavailable as exc:
            self._note.interrupted()
            log.info("signs_of_life_not_noted", tasks=len(claims), reason=str(exc))

    async def _record_refused(self, report: Report, reason: str) -> None:
        kept = _in_place_of(report, reason, self._store.fence)
        try:
            await self._record(kept, hurried=True)
        except Refused:  # no change of that task is taken: an operator finds its text, repair the task
            await self._record([entry for entry in kept if isinstance(entry, Unreadable)], hurried=True)

    async def _record(self, reports: Sequence[Report], *, hurried: bool) -> None:
        started_ns = time_ns()
        summary = await self._commit(reports, hurried=hurried)
        spans = active.active()
        if spans is not None:
            spans.passed("settle", "settle", _ways(reports), started_ns=started_ns, count=len(reports))
        self._promotions.settled()
        if summary.settled or summary.waiting:
            self._notifier.wake()  # there is room in the window
        for entry in summary.unreadable:
            log.warning("message_rejected", source="results", reason=entry.reason, bytes=len(entry.text))
        log.debug(
            "recorded", succeeded=summary.succeeded, failed=summary.failed, waiting=summary.waiting,
            stale=summary.stale,
        )  # fmt: skip

    async def _commit(self, reports: Sequence[Report], *, hurried: bool) -> ApplySummary:
        async with self._store.transaction(hurried=hurried) as session:
            summary = await apply_reports(session, reports, self._settings)
            await enqueue.insert_rejected(
                session, "results", [(entry.text, entry.reason) for entry in summary.unreadable]
            )
        return summary


def _ways(reports: Sequence[Report]) -> list[Hop]:
    """The attempts that told their trace."""
    return [
        Hop(report.trace, report.task_id, "results")
        for report in reports
        if isinstance(report, Succeeded | Failed) and report.trace is not None
    ]


def _in_place_of(report: Report, reason: str, fence: Fence) -> list[Report]:
    """What is recorded of a report whose values Postgres refuses: its text as rejected, and for its task a failed
    attempt, since the worker has answered and will not answer again."""
    spawn = ""
    match report:
        case Succeeded():
            member, value = "result", report.result
            spawn = f',"spawn":{report.spawn}' if report.spawn else ""
        case Failed():
            member, value = "error", report.error
        case Progress():
            return [Unreadable(f"progress of {report.task_id}:{report.claim}: {report.detail}", reason)]
        case Waiting():
            member, value = "wait", json.dumps({"token": report.token, "timeout": report.timeout})
        case RunTimes():
            return [Unreadable(f"run times {report.actions}", reason)]
        case Unreadable():
            return [Unreadable(report.text, reason)]
    id_ = report.task_id if report.claim is None else fence.name(report.task_id, report.claim)
    attempt = None if isinstance(report, Waiting) else report.attempt
    error = {
        "code": HANDLER_ERROR,
        "message": f"the worker's {member} cannot be stored; it is kept among the rejected messages",
        "data": {"type": "Unstorable", "message": reason},
    }
    return [
        Failed(report.task_id, report.claim, attempt, json.dumps(error), NO_HINTS, worker=report.worker),
        Unreadable(f'{{"jsonrpc":"2.0","{member}":{value}{spawn},"id":{json.dumps(id_)}}}', reason),
    ]
