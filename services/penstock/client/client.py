# Generated from async_client.py by .ci/unasync.py: edit that file, then run `make clients`.
"""The client over HTTP. AsyncClient stands in async_client.py; client.py has the same with blocking calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import Any

import httpx

from penstock.client.http import base_url, http_headers, trace_headers, unreachable
from penstock.client.methods import Answer, Methods, Schedules, WorkflowQueries
from penstock.client.requests import (
    Exchange,
    Params,
    Unfinished,
    answer_of,
    batching,
    calling,
    downloaded,
    enqueueing,
    result_of,
)
from penstock.client.results import Results
from penstock.protocol.errors import PenstockError, Unavailable

_END_STATES = ("SUCCESS", "FAILED", "CANCELLED")


class Client(Methods[Answer]):
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
        self.schedules: Schedules[Answer] = Schedules(self.call)
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

    def actions(self) -> Sequence[dict[str, Any]]:
        """Return the actions that are limited or paused."""
        found: Sequence[dict[str, Any]] = (self.call("action.list"))["actions"]
        return found

    def routes(self) -> Sequence[dict[str, Any]]:
        """Return the routes in the order in which they are tried."""
        found: Sequence[dict[str, Any]] = (self.call("route.list"))["routes"]
        return found

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


class Workflows(WorkflowQueries[Answer]):
    """Workflows over HTTP. Every method raises as those of the client."""

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
