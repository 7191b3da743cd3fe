"""Methods that are one call each, shared by all clients.

`Returned` is what a call returns: an answer for a blocking client, an awaitable answer for asyncio, and an awaitable
None through the inbound queue. `ReturnedList` and `ReturnedAny` are the same for answers that are no object.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, Generic, TypeVar

from penstock.client.exchanges import Exchange, Params, Unfinished, batching, calling, enqueueing
from penstock.client.workflows import Workflow
from penstock.protocol.errors import Unavailable
from penstock.protocol.requests import given, prepared, task_params

Answer = dict[str, Any]
Answers = list[Any]
Value = Any
AsyncAnswer = Coroutine[Any, Any, Answer]
AsyncAnswers = Coroutine[Any, Any, Answers]
AsyncValue = Coroutine[Any, Any, Value]
Returned = TypeVar("Returned")
ReturnedList = TypeVar("ReturnedList")
ReturnedAny = TypeVar("ReturnedAny")
Send = Callable[[str, Params], Returned]
Run = Callable[[Exchange], Returned]


class Methods(Generic[Returned, ReturnedList, ReturnedAny]):
    """Methods of tasks, limits and bulk jobs."""

    def call(self, method: str, params: Params = None) -> Returned:
        """Call any method and return its result."""
        raise NotImplementedError

    def _run(self, exchange: Exchange) -> Any:
        raise NotImplementedError

    def batch(self, calls: Iterable[tuple[str, Params]]) -> ReturnedList:
        """Call several methods with one request; returns each one's result or RpcError, in the order of the calls."""
        results: ReturnedList = self._run(batching(calls))
        return results

    def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> ReturnedList:
        """Add tasks, each a mapping of ``action`` and the other parameters of `enqueue`, with few requests.

        Returns as ``batch`` does. Raises Unfinished, with the tasks that are left, when the api becomes unavailable.
        """
        results: ReturnedList = self._run(enqueueing(tasks))
        return results

    def status(self, task_id: int | Sequence[int], *, detail: bool = False) -> ReturnedAny:
        """Return a task as a dict; for several ids a list, with None for an unknown id.

        detail: with payload, keys, claim and every failed attempt. Raises TaskNotFound for a single id.
        """
        which: dict[str, Any] = {"id": task_id} if isinstance(task_id, int) else {"ids": [*task_id]}
        found: ReturnedAny = self._run(calling("status", which | ({"detail": True} if detail else {})))
        return found

    def actions(self) -> ReturnedList:
        """Return the actions that are limited or paused."""
        found: ReturnedList = self._run(calling("action.list", None, member="actions"))
        return found

    def routes(self) -> ReturnedList:
        """Return the routes in the order in which they are tried."""
        found: ReturnedList = self._run(calling("route.list", None, member="routes"))
        return found

    def enqueue(self, action: str, payload: Any = None, **options: Any) -> Returned:
        """Add a task; it is stored when this returns. Returns ``{"id", "state", "duplicate"}``.

        payload: a JSON object or array, ``{}`` when None; it may hold what a handler may return.
        options: run_at (datetime with a zone, RFC 3339 text or epoch ms) or delay (s), priority, unique_key,
        ordering_key, max_attempts, timeout (s), labels (dict of text), expires_at (as run_at) or expires_in (s),
        limit_key, unique ("retained", "live" or seconds), on_duplicate ("return", "replace" or "error"), tenant.
        Seconds may be a timedelta.
        With "replace" the answer has ``replaced``; with "error" DuplicateTask is raised, its data naming the first.
        """
        return self.call("enqueue", task_params(action, payload, options))

    def cancel(self, task_id: int, *, reason: str | None = None) -> Returned:
        """Cancel a task that is not settled. Raises TaskNotFound, StateConflict."""
        return self.call("cancel", given(id=task_id, reason=reason))

    def complete(self, token: str, result: Any = None, *, tenant: str | None = None) -> Returned:
        """Give a waiting task its result; one that comes before its task waits is kept.

        tenant: of the task, with a token that its handler has chosen.
        Returns ``{"id", "state", "kept", "duplicate"}``. Raises StateConflict, TaskNotFound, TooLarge.
        """
        return self.call("task.complete", given(token=token, tenant=tenant) | {"result": result})

    def fail(
        self,
        token: str,
        error: str | Mapping[str, Any],
        *,
        final: bool = False,
        retry_after: float | None = None,
        tenant: str | None = None,
    ) -> Returned:
        """Fail the attempt of a waiting task, as ``complete`` gives it a result.

        error: text, or an object with message, code and data. final: no more attempts. retry_after: seconds until the
        next one, None for the usual delay.
        """
        params = given(token=token, retry_after=retry_after, tenant=tenant)
        return self.call("task.fail", params | {"error": error, "final": final})

    def reschedule(
        self,
        task_id: int,
        *,
        run_at: datetime | str | int | None = None,
        delay: float | None = None,
        priority: int | None = None,
    ) -> Returned:
        """Move a waiting task to another time or priority. Raises TaskNotFound, StateConflict."""
        params = given(id=task_id, run_at=run_at, delay=delay, priority=priority)
        return self.call("reschedule", prepared(params))

    def ordering_list(self, *, limit: int = 50, cursor: str | None = None) -> Returned:
        """Return a page of ordering keys that a task in CRITICAL_ERROR holds: ``{"keys", "cursor"}``."""
        return self.call("ordering.list", given(limit=limit, cursor=cursor))

    def ordering_release(self, key: str, *, tenant: str | None = None) -> Returned:
        """Release a held ordering key: ``{"key", "released", "next"}``; next: the task that may run now, or None.

        tenant: owner of the key.
        """
        return self.call("ordering.release", given(key=key, tenant=tenant))

    def retry(self, task_id: int) -> Returned:
        """Run a CRITICAL_ERROR or CANCELLED task again, its attempts at 0. Raises TaskNotFound, StateConflict.

        StateConflict also when another task has taken its unique key; ``data["holder"]`` is that task.
        """
        return self.call("retry", {"id": task_id})

    def list(
        self, *, state: str | None = None, action: str | None = None, labels: Mapping[str, str] | None = None,
        key: str | None = None, since: datetime | str | int | None = None, until: datetime | str | int | None = None,
        limit: int = 50, cursor: str | None = None, tenant: str | None = None,
    ) -> Returned:  # fmt: skip
        """Return a page of tasks, newest first: ``{"tasks", "cursor"}``; the last page has the cursor None.

        labels: tasks that have all of them. key: unique or ordering key. since, until: created then or later, and
        before; datetime with a zone, RFC 3339 text or epoch ms.
        """
        params = given(
            state=state, action=action, labels=None if labels is None else dict(labels), key=key, since=since,
            until=until, limit=limit, cursor=cursor, tenant=tenant,
        )  # fmt: skip
        return self.call("list", prepared(params))

    def set_limits(self, action: str, **limits: Any) -> Returned:
        """Limit an action: max_in_flight, rate and burst, the same by limit key with ``key_`` before, and ``per``.

        A limit that is left out stays unchanged; None removes it. Returns the limits in effect.
        """
        return self.call("action.set", {"action": action, **limits})

    def set_tenant_limits(self, tenant: str, **limits: Any) -> Returned:
        """Limit a tenant, or ``*`` for all: max_in_flight, rate and burst, and ``per``. As ``set_limits``."""
        return self.call("tenant.set", {"tenant": tenant, **limits})

    def pause(self, action: str) -> Returned:
        """Stop sending tasks of an action; new ones are still accepted."""
        return self.call("action.pause", {"action": action})

    def resume(self, action: str) -> Returned:
        """Send tasks of an action again."""
        return self.call("action.resume", {"action": action})

    def set_route(
        self, name: str, queue: str, actions: Sequence[str] = ("*",), labels: Mapping[str, str] | None = None,
        position: int = 0,
    ) -> Returned:  # fmt: skip
        """Send tasks of some actions, or with some labels, to a queue of their own."""
        params = {"name": name, "queue": queue, "actions": [*actions], "labels": dict(labels or {})}
        return self.call("route.set", params | {"position": position})

    def delete_route(self, name: str) -> Returned:
        """Delete a route; its waiting tasks take another one, or the outbound queue. Raises RpcError if unknown."""
        return self.call("route.delete", {"name": name})

    def stats(self, *, tenant: str | None = None) -> Returned:
        """Return counts by state and action, rates of the last minute, lag; tenant: only counts and ``at_least``."""
        return self.call("stats", None if tenant is None else {"tenant": tenant})

    def bulk_cancel(self, **filters: Any) -> Returned:
        """Start a job that cancels the tasks of a filter. Returns ``{"job"}``.

        filters: action, states, labels, older_than, newer_than (s), ids_from, ids_to; or ``all=True``. With
        ``dry_run=True`` nothing is changed, and the answer is ``{"count", "exact", "estimate", "sample"}``.
        """
        return self.call("bulk.cancel", filters)

    def bulk_retry(self, **filters: Any) -> Returned:
        """Start a job that retries CRITICAL_ERROR and CANCELLED tasks; filters as of bulk_cancel."""
        return self.call("bulk.retry", filters)

    def bulk_delete(self, **filters: Any) -> Returned:
        """Start a job that deletes the records of settled tasks; filters as of bulk_cancel."""
        return self.call("bulk.delete", filters)

    def bulk_reschedule(self, **filters: Any) -> Returned:
        """Start a job that moves waiting tasks to another time; filters as of bulk_cancel.

        Also takes run_at (as enqueue) or delay (s), spread (s), priority.
        """
        return self.call("bulk.reschedule", prepared(filters))

    def job(self, job_id: int) -> Returned:
        """Return a job as a dict. Raises JobNotFound."""
        return self.call("job.get", {"id": job_id})

    def jobs(self, *, limit: int = 50, cursor: str | None = None) -> Returned:
        """Return a page of jobs, newest first: ``{"jobs", "cursor"}``."""
        return self.call("job.list", {"limit": limit, "cursor": cursor})

    def cancel_job(self, job_id: int) -> Returned:
        """Stop a job; its changes so far stay. Raises JobNotFound."""
        return self.call("job.cancel", {"id": job_id})

    def wait_job(
        self, job_id: int, *, timeout: float | None = None, interval: float = 0.2,
        progress: Callable[[Answer], None] | None = None,
    ) -> Returned:  # fmt: skip
        """Wait until a job has ended and return it, in any end state.

        timeout: seconds; None: unlimited. interval: seconds between two requests. progress: called with the job after
        each request. Raises JobNotFound, and Unfinished, with the job in its results, after the timeout.
        """

        def waiting() -> Exchange:
            deadline = math.inf if timeout is None else monotonic() + timeout
            while True:
                job = yield from calling("job.get", {"id": job_id})
                if progress is not None:
                    progress(job)
                if job["state"] != "RUNNING":
                    return job
                if monotonic() >= deadline:
                    raise Unfinished(f"job {job_id} still runs after {timeout} s", [job], [])
                yield None, interval

        job: Returned = self._run(waiting())
        return job


