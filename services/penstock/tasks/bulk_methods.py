"""The methods about bulk operations and jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from penstock.db.session import Session
from penstock.protocol.caller import bound_to, sees
from penstock.protocol.errors import JobNotFound
from penstock.runtime.logs import get_logger
from penstock.tasks import bulk_views as views
from penstock.tasks.bulk import preview
from penstock.tasks.bulk_jobs import Job, change_job, list_jobs, read_job
from penstock.tasks.commands import CancelJob, GetJob, ListJobs, PreviewBulk, StartBulk

log = get_logger()


class Jobs:
    """Makes jobs, shows and stops them. transaction: opens one."""

    def __init__(self, transaction: Callable[[], AbstractAsyncContextManager[Session]]) -> None:
        self._transaction = transaction

    async def start(self, command: StartBulk) -> views.BulkStarted:
        """The work itself is the supervisor's."""
        async with self._transaction() as session:
            job = await change_job(session, command)
        log.info("job_made", job=job.id, kind=job.kind)
        return views.BulkStarted(job.id)

    async def preview(self, command: PreviewBulk) -> views.BulkPreview:
        """Counts, and changes nothing."""
        async with self._transaction() as session:
            count = await preview(session, command.work)
        return views.BulkPreview(count.count, count.exact, count.estimate, list(count.sample))

    async def get(self, command: GetJob) -> views.Job:
        """Raises JobNotFound."""
        async with self._transaction() as session:
            return views.job(await _own(session, command.id))

    async def list(self, command: ListJobs) -> views.JobPage:
        """A page, newest first."""
        async with self._transaction() as session:
            jobs = await list_jobs(session, before=command.before, limit=command.limit, tenant=bound_to())
        cursor = str(jobs[-1].id) if len(jobs) == command.limit else None
        return views.JobPage([views.job(job) for job in jobs], cursor)

    async def cancel(self, command: CancelJob) -> views.Job:
        """Raises JobNotFound. What was done stays done; a job that has ended stays as it is."""
        async with self._transaction() as session:
            await _own(session, command.id)
            job = await change_job(session, command)
        log.info("job_cancelled", job=job.id, state=job.state)
        return views.job(job)


async def _own(session: Session, job_id: int) -> Job:
    """Raises JobNotFound, also for one that is about tasks that the caller may not see."""
    job = await read_job(session, job_id)
    if not sees(_tenant_of(job.params)):
        raise JobNotFound(job_id)
    return job


def _tenant_of(params: Mapping[str, Any]) -> str | None:
    """For whom a bulk job is, by its parameters."""
    found: str | None = params.get("select", {}).get("tenant")
    return found
