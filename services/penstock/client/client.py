# Generated from async_client.py by .ci/unasync.py: edit that file, then run `make clients`.
"""The client over HTTP. AsyncClient stands in async_client.py; client.py has the same with blocking calls."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, TypeVar, overload

import httpx

from penstock.client import exchanges
from penstock.client.exchanges import Exchange, Request
from penstock.client.methods import Answer, Methods, ScheduleMethods, WorkflowMethods
from penstock.client.results import Results
from penstock.protocol import answers, in_process
from penstock.protocol.errors import MethodNotFound, PenstockError

T = TypeVar("T")
EVENTS_SILENT_SECONDS = 45.0  # the api sends something every few seconds, older ones every fifteen


class Client(Methods[Answer]):
    """The api's methods over HTTP. `Client` blocks and is safe to share between threads; `AsyncClient` is for asyncio,
    within one event loop, and awaits any number of results by one long poll for each thousand tasks.

    url: base of the api, or its ``/rpc``; None for PENSTOCK_API_URL, else http://127.0.0.1:8080. api_key: None for
    PENSTOCK_API_KEY, "" to send none. timeout: seconds for one call. Use it in a ``with`` block, or call ``close``.
    Every method raises RpcError (or TaskNotFound, InvalidParams and the like) for an error that the api answers, and
    Unavailable when the api cannot be reached or has lost its database.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, timeout: float = 30) -> None:
        self.url, auth = exchanges.address_of(url)
        self.schedules: ScheduleMethods[Answer] = ScheduleMethods(self._run)
        self.workflows: WorkflowMethods[Answer] = WorkflowMethods(self._run)
        self._timeout = timeout
        # Retries a refused connection only, when nothing was sent yet; anything later could be done twice.
        transport = httpx.HTTPTransport(retries=1, limits=exchanges.LIMITS)
        self._http = httpx.Client(auth=auth, headers=exchanges.http_headers(api_key), transport=transport)
        self._results = Results(self._run, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; results that are still awaited raise CancelledError."""
        self._results.close()
        self._http.close()

    @overload
    def status(self, task_id: int, *, detail: Literal[True]) -> answers.TaskDetail: ...
    @overload
    def status(self, task_id: int, *, detail: bool = False) -> answers.Task: ...
    @overload
    def status(self, task_id: Sequence[int], *, detail: bool = False) -> list[answers.Task | None]: ...
    def status(self, task_id: int | Sequence[int], *, detail: bool = False) -> Any:
        """Return a task; for several ids a list, with None for an unknown id.

        detail: with payload, keys, claim and every failed attempt. Raises TaskNotFound for a single id.
        """
        which = {"id": task_id} if isinstance(task_id, int) else {"ids": [*task_id]}
        kind = answers.TaskDetail if detail else answers.Task
        return self._run(Request("status", which | ({"detail": True} if detail else {}), kind))

    @overload
    def stats(self, *, tenant: None = None) -> answers.Statistics: ...
    @overload
    def stats(self, *, tenant: str) -> answers.TenantStatistics: ...
    def stats(self, *, tenant: str | None = None) -> Any:
        """Return counts by state and action, rates of the last minute, lag; tenant: only counts and ``at_least``."""
        if tenant is None:
            return self._run(Request("stats", None, answers.Statistics))
        return self._run(Request("stats", {"tenant": tenant}, answers.TenantStatistics))

    def result(self, task_id: int, *, timeout: float | None = None) -> Any:
        """Wait until a task has settled and return its result, by long polls.

        timeout: seconds; None: unlimited. Raises TaskNotFound; TaskFailed for a CRITICAL_ERROR, ResultCancelled for a
        CANCELLED task, ResultGone when retention has deleted the result; ResultTimeout, a TimeoutError, with the last
        state; and Unavailable when the api is unavailable for longer than the timeout of a call.
        """
        outcome = self._results.outcome(task_id, timeout)
        return self.download(task_id, "result") if outcome.get("result_unread") else exchanges.result_of(outcome)

    def download(self, task_id: int, what: str) -> Any:
        """Return a task's "payload" or "result", of any size. Raises TaskNotFound, Unavailable, PayloadLost."""
        if in_process.substitute is not None:
            return (self.status(task_id, detail=True))[what]
        with exchanges.reaching(self.url):
            response = self._http.get(f"{self.url}/tasks/{task_id}/{what}", timeout=self._timeout)
        return exchanges.downloaded(response.status_code, response.content)

    def events(self, task_id: int, *, follow: bool = True) -> Iterator[tuple[str, Any]]:
        """Events of a task until it has settled, as kind and data: state, progress, step, log, chunk, dropped, end.

        After a lost connection it goes on where it was. follow: False ends with what there is now.
        Raises TaskNotFound; Unavailable when the api is unavailable for longer than the timeout of a call.
        """
        if in_process.substitute is not None:
            raise MethodNotFound("the fixtures for tests have no stream of events: drain, then look at the task")
        reader, url = exchanges.EventReader(), f"{self.url}/tasks/{task_id}/events"
        params = {} if follow else {"follow": "false"}
        limits = httpx.Timeout(self._timeout, read=EVENTS_SILENT_SECONDS)
        while True:
            with reader.enduring(self.url, self._timeout):
                stream = self._http.stream("GET", url, params=params, headers=reader.headers, timeout=limits)
                with stream as response:
                    if response.status_code != 200:
                        exchanges.downloaded(response.status_code, response.read())
                    for line in response.iter_lines():
                        event = reader.read(line)
                        if event is not None:
                            yield event
                            if event[0] == "end":
                                return
            time.sleep(1)

    def _run(self, call: Request[T] | Exchange[T]) -> T:
        exchange = exchanges.asking(call) if isinstance(call, Request) else call
        try:
            body, seconds = next(exchange)
            while True:
                try:
                    answer = self._step(body, seconds)
                except PenstockError as exc:
                    body, seconds = exchange.throw(exc)
                else:
                    body, seconds = exchange.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _step(self, body: str | None, seconds: float) -> Any:
        if body is None:
            time.sleep(seconds)
            return None
        if in_process.substitute is not None:
            return in_process.substitute.answer(body)
        with exchanges.reaching(self.url):
            response = self._http.post(
                f"{self.url}/rpc", content=body, timeout=self._timeout + seconds, headers=exchanges.trace_headers()
            )
        answer = exchanges.answer_of(self.url, response.status_code, response.content)
        self._results.is_reached = True
        return answer