class ScheduleChanges(Generic[Returned]):
    """Changes of cron schedules, over HTTP or through the inbound queue, which returns no answers."""

    def __init__(self, send: Send[Returned]) -> None:
        self._send = send

    def create(self, name: str, expression: str, action: str, payload: Any = None, **options: Any) -> Returned:
        """Create a schedule; returns it, with its ``next_at``. Through the queue, ``replace=True`` makes it repeatable.

        options: timezone, start_at and end_at (datetime with a zone, RFC 3339 text or epoch ms), jitter (s), missed
        (skip, one, all), max_missed, max_lateness (s), overlap (allow, skip, queue), priority, max_attempts, timeout
        (s), ordering_key, labels, paused, replace, tenant.
        """
        params = given(name=name, expression=expression, action=action, payload=payload)
        return self._send("schedule.create", params | prepared(options))

    def update(self, name: str, **changes: Any) -> Returned:
        """Change the given members, None removes one; returns the schedule."""
        return self._send("schedule.update", {"name": name} | prepared(changes))

    def delete(self, name: str) -> Returned:
        """Delete a schedule; its tasks stay."""
        return self._send("schedule.delete", {"name": name})

    def pause(self, name: str) -> Returned:
        """Stop a schedule until ``resume``; returns it."""
        return self._send("schedule.pause", {"name": name})

    def resume(self, name: str) -> Returned:
        """Continue a schedule from now on; returns it."""
        return self._send("schedule.resume", {"name": name})

    def run_now(self, name: str) -> Returned:
        """Trigger a schedule now, even if paused; returns the run, with its ``task_id``."""
        return self._send("schedule.run_now", {"name": name})


