"""Methods of the api, one declaration each for all clients.

A method returns its call: a request, or an exchange of several. The decorator has the client carry it out, and gives it
the type that this client returns, its ``Way``: the answer of a blocking one, an awaitable answer for asyncio, and
nothing, or an awaitable nothing, through the inbound queue.
"""

import functools
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, Unpack, get_args, overload

from penstock.client.exchanges import Exchange, Params, Request, Unfinished, batching, calling, enqueueing
from penstock.client.workflows import Workflow
from penstock.protocol import answers
from penstock.protocol.errors import RpcError, Unavailable
from penstock.protocol.options import (
    BulkOptions,
    BulkRescheduleOptions,
    EnqueueOptions,
    Instant,
    Labels,
    LimitOptions,
    ScheduleOptions,
    ScheduleUpdates,
    Seconds,
    TenantLimitOptions,
)
from penstock.protocol.record import read, record_in
from penstock.protocol.requests import given, prepared, task_params

P = ParamSpec("P")
T = TypeVar("T")
Way = TypeVar("Way")
Answer = Literal["answer"]
AsyncAnswer = Literal["awaitable answer"]
Nothing = Literal["nothing"]
AsyncNothing = Literal["awaitable nothing"]
Call = Request[T] | Exchange[T]
Bulk = answers.BulkStarted | answers.BulkPreview
Values = list[Any]  # names of their own, for `list` is a method
Enqueued = list[answers.Accepted | RpcError]
Actions = list[answers.Action]
AnnouncedActions = list[answers.AnnouncedAction]
Routes = list[answers.Route]


class Calls(Generic[Way]):
    """A client, or a part of one."""


class Method(Generic[P, T]):
    """What type checkers take a method for."""

    @overload
    def __get__(self, client: Calls[Answer], kind: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Calls[AsyncAnswer], kind: Any = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: Calls[Nothing], kind: Any = None) -> Callable[P, None]: ...
    @overload
    def __get__(self, client: Calls[AsyncNothing], kind: Any = None) -> Callable[P, Coroutine[Any, Any, None]]: ...
    def __get__(self, client: Any, kind: Any = None) -> Any:
        raise NotImplementedError


