# Generated from async_client.py by .ci/unasync.py: edit that file, then run `make clients`.
"""The client over HTTP. AsyncClient stands in async_client.py; client.py has the same with blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Any, Generic

import httpx

from penstock.client.http import base_url, http_headers, trace_headers, unreachable
from penstock.client.requests import (
    Answer,
    Exchange,
    Params,
    Send,
    Unfinished,
    answer_of,
    batching,
    calling,
    downloaded,
    enqueueing,
    given,
    result_of,
)
from penstock.client.results import Results
from penstock.client.workflows import Workflow
from penstock.protocol.errors import PenstockError, Unavailable
from penstock.protocol.requests import prepared, task_params

_END_STATES = ("SUCCESS", "FAILED", "CANCELLED")


class Client:
    """The api's methods over HTTP. `Client` blocks and is safe to share between threads; `AsyncClient` is for asyncio,
    within one event loop, and awaits any number of results by one long poll for each thousand tasks.

    url: base of the api, or its ``/rpc``; None for PENSTOCK_API_URL, else http://127.0.0.1:8080. api_key: None for
    PENSTOCK_API_KEY, "" to send none. timeout: seconds for one call. Use it in a ``with`` block, or call ``close``.
    Every method raises RpcError (or TaskNotFound, InvalidParams and the like) for an error that the api answers, and
    Unavailable when the api cannot be reached or has lost its database. schedules: the methods of cron schedules;
    workflows: those of workflows.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, timeout: float = 30) -> None:
        self.url = base_url(url)
        self.schedules = Schedules(self.call)
        self.workflows = Workflows(self.call)
        self._timeout = timeout
        # Retries a refused connection only, when nothing was sent yet; anything later could be done twice.
        transport = httpx.HTTPTransport(retries=1)
        self._http = httpx.Client(headers=http_headers(api_key), transport=transport)
        self._results = Results(self._ask_results, timeout)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; results that are still awaited raise CancelledError."""
        self._results.close()
        self._http.close()

    def call(self, method: str, params: Params = None) -> Any:
        """Call any method and return its result."""
        return self._run(calling(method, params))

    def batch(self, calls: Iterable[tuple[str, Params]]) -> list[Any]:
        """Call several methods with one request; returns each one's result or RpcError, in the order of the calls."""
        results: list[Any] = self._run(batching(calls))
        return results

    def enqueue(self, action: str, payload: Any = None, **options: Any) -> dict[str, Any]:
        """Add a task; it is stored when this returns. Returns ``{"id", "state", "duplicate"}``.

        payload: a JSON object or array, ``{}`` when None; it may hold what a handler may return.
        options: run_at (datetime with a zone, RFC 3339 text or epoch ms) or delay (s), priority, unique_key,
        ordering_key, max_attempts, timeout (s), labels (dict of text), expires_at (as run_at) or expires_in (s),
        limit_key, unique ("retained", "live" or seconds), on_duplicate ("return", "replace" or "error"), tenant.
        Seconds may be a timedelta.
        With "replace" the answer has ``replaced``; with "error" DuplicateTask is raised, its data naming the first.
        """
        return self._dict("enqueue", task_params(action, payload, options))

    def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Add tasks, each a mapping of ``action`` and the other parameters of `enqueue`, with few requests.

        Returns as ``batch`` does. Raises Unfinished, with the tasks that are left, when the api becomes unavailable.
        """
        results: list[Any] = self._run(enqueueing(tasks))
        return results

    def result(self, task_id: int, *, timeout: float | None = None) -> Any:
        """Wait until a task has settled and return its result, by long polls.

        timeout: seconds; None: unlimited. Raises TaskNotFound; TaskFailed for a CRITICAL_ERROR, ResultCancelled for a
        CANCELLED task, ResultGone when retention has deleted the result; ResultTimeout, a TimeoutError, with the last
        state; and Unavailable when the api is unavailable for longer than the timeout of a call.
        """
        outcome = self._results.outcome(task_id, timeout)
        return self.download(task_id, "result") if outcome.get("result_unread") else result_of(outcome)

    def download(self, task_id: int, what: str) -> Any:
        """Return a task's "payload" or "result", of any size. Raises TaskNotFound, Unavailable, PayloadLost."""
        try:
            response = self._http.get(f"{self.url}/tasks/{task_id}/{what}", timeout=self._timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise unreachable(self.url, exc) from exc
        return downloaded(response.status_code, response.content)

    def status(self, task_id: int | Sequence[int], *, detail: bool = False) -> Any:
        """Return a task as a dict; for several ids a list, with None for an unknown id.

        detail: with payload, keys, claim and every failed attempt. Raises TaskNotFound for a single id.
        """
        which: dict[str, Any] = {"id": task_id} if isinstance(task_id, int) else {"ids": [*task_id]}
        return self.call("status", which | ({"detail": True} if detail else {}))

    def cancel(self, task_id: int, *, reason: str | None = None) -> dict[str, Any]:
        """Cancel a task that is not settled. Raises TaskNotFound, StateConflict."""
        return self._dict("cancel", given(id=task_id, reason=reason))

    def complete(self, token: str, result: Any = None, *, tenant: str | None = None) -> dict[str, Any]:
        """Give a waiting task its result; one that comes before its task waits is kept.

        tenant: of the task, with a token that its handler has chosen.
        Returns ``{"id", "state", "kept", "duplicate"}``. Raises StateConflict, TaskNotFound, TooLarge.
        """
        return self._dict("task.complete", given(token=token, tenant=tenant) | {"result": result})

    def fail(
        self,
        token: str,
        error: str | Mapping[str, Any],
        *,
        final: bool = False,
        retry_after: float | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:
        """Fail the attempt of a waiting task, as ``complete`` gives it a result.

        error: text, or an object with message, code and data. final: no more attempts. retry_after: seconds until the
        next one, None for the usual delay.
        """
        params = given(token=token, retry_after=retry_after, tenant=tenant)
        return self._dict("task.fail", params | {"error": error, "final": final})

    def reschedule(
        self,
        task_id: int,
        *,
        run_at: datetime | str | int | None = None,
        delay: float | None = None,
        priority: int | None = None,
    ) -> dict[str, Any]:
        """Move a waiting task to another time or priority. Raises TaskNotFound, StateConflict."""
        params = given(id=task_id, run_at=run_at, delay=delay, priority=priority)
        return self._dict("reschedule", prepared(params))

    def ordering_list(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """Return a page of ordering keys that a task in CRITICAL_ERROR holds: ``{"keys", "cursor"}``."""
        return self._dict("ordering.list", given(limit=limit, cursor=cursor))

    def ordering_release(self, key: str, *, tenant: str | None = None) -> dict[str, Any]:
        """Release a held ordering key: ``{"key", "released", "next"}``; next: the task that may run now, or None.

        tenant: owner of the key.
        """
        return self._dict("ordering.release", given(key=key, tenant=tenant))

    def retry(self, task_id: int) -> dict[str, Any]:
        """Run a CRITICAL_ERROR or CANCELLED task again, its attempts at 0. Raises TaskNotFound, StateConflict.

        StateConflict also when another task has taken its unique key; ``data["holder"]`` is that task.
        """
        return self._dict("retry", {"id": task_id})

    def list(
        self, *, state: str | None = None, action: str | None = None, labels: Mapping[str, str] | None = None,
        key: str | None = None, since: datetime | str | int | None = None, until: datetime | str | int | None = None,
        limit: int = 50, cursor: str | None = None, tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return a page of tasks, newest first: ``{"tasks", "cursor"}``; the last page has the cursor None.

        labels: tasks that have all of them. key: unique or ordering key. since, until: created then or later, and
        before; datetime with a zone, RFC 3339 text or epoch ms.
        """
        params = given(
            state=state, action=action, labels=None if labels is None else dict(labels), key=key, since=since,
            until=until, limit=limit, cursor=cursor, tenant=tenant,
        )  # fmt: skip
        return self._dict("list", prepared(params))

    def set_limits(self, action: str, **limits: Any) -> dict[str, Any]:
        """Limit an action: max_in_flight, rate and burst, the same by limit key with ``key_`` before, and ``per``.

        A limit that is left out stays unchanged; None removes it. Returns the limits in effect.
        """
        return self._dict("action.set", {"action": action, **limits})

    def set_tenant_limits(self, tenant: str, **limits: Any) -> dict[str, Any]:
        """Limit a tenant, or ``*`` for all: max_in_flight, rate and burst, and ``per``. As ``set_limits``."""
        return self._dict("tenant.set", {"tenant": tenant, **limits})

    def pause(self, action: str) -> dict[str, Any]:
        """Stop sending tasks of an action; new ones are still accepted."""
        return self._dict("action.pause", {"action": action})

    def resume(self, action: str) -> dict[str, Any]:
        """Send tasks of an action again."""
        return self._dict("action.resume", {"action": action})

    def actions(self) -> Sequence[dict[str, Any]]:
        """Return the actions that are limited or paused."""
        found: Sequence[dict[str, Any]] = (self.call("action.list"))["actions"]
        return found

    def set_route(
        self, name: str, queue: str, actions: Sequence[str] = ("*",), labels: Mapping[str, str] | None = None,
        position: int = 0,
    ) -> None:  # fmt: skip
        """Send tasks of some actions, or with some labels, to a queue of their own."""
        params = {"name": name, "queue": queue, "actions": [*actions], "labels": dict(labels or {})}
        self.call("route.set", params | {"position": position})

    def delete_route(self, name: str) -> None:
        """Delete a route; its waiting tasks take another one, or the outbound queue. Raises RpcError if unknown."""
        self.call("route.delete", {"name": name})

    def routes(self) -> Sequence[dict[str, Any]]:
        """Return the routes in the order in which they are tried."""
        found: Sequence[dict[str, Any]] = (self.call("route.list"))["routes"]
        return found

    def stats(self, *, tenant: str | None = None) -> dict[str, Any]:
        """Return counts by state and action, rates of the last minute, lag; tenant: only counts and ``at_least``."""
        return self._dict("stats", None if tenant is None else {"tenant": tenant})

    def bulk_cancel(self, **filters: Any) -> dict[str, Any]:
        """Start a job that cancels the tasks of a filter. Returns ``{"job"}``.

        filters: action, states, labels, older_than, newer_than (s), ids_from, ids_to; or ``all=True``. With
        ``dry_run=True`` nothing is changed, and the answer is ``{"count", "exact", "estimate", "sample"}``.
        """
        return self._dict("bulk.cancel", filters)

    def bulk_retry(self, **filters: Any) -> dict[str, Any]:
        """Start a job that retries CRITICAL_ERROR and CANCELLED tasks; filters as of bulk_cancel."""
        return self._dict("bulk.retry", filters)

    def bulk_delete(self, **filters: Any) -> dict[str, Any]:
        """Start a job that deletes the records of settled tasks; filters as of bulk_cancel."""
        return self._dict("bulk.delete", filters)

    def bulk_reschedule(self, **filters: Any) -> dict[str, Any]:
        """Start a job that moves waiting tasks to another time; filters as of bulk_cancel.

        Also takes run_at (as enqueue) or delay (s), spread (s), priority.
        """
        return self._dict("bulk.reschedule", prepared(filters))

    def job(self, job_id: int) -> dict[str, Any]:
        """Return a job as a dict. Raises JobNotFound."""
        return self._dict("job.get", {"id": job_id})

    def jobs(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """Return a page of jobs, newest first: ``{"jobs", "cursor"}``."""
        return self._dict("job.list", {"limit": limit, "cursor": cursor})

    def cancel_job(self, job_id: int) -> dict[str, Any]:
        """Stop a job; its changes so far stay. Raises JobNotFound."""
        return self._dict("job.cancel", {"id": job_id})

    def wait_job(
        self,
        job_id: int,
        *,
        timeout: float | None = None,
        interval: float = 0.2,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Wait until a job has ended and return it, in any end state.

        timeout: seconds; None: unlimited. interval: seconds between two requests. progress: called with the job after
        each request. Raises JobNotFound, and Unfinished, with the job in its results, after the timeout.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            job = self.job(job_id)
            if progress is not None:
                progress(job)
            if job["state"] != "RUNNING":
                return job
            if deadline is not None and monotonic() >= deadline:
                raise Unfinished(f"job {job_id} still runs after {timeout} s", [job], [])
            time.sleep(interval)

    def _dict(self, method: str, params: Params) -> dict[str, Any]:
        answer: dict[str, Any] = self.call(method, params)
        return answer

    def _ask_results(self, params: dict[str, Any], extra_seconds: float) -> Any:
        return self._run(calling("result", params), extra_seconds)

    def _run(self, exchange: Exchange, extra_seconds: float = 0.0) -> Any:
        """Run a request/response exchange. extra_seconds: additional timeout."""
        try:
            body = next(exchange)
            while True:
                try:
                    answer = self._post(body, extra_seconds)
                except PenstockError as exc:
                    body = exchange.throw(exc)
                else:
                    body = exchange.send(answer)
        except StopIteration as end:
            return end.value

    def _post(self, body: str, extra_seconds: float) -> Any:
        try:
            response = self._http.post(
                f"{self.url}/rpc", content=body, timeout=self._timeout + extra_seconds, headers=trace_headers()
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise unreachable(self.url, exc) from exc
        return answer_of(self.url, response.status_code, response.content)


class ScheduleChanges(Generic[Answer]):
    """Changes of cron schedules, over HTTP or through the inbound queue, which returns no answers."""

    def __init__(self, send: Send[Answer]) -> None:
        self._send = send

    def create(self, name: str, expression: str, action: str, payload: Any = None, **options: Any) -> Answer:
        """Create a schedule; returns it, with its ``next_at``. Through the queue, ``replace=True`` makes it repeatable.

        options: timezone, start_at and end_at (datetime with a zone, RFC 3339 text or epoch ms), jitter (s), missed
        (skip, one, all), max_missed, max_lateness (s), overlap (allow, skip, queue), priority, max_attempts, timeout
        (s), ordering_key, labels, paused, replace, tenant.
        """
        params = given(name=name, expression=expression, action=action, payload=payload)
        return self._send("schedule.create", params | prepared(options))

    def update(self, name: str, **changes: Any) -> Answer:
        """Change the given members, None removes one; returns the schedule."""
        return self._send("schedule.update", {"name": name} | prepared(changes))

    def delete(self, name: str) -> Answer:
        """Delete a schedule; its tasks stay."""
        return self._send("schedule.delete", {"name": name})

    def pause(self, name: str) -> Answer:
        """Stop a schedule until ``resume``; returns it."""
        return self._send("schedule.pause", {"name": name})

    def resume(self, name: str) -> Answer:
        """Continue a schedule from now on; returns it."""
        return self._send("schedule.resume", {"name": name})

    def run_now(self, name: str) -> Answer:
        """Trigger a schedule now, even if paused; returns the run, with its ``task_id``."""
        return self._send("schedule.run_now", {"name": name})


class Schedules(ScheduleChanges[dict[str, Any]]):
    """Cron schedules over HTTP. Every method raises as those of the client: InvalidParams, RpcError, Unavailable."""

    def get(self, name: str) -> dict[str, Any]:
        """Return a schedule with its payload and its next few instants."""
        return self._send("schedule.get", {"name": name})

    def list(self, **filters: Any) -> dict[str, Any]:
        """Return a page of schedules, newest first: ``{"schedules", "cursor"}``.

        filters: labels, action, paused, tenant, limit, cursor.
        """
        return self._send("schedule.list", filters)

    def runs(self, name: str, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """Return a page of its runs, newest first: ``{"runs", "cursor"}``."""
        return self._send("schedule.runs", {"name": name, "limit": limit, "cursor": cursor})

    def create_many(self, schedules: Iterable[Mapping[str, Any]], *, replace: bool = False) -> dict[str, Any]:
        """Import up to 50,000 schedules, each a mapping as of ``create``; returns ``{"id", "total"}`` at once."""
        params = {"schedules": [prepared(schedule) for schedule in schedules], "replace": replace}
        return self._send("schedule.create_many", params)

    def import_status(self, import_id: int) -> dict[str, Any]:
        """Return the progress of a ``create_many``, with the first hundred or so refused schedules and the reasons."""
        return self._send("schedule.import_status", {"id": import_id})


class WorkflowChanges(Generic[Answer]):
    """Changes of workflows, over HTTP or through the inbound queue, which returns no answers. A workflow is named by
    its id, or by ``key=`` and, if it belongs to a tenant, ``tenant=``."""

    def __init__(self, send: Send[Answer]) -> None:
        self._send = send

    def create(self, workflow: Workflow | None = None, *, chain: Sequence[Any] | None = None, **params: Any) -> Answer:
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
    ) -> Answer:  # fmt: skip
        """Cancel the steps that have not ended. Raises WorkflowNotFound, WorkflowConflict."""
        return self._send("workflow.cancel", given(id=workflow_id, key=key, reason=reason, tenant=tenant))

    def retry(self, workflow_id: int | None = None, *, key: str | None = None, tenant: str | None = None) -> Answer:
        """Restart the steps that have not succeeded. Raises WorkflowNotFound, WorkflowConflict."""
        return self._send("workflow.retry", given(id=workflow_id, key=key, tenant=tenant))


class Workflows(WorkflowChanges[dict[str, Any]]):
    """Workflows over HTTP. Every method raises as those of the client."""

    def status(
        self, workflow_id: int | None = None, *, key: str | None = None, limit: int = 100, cursor: str | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return a workflow with counts by state and a page of its steps as ``tree``. Raises WorkflowNotFound."""
        params = given(id=workflow_id, key=key, limit=limit, cursor=cursor, tenant=tenant)
        return self._send("workflow.status", params)

    def list(
        self, *, state: str | None = None, limit: int = 50, cursor: str | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """Return a page of workflows, newest first: ``{"workflows", "cursor"}``."""
        return self._send("workflow.list", given(state=state, limit=limit, cursor=cursor, tenant=tenant))

    def wait(self, workflow_id: int, *, timeout: float | None = None, interval: float = 0.5) -> dict[str, Any]:
        """Wait until a workflow has ended and return it as ``status`` does.

        timeout: seconds; None: unlimited. interval: seconds between two requests. Raises Unavailable after the timeout.
        """
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            workflow = self.status(workflow_id, limit=1)
            if workflow["state"] in _END_STATES:
                return self.status(workflow_id)
            if deadline is not None and monotonic() >= deadline:
                raise Unavailable(f"workflow {workflow['id']} is {workflow['state']} after {timeout} s")
            time.sleep(interval)