class Schedules(ScheduleChanges[Returned]):
    """Cron schedules over HTTP. Every method raises as those of the client: InvalidParams, RpcError, Unavailable."""

    def get(self, name: str) -> Returned:
        """Return a schedule with its payload and its next few instants."""
        return self._send("schedule.get", {"name": name})

    def list(self, **filters: Any) -> Returned:
        """Return a page of schedules, newest first: ``{"schedules", "cursor"}``.

        filters: labels, action, paused, tenant, limit, cursor.
        """
        return self._send("schedule.list", filters)

    def runs(self, name: str, *, limit: int = 50, cursor: str | None = None) -> Returned:
        """Return a page of its runs, newest first: ``{"runs", "cursor"}``."""
        return self._send("schedule.runs", {"name": name, "limit": limit, "cursor": cursor})

    def create_many(self, schedules: Iterable[Mapping[str, Any]], *, replace: bool = False) -> Returned:
        """Import up to 50,000 schedules, each a mapping as of ``create``; returns ``{"id", "total"}`` at once."""
        params = {"schedules": [prepared(schedule) for schedule in schedules], "replace": replace}
        return self._send("schedule.create_many", params)

    def import_status(self, import_id: int) -> Returned:
        """Return the progress of a ``create_many``, with the first hundred or so refused schedules and the reasons."""
        return self._send("schedule.import_status", {"id": import_id})


