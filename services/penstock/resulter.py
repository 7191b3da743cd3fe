"""Resulter: the results queue to Postgres. A message is deleted only after what it reports is committed."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import time_ns

import msgspec

from penstock.brokers.base import Message, Queue
from penstock.db.notify import OUTPUT, Notifier
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.protocol import reports
from penstock.protocol.errors import HANDLER_ERROR, Locked, PenstockError, Refused, TooSlow, Unavailable
from penstock.protocol.json_text import entry_text
from penstock.protocol.message_attributes import worker_of
from penstock.protocol.reports import Outcome
from penstock.protocol.trace_context import Hop
from penstock.results.apply import ApplySummary, apply_reports, as_failed, plain_results
from penstock.results.watermark import ReadingNote
from penstock.runtime.halving import in_halves
from penstock.runtime.logs import log
from penstock.runtime.loop import SideTask
from penstock.runtime.periodic import repeat
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import enqueue, settle
from penstock.tasks.consumer import Consumer, Uncommitted
from penstock.tasks.ordering import Promotions
from penstock.workflows.advancer import Successors

_Pending = tuple[reports.Report, str | msgspec.Raw, Message]  # with the entry that it was read from


class Resulter(Consumer):
    """One resulter process; ``run_once`` is one receive, committed and deleted."""

    name = "resulter"

    def __init__(self, *, store: Store, results: Queue, settings: Settings) -> None:
        super().__init__(store=store, queue=results, settings=settings)
        self._output_notifier = Notifier(store, OUTPUT)
        self._promotions = Promotions(store=store, notifier=self._notifier)
        self._successors = Successors(store=store, notifier=self._notifier, settings=settings)
        self._note = ReadingNote(store, self._in_work, hold_seconds=settings.visibility_timeout_seconds)
        self._rest: dict[str, list[_Pending]] = {}  # of messages whose other reports are stored, by receipt

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {
            **super().side_tasks(),
            "turns": partial(repeat, "turns", self._promotions.work_or_wait),
            "workflows": self._successors.run,
            "watermark": partial(repeat, "watermark", self._note.note),
            "notify of output": self._output_notifier.run,
        }

    async def run_once(self) -> int:
        try:
            return await super().run_once()
        except Exception as exc:
            if not isinstance(exc, Locked):  # else the results are held here, and _keep_alive notes heartbeats
                self._note.interrupted()
            raise

    async def commit(self, messages: Sequence[Message]) -> Uncommitted:
        left = Uncommitted()
        await self._store.read_fence()
        pending = self._pending(messages)
        if any(type(report) is reports.Unreadable and report.is_foreign for report, _, _ in pending):
            # Schedulers may sign with a key that was made since this process last read them.
            await self._store.read_fence(older_than_seconds=0)
            pending = self._pending(messages)
        self.forget(messages)
        waiting = {id(one[0]): one for one in pending}  # those that are not stored

        async def record(part: Sequence[_Pending], hurried: bool) -> None:
            await self._record([report for report, _, _ in part], hurried=hurried)
            for report, _, _ in part:
                waiting.pop(id(report), None)

        async def leave(one: _Pending, error: PenstockError) -> None:
            report, entry, message = one
            if isinstance(report, reports.SharedResult):  # for one of its tasks
                name = self._store.fence.name
                texts = [reports.encode_result(name(one, report.claim), report.result) for one in report.task_ids]
                each = [(alone, text, message) for alone, text in zip(report.each(), texts, strict=True)]
                waiting.pop(id(report), None)
                waiting.update((id(one[0]), one) for one in each)
                await in_halves(each, record, leave)
                return
            try:
                if not isinstance(error, Refused):
                    raise error
                await self._record_refused(report, entry_text(entry), str(error))
                waiting.pop(id(report), None)
            except (Locked, TooSlow) as exc:
                left.add(message, exc)

        try:
            await in_halves(pending, record, leave)
        except Unavailable:
            # What is tried again must not be recorded twice: rejected texts have no fence.
            self._rest |= {message.receipt: [] for message in messages}
            self._keep(waiting.values())
            raise
        finally:
            self._note.recorded(messages)
        self._keep(waiting.values())
        if waiting:
            await self._keep_alive([report for report, _, _ in waiting.values()])
        return left

    def _keep(self, waiting: Iterable[_Pending]) -> None:
        for one in waiting:
            self._rest.setdefault(one[2].receipt, []).append(one)

    def _pending(self, messages: Sequence[Message]) -> list[_Pending]:
        """The reports of each message that are not recorded yet."""
        pending: list[_Pending] = []
        for message in messages:
            if message.receipt in self._rest:
                pending += self._rest[message.receipt]
                continue
            entries = reports.read_reports(
                message.body, batch_limit=self._settings.packed_limit, worker=worker_of(message.attributes),
                fence=self._store.fence, bare_ids=self._settings.results_bare_ids,
            )  # fmt: skip
            pending += [(report, entry, message) for report, entry in entries]
        return pending

    async def drain(self, seconds: float) -> None:
        """Give back what was kept, and leave no promotion to a version without them."""
        await super().drain(seconds)
        await self._promotions.end_all()
        await self._note.forget()

    def forget(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._rest.pop(message.receipt, None)

    async def _keep_alive(self, left: Sequence[reports.Report]) -> None:
        """Record heartbeats of tasks whose results wait here for another transaction."""
        claims = {one.task_id: one.claim for one in left if isinstance(one, Outcome) and one.claim is not None}
        try:
            async with self._store.transaction(hurried=True) as session:
                await settle.note_heartbeats(session, dict.fromkeys(claims.items()))
        except Unavailable as exc:
            self._note.interrupted()
            log.info("signs_of_life_not_noted", tasks=len(claims), reason=str(exc))

    async def _record_refused(self, report: reports.Report, text: str, reason: str) -> None:
        """Record the text of a report that Postgres refuses, and a failed attempt, since its worker is done."""
        kept: list[reports.Report] = [reports.Unreadable(text, reason)]
        failed: list[reports.Report] = []
        if isinstance(report, Outcome):
            why = "what the worker sent cannot be stored; it is kept among the rejected messages"
            failed = [as_failed(report, HANDLER_ERROR, why, reports.NO_HINTS, type="Unstorable", message=reason)]
        try:
            await self._record(failed + kept, hurried=True)
        except Refused:  # Postgres refuses any change of that task: its text is kept, and repair finds the task
            await self._record(kept, hurried=True)

    async def _record(self, part: Sequence[reports.Report], *, hurried: bool) -> None:
        started_ns = time_ns()
        rest = part if hurried else await self._finish_few(part)
        if rest:
            async with self._store.transaction(hurried=hurried) as session:
                summary = await apply_reports(session, rest, self._settings)
                rejected = [(entry.text, entry.reason) for entry in summary.unreadable]
                await enqueue.insert_rejected(session, "results", rejected)
            self._recorded(session, summary)
        spans = active.active()
        if spans is not None:
            hops = [
                Hop(report.trace, report.task_id, "results")
                for report in part
                if isinstance(report, reports.Succeeded | reports.Failed) and report.trace is not None
            ]
            spans.passed("settle", hops, started_ns=started_ns, count=len(part))

    async def _finish_few(self, part: Sequence[reports.Report]) -> Sequence[reports.Report]:
        """Record a few plain results with one statement; returns the other reports."""
        plain, rest = plain_results(part, self._settings)
        if not plain or self._store.codec.encrypts:
            return part
        async with self._store.session() as session:
            finished = await settle.finish_few(session, plain)
        self._recorded(session, ApplySummary(succeeded=len(finished)))
        return [*(report for report in plain if report.task_id not in finished), *rest]

    def _recorded(self, session: Session, summary: ApplySummary) -> None:
        """Wake who has to hear of it. Room in the window is no reason: schedulers look for it themselves."""
        self._promotions.settled()
        self._successors.settled(session.settled_workflows)
        changed = summary.failed or summary.waiting or summary.suspended or summary.postponed
        if session.wakes or session.settled_steps or changed:
            self._notifier.wake()
        if summary.output:
            self._output_notifier.wake()
        for entry in summary.unreadable:
            log.warning("message_rejected", source="results", reason=entry.reason, bytes=len(entry.text))
        log.debug(
            "recorded", succeeded=summary.succeeded, failed=summary.failed, waiting=summary.waiting,
            stale=summary.stale,
        )  # fmt: skip
