"""The methods about bulk operations and jobs, and what they return."""

from collections.abc import Callable

import msgspec

from penstock.db.context import Context
from penstock.db.session import Session
from penstock.protocol import answers, checks
from penstock.protocol.answers import BulkStarted, JobPage
from penstock.protocol.api_key import Permission, bound_to, narrow_tenant, sees
from penstock.protocol.errors import InvalidParams, JobNotFound
from penstock.protocol.method import Method, Scope, method
from penstock.runtime.logs import log
from penstock.tasks import bulk
from penstock.tasks.bulk import STATES, BulkWork, Operation
from penstock.tasks.params import BulkParams, BulkRescheduleParams, JobId, JobListParams, read_start


def _work(operation: Operation, given: BulkParams) -> BulkWork:
    filters = ("action", "states", "labels", "older_than", "newer_than", "ids_from", "ids_to", "tenant")
    used = [name for name in filters if getattr(given, name) is not None]
    if given.all and used:
        raise InvalidParams("all", f"means every task, so it goes without {', '.join(used)}")
    if not given.all and not used:
        raise InvalidParams("all", f"is missing: give at least one filter ({', '.join(filters)}) or set all=true")
    for name in ("states", "labels"):
        if getattr(given, name) is not None and not getattr(given, name):
            raise InvalidParams(name, "is empty; leave it out, or say what must fit")
    if given.older_than is not None and given.newer_than is not None and given.newer_than <= given.older_than:
        raise InvalidParams("newer_than", f"must be above older_than, {given.older_than}, not {given.newer_than}")
    if given.ids_from is not None and given.ids_to is not None and int(given.ids_to) < int(given.ids_from):
        raise InvalidParams("ids_to", f"must be at least ids_from, {int(given.ids_from)}, not {int(given.ids_to)}")
    able = STATES[operation]
    for place, state in enumerate(given.states or ()):
        if state not in able:
            raise InvalidParams(f"states[{place}]", f"is {state}; {operation} is about {', '.join(able)}")
    states = list(able if given.states is None else dict.fromkeys(given.states))
    return BulkWork(**msgspec.structs.asdict(given) | {"states": states})


def _read_reschedule(given: BulkRescheduleParams) -> BulkWork:
    run_at = read_start(given)
    if given.run_at is None and given.delay is None:
        if given.priority is None:
            raise InvalidParams("run_at", "or delay or priority must be given, or nothing would change")
        if given.spread:
            raise InvalidParams("spread", f"needs run_at or delay to begin at, not {given.spread} alone")
    if run_at is not None and given.spread and run_at.year > 9000:
        raise InvalidParams("run_at", f"is out of range for a spread: {given.run_at!r}")
    return _work(Operation.RESCHEDULE, given)


def _bulk_method(operation: Operation, summary: str, read: Callable[..., BulkWork] | None = None) -> Method:
    """The method of an operation; the work itself is the supervisor's."""

    def read_filter(given: BulkParams) -> BulkWork:
        return _work(operation, given)

    async def carry_out(context: Context, work: BulkWork) -> BulkStarted | answers.BulkPreview:
        async with context.transaction() as session:
            if work.dry_run:
                return await bulk.preview(session, work)
            job = await bulk.create_job(session, operation, msgspec.json.encode(work))
        log.info("job_made", job=job.id, kind=job.kind)
        return BulkStarted(job=job.id)

    carry_out.__doc__ = summary
    return method(
        operation, permission=Permission.ADMIN, scope=Scope.OWN, read=read or read_filter, narrow=narrow_tenant,
        by_queue=True, dry=lambda work: work.dry_run,
    )(carry_out)  # fmt: skip


cancel = _bulk_method(
    Operation.CANCEL, "Cancel unsettled tasks that match a filter; results that arrive later are ignored."
)
retry = _bulk_method(
    Operation.RETRY,
    "Re-run failed (CRITICAL_ERROR) and CANCELLED tasks that match a filter, with a fresh attempt counter.",
)
delete = _bulk_method(
    Operation.DELETE, "Delete records of settled tasks that match a filter, permanently; their unique keys become free."
)
reschedule = _bulk_method(
    Operation.RESCHEDULE, "Move waiting tasks that match a filter to another time or priority.", _read_reschedule
)


async def _own_job(session: Session, given: JobId) -> answers.Job:
    """Raises JobNotFound, also for a job of tasks that the caller may not see."""
    job = await bulk.read_job(session, int(given.id))
    if not sees(job.params.get("tenant")):
        raise JobNotFound(job.id)
    return job


@method("job.get", permission=Permission.READ, scope=Scope.OWN, errors=(JobNotFound,))
async def get_job(session: Session, given: JobId) -> answers.Job:
    """Show a job: its progress, and the tasks it refused."""
    return await _own_job(session, given)


@method("job.list", permission=Permission.READ, scope=Scope.OWN)
async def list_jobs(session: Session, page: JobListParams) -> JobPage:
    """List jobs, newest first."""
    before = checks.read_cursor(page.cursor)
    jobs = [bulk.job_of(row) for row in await session.fetch("list_jobs", before, page.limit, bound_to())]
    cursor = str(jobs[-1].id) if len(jobs) == page.limit else None
    return JobPage(jobs=jobs, cursor=cursor)


@method("job.cancel", permission=Permission.ADMIN, scope=Scope.OWN, errors=(JobNotFound,), by_queue=True)
async def cancel_job(context: Context, given: JobId) -> answers.Job:
    """Stop a job; changes already made stay."""
    async with context.transaction() as session:
        job = await _own_job(session, given)
        await bulk.end_job(session, job.id, answers.JobState.CANCELLED)
        job = await bulk.read_job(session, job.id)
    log.info("job_cancelled", job=job.id, state=job.state)
    return job