class WorkflowChanges(Generic[Returned]):
    """Changes of workflows, over HTTP or through the inbound queue, which returns no answers. A workflow is named by
    its id, or by ``key=`` and, if it belongs to a tenant, ``tenant=``."""

    def __init__(self, send: Send[Returned]) -> None:
        self._send = send

    def create(
        self, workflow: Workflow | None = None, *, chain: Sequence[Any] | None = None, **params: Any
    ) -> Returned:
        """Create a workflow from a `Workflow`, or from a ``chain`` or ``steps`` as the api takes them.

        Returns ``{"id", "state", "duplicate"}``. Raises WorkflowConflict for the key of another definition,
        InvalidParams naming the invalid step. Through the queue give a key, as a send that timed out is repeated; the
        message holds up to 1 MiB.
        """
        if workflow is not None:
            params = workflow.params() | params
        elif chain is not None:
            params["chain"] = [*chain]
        return self._send("workflow.create", params)

    def cancel(
        self, workflow_id: int | None = None, *, key: str | None = None, reason: str | None = None,
        tenant: str | None = None,
    ) -> Returned:  # fmt: skip
        """Cancel the steps that have not ended. Raises WorkflowNotFound, WorkflowConflict."""
        return self._send("workflow.cancel", given(id=workflow_id, key=key, reason=reason, tenant=tenant))

    def retry(self, workflow_id: int | None = None, *, key: str | None = None, tenant: str | None = None) -> Returned:
        """Restart the steps that have not succeeded. Raises WorkflowNotFound, WorkflowConflict."""
        return self._send("workflow.retry", given(id=workflow_id, key=key, tenant=tenant))


class Workflows(WorkflowChanges[Returned]):
    """Workflows over HTTP. Every method raises as those of the client."""

    def __init__(self, send: Send[Returned], run: Run[Returned]) -> None:
        super().__init__(send)
        self._run = run

    def status(
        self, workflow_id: int | None = None, *, key: str | None = None, limit: int = 100, cursor: str | None = None,
        tenant: str | None = None,
    ) -> Returned:  # fmt: skip
        """Return a workflow with counts by state and a page of its steps as ``tree``. Raises WorkflowNotFound."""
        params = given(id=workflow_id, key=key, limit=limit, cursor=cursor, tenant=tenant)
        return self._send("workflow.status", params)

    def list(
        self, *, state: str | None = None, limit: int = 50, cursor: str | None = None, tenant: str | None = None
    ) -> Returned:
        """Return a page of workflows, newest first: ``{"workflows", "cursor"}``."""
        return self._send("workflow.list", given(state=state, limit=limit, cursor=cursor, tenant=tenant))

    def wait(self, workflow_id: int, *, timeout: float | None = None, interval: float = 0.5) -> Returned:
        """Wait until a workflow has ended and return it as ``status`` does.

        timeout: seconds; None: unlimited. interval: seconds between two requests. Raises Unavailable after the timeout.
        """

        def waiting() -> Exchange:
            deadline = math.inf if timeout is None else monotonic() + timeout
            while True:
                workflow = yield from calling("workflow.status", {"id": workflow_id, "limit": 1})
                if workflow["state"] in ("SUCCESS", "FAILED", "CANCELLED"):
                    return (yield from calling("workflow.status", {"id": workflow_id, "limit": 100}))
                if monotonic() >= deadline:
                    raise Unavailable(f"workflow {workflow['id']} is {workflow['state']} after {timeout} s")
                yield None, interval

        return self._run(waiting())