def method(function: Callable[Concatenate[Any, P], Call[T]]) -> Method[P, T]:
    """Have a client carry out the call that a function returns; the record of a request is that of the annotation."""
    # help() shows the answer, not the call
    function.__annotations__["return"] = answer = get_args(function.__annotations__["return"])[-1]
    record = record_in(answer)

    @functools.wraps(function)
    def run(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        call = function(self, *args, **kwargs)
        return self._run(replace(call, record=record) if isinstance(call, Request) else call)

    return run  # type: ignore[return-value]


class WaitAnswers(Calls[Way]):
    """Answers to waiting tasks, over HTTP or through the inbound queue, which returns nothing."""

    @method
    def complete(self, token: str, result: Any = None, *, tenant: str | None = None) -> Request[answers.Answered]:
        """Give a waiting task its result; one that comes before its task waits is kept.

        tenant: of the task, with a token that its handler has chosen.
        Returns ``{"id", "state", "kept", "duplicate"}``. Raises StateConflict, TaskNotFound, TooLarge.
        """
        return Request("task.complete", given(token=token, tenant=tenant) | {"result": result})

    @method
    def fail(
        self,
        token: str,
        error: str | Mapping[str, Any],
        *,
        final: bool = False,
        retry_after: Seconds | None = None,
        tenant: str | None = None,
    ) -> Request[answers.Answered]:
        """Fail the attempt of a waiting task, as ``complete`` gives it a result.

        error: text, or an object with message, code and data. final: no more attempts. retry_after: seconds until the
        next one, None for the usual delay.
        """
        params = prepared(given(token=token, retry_after=retry_after, tenant=tenant))
        return Request("task.fail", params | {"error": error, "final": final})


class Methods(WaitAnswers[Way]):
    """Methods of tasks, limits and bulk jobs."""

    @method
    def call(self, method: str, params: Params = None) -> Request[Any]:
        """Call any method and return its result, plain dicts and lists."""
        return Request(method, params)

    @method
    def batch(self, calls: Iterable[tuple[str, Params]]) -> Exchange[Values]:
        """Call several methods with one request; returns each one's result or RpcError, in the order of the calls."""
        return batching(calls)

    @method
    def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> Exchange[Enqueued]:
        """Add tasks, each a mapping of ``action`` and the other parameters of `enqueue`, with few requests.

        Returns as ``batch`` does. Raises Unfinished, with the tasks that are left, when the api becomes unavailable.
        """
        return enqueueing(tasks)

    @method
    def actions(self) -> Request[Actions]:
        """Return the actions that are limited or paused."""
        return Request("action.list", None, member="actions")

    @method
    def announced_actions(self) -> Request[AnnouncedActions]:
        """Return the actions that workers announce or announced, with their schemas, and tasks that wait for them."""
        return Request("action.announced", None, member="actions")

    @method
    def routes(self) -> Request[Routes]:
        """Return the routes in the order in which they are tried."""
        return Request("route.list", None, member="routes")

    @method
    def enqueue(self, action: str, payload: Any = None, **options: Unpack[EnqueueOptions]) -> Request[answers.Accepted]:
        """Add a task; it is stored when this returns. Returns ``{"id", "state", "duplicate"}``.

        payload: a JSON object or array, ``{}`` when None; it may hold what a handler may return.
        options: run_at (datetime with a zone, RFC 3339 text or epoch ms) or delay (s), priority, unique_key,
        ordering_key, max_attempts, timeout (s), labels (dict of text), expires_at (as run_at) or expires_in (s),
        limit_key, unique ("retained", "live" or seconds), on_duplicate ("return", "replace" or "error"), tenant.
        Seconds may be a timedelta.
        With "replace" the answer has ``replaced``; with "error" DuplicateTask is raised, its data naming the first.
        """
        return Request("enqueue", task_params(action, payload, options))

    @method
    def explain(self, task_id: int) -> Request[answers.Explanation]:
        """Return why a task does not run, or where it is: ``{"cause", "reason", ...}``. Raises TaskNotFound."""
        return Request("task.explain", {"id": task_id})

    @method
    def cancel(self, task_id: int, *, reason: str | None = None) -> Request[answers.Changed]:
        """Cancel a task that is not settled. Raises TaskNotFound, StateConflict."""
        return Request("cancel", given(id=task_id, reason=reason))

    @method
    def reschedule(
        self,
        task_id: int,
        *,
        run_at: Instant | None = None,
        delay: Seconds | None = None,
        priority: int | None = None,
    ) -> Request[answers.Changed]:
        """Move a waiting task to another time or priority. Raises TaskNotFound, StateConflict."""
        params = given(id=task_id, run_at=run_at, delay=delay, priority=priority)
        return Request("reschedule", prepared(params))

    @method
    def ordering_list(self, *, limit: int = 50, cursor: str | None = None) -> Request[answers.HeldKeys]:
        """Return a page of ordering keys that a task in CRITICAL_ERROR holds: ``{"keys", "cursor"}``."""
        return Request("ordering.list", given(limit=limit, cursor=cursor))

    @method
    def ordering_release(self, key: str, *, tenant: str | None = None) -> Request[answers.ReleasedKey]:
        """Release a held ordering key: ``{"key", "released", "next"}``; next: the task that may run now, or None.

        tenant: owner of the key.
        """
        return Request("ordering.release", given(key=key, tenant=tenant))

    @method
    def retry(self, task_id: int, *, from_step: str | None = None) -> Request[answers.Changed]:
        """Run a CRITICAL_ERROR or CANCELLED task again, its attempts at 0. Raises TaskNotFound, StateConflict.

        StateConflict also when another task has taken its unique key; ``data["holder"]`` is that task.
        """
        return Request("retry", given(id=task_id, from_step=from_step))

    @method
    def list(
        self, *, state: str | None = None, action: str | None = None, labels: Labels | None = None,
        key: str | None = None, since: Instant | None = None, until: Instant | None = None,
        limit: int = 50, cursor: str | None = None, tenant: str | None = None, text: str | None = None,
    ) -> Request[answers.TaskPage]:  # fmt: skip
        """Return a page of tasks, newest first: ``{"tasks", "cursor"}``; the last page has the cursor None.

        labels: tasks that have all of them. key: unique or ordering key. since, until: created then or later, and
        before; datetime with a zone, RFC 3339 text or epoch ms. text: in payload or errors; a page covers 2,000 tasks
        and may be empty.
        """
        params = given(
            state=state, action=action, labels=None if labels is None else dict(labels), key=key, since=since,
            until=until, limit=limit, cursor=cursor, tenant=tenant, text=text,
        )  # fmt: skip
        return Request("list", prepared(params))

    @method
    def set_limits(self, action: str, **limits: Unpack[LimitOptions]) -> Request[answers.Action]:
        """Limit an action: max_in_flight, rate and burst, the same by limit key with ``key_`` before, and ``per``.

        A limit that is left out stays unchanged; None removes it. Returns the limits in effect.
        """
        return Request("action.set", {"action": action, **limits})

    @method
    def set_tenant_limits(self, tenant: str, **limits: Unpack[TenantLimitOptions]) -> Request[answers.TenantDetail]:
        """Limit a tenant, or ``*`` for all: max_in_flight, rate and burst, and ``per``. As ``set_limits``."""
        return Request("tenant.set", {"tenant": tenant, **limits})

    @method
    def pause(self, action: str) -> Request[answers.Action]:
        """Stop sending tasks of an action; new ones are still accepted."""
        return Request("action.pause", {"action": action})

    @method
    def resume(self, action: str) -> Request[answers.Action]:
        """Send tasks of an action again."""
        return Request("action.resume", {"action": action})

    @method
    def set_route(
        self, name: str, queue: str, actions: Sequence[str] = ("*",), labels: Labels | None = None,
        position: int = 0,
    ) -> Request[answers.RouteChanged]:  # fmt: skip
        """Send tasks of some actions, or with some labels, to a queue of their own."""
        params = {"name": name, "queue": queue, "actions": [*actions], "labels": dict(labels or {})}
        return Request("route.set", params | {"position": position})

    @method
    def delete_route(self, name: str) -> Request[answers.RouteChanged]:
        """Delete a route; its waiting tasks take another one, or the outbound queue. Raises RpcError if unknown."""
        return Request("route.delete", {"name": name})

    @method
    def bulk_cancel(self, **filters: Unpack[BulkOptions]) -> Exchange[Bulk]:
        """Start a job that cancels the tasks of a filter. Returns ``{"job"}``.

        filters: action, states, labels, older_than, newer_than (s), ids_from, ids_to; or ``all=True``. With
        ``dry_run=True`` nothing is changed, and the answer is ``{"count", "exact", "estimate", "sample"}``.
        """
        return _bulk("bulk.cancel", filters)

    @method
    def bulk_retry(self, **filters: Unpack[BulkOptions]) -> Exchange[Bulk]:
        """Start a job that retries CRITICAL_ERROR and CANCELLED tasks; filters as of bulk_cancel."""
        return _bulk("bulk.retry", filters)

    @method
    def bulk_delete(self, **filters: Unpack[BulkOptions]) -> Exchange[Bulk]:
        """Start a job that deletes the records of settled tasks; filters as of bulk_cancel."""
        return _bulk("bulk.delete", filters)

    @method
    def bulk_reschedule(self, **filters: Unpack[BulkRescheduleOptions]) -> Exchange[Bulk]:
        """Start a job that moves waiting tasks to another time; filters as of bulk_cancel.

        Also takes run_at (as enqueue) or delay (s), spread (s), priority.
        """
        return _bulk("bulk.reschedule", filters)

    @method
    def job(self, job_id: int) -> Request[answers.Job]:
        """Return a job as a dict. Raises JobNotFound."""
        return Request("job.get", {"id": job_id})

    @method
    def jobs(self, *, limit: int = 50, cursor: str | None = None) -> Request[answers.JobPage]:
        """Return a page of jobs, newest first: ``{"jobs", "cursor"}``."""
        return Request("job.list", {"limit": limit, "cursor": cursor})

    @method
    def cancel_job(self, job_id: int) -> Request[answers.Job]:
        """Stop a job; its changes so far stay. Raises JobNotFound."""
        return Request("job.cancel", {"id": job_id})

    @method
    def wait_job(
        self, job_id: int, *, timeout: float | None = None, interval: float = 0.2,
        progress: Callable[[answers.Job], None] | None = None,
    ) -> Exchange[answers.Job]:  # fmt: skip
        """Wait until a job has ended and return it, in any end state.

        timeout: seconds; None: unlimited. interval: seconds between two requests. progress: called with the job after
        each request. Raises JobNotFound, and Unfinished, with the job in its results, after the timeout.
        """
        deadline = math.inf if timeout is None else monotonic() + timeout
        while True:
            job: answers.Job = read(answers.Job, (yield from calling("job.get", {"id": job_id})))
            if progress is not None:
                progress(job)
            if job.state != "RUNNING":
                return job
            if monotonic() >= deadline:
                raise Unfinished(f"job {job_id} still runs after {timeout} s", [job], [])
            yield None, interval


def _bulk(name: str, filters: Mapping[str, Any]) -> Exchange[Bulk]:
    answer = yield from calling(name, prepared(filters))
    bulk: Bulk = read(answers.BulkStarted if "job" in answer else answers.BulkPreview, answer)
    return bulk


class _Part(Calls[Way]):
    """A part of a client. run: the client's own, which carries out calls."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run


class ScheduleChanges(_Part[Way]):
    """Changes of cron schedules, over HTTP or through the inbound queue, which returns no answers."""

    @method
    def create(
        self, name: str, expression: str, action: str, payload: Any = None, *, replace: bool = False,
        **options: Unpack[ScheduleOptions],
    ) -> Request[answers.ScheduleDetail]:  # fmt: skip
        """Create a schedule; returns it, with its ``next_at``. Through the queue, ``replace=True`` makes it repeatable.

        options: timezone, start_at and end_at (datetime with a zone, RFC 3339 text or epoch ms), jitter (s), missed
        (skip, one, all), max_missed, max_lateness (s), overlap (allow, skip, queue), priority, max_attempts, timeout
        (s), ordering_key, labels, paused, tenant. replace: an existing one of that name becomes this one.
        """
        params = given(name=name, expression=expression, action=action, payload=payload, replace=replace or None)
        return Request("schedule.create", params | prepared(options))

    @method
    def update(self, name: str, **changes: Unpack[ScheduleUpdates]) -> Request[answers.ScheduleDetail]:
        """Change the given members, None removes one; returns the schedule."""
        return Request("schedule.update", {"name": name} | prepared(changes))

    @method
    def delete(self, name: str) -> Request[answers.ScheduleDeleted]:
        """Delete a schedule; its tasks stay."""
        return Request("schedule.delete", {"name": name})

    @method
    def pause(self, name: str) -> Request[answers.ScheduleDetail]:
        """Stop a schedule until ``resume``; returns it."""
        return Request("schedule.pause", {"name": name})

    @method
    def resume(self, name: str) -> Request[answers.ScheduleDetail]:
        """Continue a schedule from now on; returns it."""
        return Request("schedule.resume", {"name": name})

    @method
    def run_now(self, name: str) -> Request[answers.ScheduleRun]:
        """Trigger a schedule now, even if paused; returns the run, with its ``task_id``."""
        return Request("schedule.run_now", {"name": name})


class ScheduleMethods(ScheduleChanges[Way]):
    """Cron schedules over HTTP. Every method raises as those of the client: InvalidParams, RpcError, Unavailable."""

    @method
    def get(self, name: str) -> Request[answers.ScheduleDetail]:
        """Return a schedule with its payload and its next few instants."""
        return Request("schedule.get", {"name": name})

    @method
    def list(
        self, *, labels: Labels | None = None, action: str | None = None, paused: bool | None = None,
        tenant: str | None = None, limit: int = 50, cursor: str | None = None,
    ) -> Request[answers.SchedulePage]:  # fmt: skip
        """Return a page of schedules, newest first: ``{"schedules", "cursor"}``."""
        filters = given(labels=labels, action=action, paused=paused, tenant=tenant, limit=limit, cursor=cursor)
        return Request("schedule.list", filters)

    @method
    def runs(self, name: str, *, limit: int = 50, cursor: str | None = None) -> Request[answers.SchedulePageOfRuns]:
        """Return a page of its runs, newest first: ``{"runs", "cursor"}``."""
        return Request("schedule.runs", {"name": name, "limit": limit, "cursor": cursor})

    @method
    def create_many(
        self, schedules: Iterable[Mapping[str, Any]], *, replace: bool = False
    ) -> Request[answers.ImportStarted]:
        """Import up to 50,000 schedules, each a mapping as of ``create``; returns ``{"id", "total"}`` at once."""
        params = {"schedules": [prepared(schedule) for schedule in schedules], "replace": replace}
        return Request("schedule.create_many", params)

    @method
    def import_status(self, import_id: int) -> Request[answers.ImportStatus]:
        """Return the progress of a ``create_many``, with the first hundred or so refused schedules and the reasons."""
        return Request("schedule.import_status", {"id": import_id})


class WorkflowChanges(_Part[Way]):
    """Changes of workflows, over HTTP or through the inbound queue, which returns no answers. A workflow is named by
    its id, or by ``key=`` and, if it belongs to a tenant, ``tenant=``."""

    @method
    def create(
        self, workflow: Workflow | None = None, *, steps: Sequence[Any] | None = None,
        chain: Sequence[Any] | None = None, name: str | None = None, key: str | None = None, tenant: str | None = None,
    ) -> Request[answers.WorkflowAccepted]:  # fmt: skip
        """Create a workflow from a `Workflow`, or from a ``chain`` or ``steps`` as the api takes them.

        Returns ``{"id", "state", "duplicate"}``. Raises WorkflowConflict for the key of another definition,
        InvalidParams naming the invalid step. Through the queue give a key, as a send that timed out is repeated; the
        message holds up to 1 MiB.
        """
        params = given(steps=steps, chain=chain, name=name, key=key, tenant=tenant)
        return Request("workflow.create", ({} if workflow is None else workflow.params()) | params)

    @method
    def cancel(
        self, workflow_id: int | None = None, *, key: str | None = None, reason: str | None = None,
        tenant: str | None = None,
    ) -> Request[answers.WorkflowChanged]:  # fmt: skip
        """Cancel the steps that have not ended. Raises WorkflowNotFound, WorkflowConflict."""
        return Request("workflow.cancel", given(id=workflow_id, key=key, reason=reason, tenant=tenant))

    @method
    def retry(
        self, workflow_id: int | None = None, *, key: str | None = None, tenant: str | None = None
    ) -> Request[answers.WorkflowChanged]:
        """Restart the steps that have not succeeded. Raises WorkflowNotFound, WorkflowConflict."""
        return Request("workflow.retry", given(id=workflow_id, key=key, tenant=tenant))


class WorkflowMethods(WorkflowChanges[Way]):
    """Workflows over HTTP. Every method raises as those of the client."""

    @method
    def status(
        self, workflow_id: int | None = None, *, key: str | None = None, limit: int = 100, cursor: str | None = None,
        tenant: str | None = None,
    ) -> Request[answers.WorkflowDetail]:  # fmt: skip
        """Return a workflow with counts by state and a page of its steps as ``tree``. Raises WorkflowNotFound."""
        params = given(id=workflow_id, key=key, limit=limit, cursor=cursor, tenant=tenant)
        return Request("workflow.status", params)

    @method
    def list(
        self, *, state: str | None = None, limit: int = 50, cursor: str | None = None, tenant: str | None = None
    ) -> Request[answers.WorkflowPage]:
        """Return a page of workflows, newest first: ``{"workflows", "cursor"}``."""
        return Request("workflow.list", given(state=state, limit=limit, cursor=cursor, tenant=tenant))

    @method
    def wait(
        self, workflow_id: int, *, timeout: float | None = None, interval: float = 0.5
    ) -> Exchange[answers.WorkflowDetail]:
        """Wait until a workflow has ended and return it as ``status`` does.

        timeout: seconds; None: unlimited. interval: seconds between two requests. Raises Unavailable after the timeout.
        """
        deadline = math.inf if timeout is None else monotonic() + timeout
        while True:
            workflow = yield from calling("workflow.status", {"id": workflow_id, "limit": 1})
            if workflow["state"] in ("SUCCESS", "FAILED", "CANCELLED"):
                found = yield from calling("workflow.status", {"id": workflow_id, "limit": 100})
                detail: answers.WorkflowDetail = read(answers.WorkflowDetail, found)
                return detail
            if monotonic() >= deadline:
                raise Unavailable(f"workflow {workflow['id']} is {workflow['state']} after {timeout} s")
            yield None, interval
