"""Resulter: the results queue to Postgres. A message is deleted only after what it reports is committed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import time_ns

from penstock import tracing
from penstock.consumer import Consumer
from penstock.errors import HANDLER_ERROR, Refused
from penstock.logs import get_logger
from penstock.loop import SideTask
from penstock.outcomes import Applied, apply_reports
from penstock.settings import Settings
from penstock.store import Store
from penstock.tracing import Way
from penstock.transports import Message, Queue
from penstock.turns import Turns
from penstock.watermark import ReadingNote
from penstock.wire import (
    NO_HINTS,
    Failed,
    Fence,
    Progress,
    Report,
    RunTimes,
    Succeeded,
    Unreadable,
    Waiting,
    decode_reports,
    worker_of,
)

log = get_logger()


class Resulter(Consumer):
    """One resulter process; ``run_once`` is one receive, committed and deleted."""

    name = "resulter"

    def __init__(self, *, store: Store, results: Queue, settings: Settings) -> None:
        super().__init__(store=store, queue=results, settings=settings)
        self._turns = Turns(store=store, notifier=self._notifier)
        self._note = ReadingNote(store, hold_seconds=settings.visibility_timeout_seconds)

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {**super().side_tasks(), "turns": self._turns.run, "watermark": self._note.run}

    async def run_once(self) -> int:
        try:
            return await super().run_once()
        except Exception:
            self._note.interrupted()
            raise

    async def commit(self, messages: Sequence[Message]) -> Sequence[Message]:
        reports: list[Report] = []
        await self._store.read_fence()
        with self._note.recording(messages):
            for message in messages:
                reports += self._read(message)
            if any(type(report) is Unreadable and report.is_foreign for report in reports):
                # Schedulers may sign with a key that was made since this process last read them.
                await self._store.read_fence(older_than_seconds=0)
                reports = [report for message in messages for report in self._read(message)]
            await self._record(reports)
        return ()

    def _read(self, message: Message) -> list[Report]:
        return decode_reports(
            message.body, batch_limit=self._settings.batch_limit, worker=worker_of(message.attributes),
            fence=self._store.fence, bare_ids=self._settings.results_bare_ids,
        )  # fmt: skip

    async def drain(self, seconds: float) -> None:
        """Give back what was kept, and leave no turn to a version that knows of none."""
        await super().drain(seconds)
        await self._turns.end_all()
        await self._note.forget()

    async def _record(self, reports: Sequence[Report]) -> None:
        started_ns = time_ns()
        try:
            applied = await self._commit(reports)
        except Refused as exc:
            if len(reports) > 1:
                # One report's values spoil the transaction of all: each half by itself, down to the guilty one.
                middle = len(reports) // 2
                await self._record(reports[:middle])
                await self._record(reports[middle:])
                return
            kept = _in_place_of(reports[0], str(exc), self._store.fence)
            try:
                applied = await self._commit(kept)
            except Refused:  # no change of that task is taken: an operator finds its text, repair the task
                applied = await self._commit([entry for entry in kept if isinstance(entry, Unreadable)])
        spans = tracing.active()
        if spans is not None:
            spans.passed("settle", "settle", _ways(reports), started_ns=started_ns, count=len(reports))
        if applied.settled or applied.waiting:
            self._notifier.poke()  # there is room in the window
        for entry in applied.unreadable:
            log.warning("message_rejected", source="results", reason=entry.reason, bytes=len(entry.text))
        log.debug(
            "recorded", succeeded=applied.succeeded, failed=applied.failed, waiting=applied.waiting,
            stale=applied.stale,
        )  # fmt: skip

    async def _commit(self, reports: Sequence[Report]) -> Applied:
        async with self._store.transaction() as session:
            applied = await apply_reports(session, reports, self._settings)
            await session.insert_rejected("results", [(entry.text, entry.reason) for entry in applied.unreadable])
        return applied


def _ways(reports: Sequence[Report]) -> list[Way]:
    """The attempts that told their trace."""
    return [
        Way(report.trace, report.task_id, "results")
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
