"""Advance bulk jobs, each at one supervisor at a time; a batch is a transaction, which stores the job's cursor too."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from penstock.db.pool import Store
from penstock.protocol.answers import JobState
from penstock.protocol.errors import TooSlow, Unavailable
from penstock.runtime.logs import log
from penstock.tasks.bulk import LOOKED_AT, advance_job, end_job, run_batch, take_job

_IDLE_SECONDS = 0.5
_FAILED_REST_SECONDS = 2.0
_SHARE = 0.25  # pause after a batch, as a share of the time that it took
_QUICK = 0.25  # a batch that took less of the time of a statement is followed by larger ones


@dataclass(kw_only=True)
class BulkJobs:
    store: Store
    changed: Callable[[], None]  # called after a batch that has changed tasks, which may be due now
    _rest_until: dict[int, float] = field(init=False, default_factory=dict)
    _parts: int = field(init=False, default=1)  # in which batches are done

    async def work_then_rest(self) -> float:
        started = monotonic()
        if await self.run_once():
            return (monotonic() - started) * _SHARE
        # A new job may come, or one that rests be ready.
        longest = _IDLE_SECONDS * random.uniform(0.8, 1.2)
        return max(0.0, min([longest, *(until - monotonic() for until in self._rest_until.values())]))

    async def run_once(self) -> bool:
        """Do one batch of one job; returns whether there was one. Raises Unavailable: the batch had no effect."""
        now = monotonic()
        self._rest_until = {job_id: until for job_id, until in self._rest_until.items() if until > now}
        job = result = None
        try:
            async with self.store.transaction() as session:
                job = await take_job(session, without=list(self._rest_until))
                if job is None:
                    return False
                result = await run_batch(session, job, parts=self._parts)
                await advance_job(session, job["id"], result)
        except Exception as exc:
            if job is None:
                raise
            if isinstance(exc, TooSlow):
                self._parts = min(self._parts * 2, LOOKED_AT)
            if isinstance(exc, Unavailable):
                self._rest_until[job["id"]] = monotonic() + _FAILED_REST_SECONDS  # perhaps only this job fails
                raise
            log.exception("job_failed", job=job["id"], kind=job["kind"], error=type(exc).__name__)
            async with self.store.transaction() as session:
                await end_job(session, job["id"], JobState.FAILED, error=f"{type(exc).__name__}: {exc}"[:500])
            return True
        if monotonic() - now < session.statement_timeout_seconds * _QUICK:
            self._parts = max(self._parts // 2, 1)
        if result.rest_seconds:
            self._rest_until[job["id"]] = monotonic() + result.rest_seconds
        if result.changed:
            self.changed()
        if result.done:
            log.info(
                "job_done", job=job["id"], kind=job["kind"], seen=job["seen"] + result.seen,
                changed=job["changed"] + result.changed, refused=job["refused"] + result.refused,
            )  # fmt: skip
        return True
