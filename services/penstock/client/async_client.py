"""The client over HTTP. AsyncClient stands in async_client.py; client.py has the same with blocking calls."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Self, TypeVar, overload

import httpx

from penstock.client import exchanges
from penstock.client.exchanges import Exchange, Request
from penstock.client.methods import AsyncAnswer, Methods, ScheduleMethods, WorkflowMethods
from penstock.client.results import AsyncResults
from penstock.protocol import answers, in_process
from penstock.protocol.errors import MethodNotFound, PenstockError

T = TypeVar("T")
EVENTS_SILENT_SECONDS = 45.0  # the api sends something every few seconds, older ones every fifteen


class AsyncClient(Methods[AsyncAnswer]):
    """The api's methods over HTTP. `Client` blocks and is safe to share between threads; `AsyncClient` is for asyncio,
    within one event loop, and awaits any number of results by one long poll for each thousand tasks.

    url: base of the api, or its ``/rpc``; None for PENSTOCK_API_URL, else http://127.0.0.1:8080. api_key: None for
    PENSTOCK_API_KEY, "" to send none. timeout: seconds for one call. Use it in a ``with`` block, or call ``close``.
    Every method raises RpcError (or TaskNotFound, InvalidParams and the like) for an error that the api answers, and
    Unavailable when the api cannot be reached or has lost its database.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, timeout: float = 30) -> None:
        self.url, auth = exchanges.address_of(url)
        self.schedules: ScheduleMethods[AsyncAnswer] = ScheduleMethods(self._run)
        self.workflows: WorkflowMethods[AsyncAnswer] = WorkflowMethods(self._run)
        self._timeout = timeout
        # Retries a refused connection only, when nothing was sent yet; anything later could be done twice.
        transport = httpx.AsyncHTTPTransport(retries=1, limits=exchanges.LIMITS)
        self._http = httpx.AsyncClient(auth=auth, headers=exchanges.http_headers(api_key), transport=transport)
        self._results = AsyncResults(self._run, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; results that are still awaited raise CancelledError."""
        await self._results.close()
        await self._http.aclose()

    @overload
    async def status(self, task_id: int, *, detail: Literal[True]) -> answers.TaskDetail: ...
    @overload
    async def status(self, task_id: int, *, detail: bool = False) -> answers.Task: ...
    @overload
    async def status(self, task_id: Sequence[int], *, detail: bool = False) -> list[answers.Task | None]: ...
    async def status(self, task_id: int | Sequence[int], *, detail: bool = False) -> Any:
        """Return a task; for several ids a list, with None for an unknown id.

        detail: with payload, keys, claim and every failed attempt. Raises TaskNotFound for a single id.
        """
        which = {"id": task_id} if isinstance(task_id, int) else {"ids": [*task_id]}
        kind = answers.TaskDetail if detail else answers.Task
        return await self._run(Request("status", which | ({"detail": True} if detail else {}), kind))

    @overload
    async def stats(self, *, tenant: None = None) -> answers.Statistics: ...
    @overload
    async def stats(self, *, tenant: str) -> answers.TenantStatistics: ...
    async def stats(self, *, tenant: str | None = None) -> Any:
        """Return counts by state and action, rates of the last minute, lag; tenant: only counts and ``at_least``."""
        if tenant is None:
            return await self._run(Request("stats", None, answers.Statistics))
        return await self._run(Request("stats", {"tenant": tenant}, answers.TenantStatistics))

    async def result(self, task_id: int, *, timeout: float | None = None) -> Any:
        """Wait until a task has settled and return its result, by long polls.

        timeout: seconds; None: unlimited. Raises TaskNotFound; TaskFailed for a CRITICAL_ERROR, ResultCancelled for a
        CANCELLED task, ResultGone when retention has deleted the result; ResultTimeout, a TimeoutError, with the last
        state; and Unavailable when the api is unavailable for longer than the timeout of a call.
        """
        outcome = await self._results.outcome(task_id, timeout)
        return await self.download(task_id, "result") if outcome.get("result_unread") else exchanges.result_of(outcome)

    async def download(self, task_id: int, what: str) -> Any:
        """Return a task's "payload" or "result", of any size. Raises TaskNotFound, Unavailable, PayloadLost."""
        if in_process.substitute is not None:
            return (await self.status(task_id, detail=True))[what]
        with exchanges.reaching(self.url):
            response = await self._http.get(f"{self.url}/tasks/{task_id}/{what}", timeout=self._timeout)
        return exchanges.downloaded(response.status_code, response.content)

    async def events(self, task_id: int, *, follow: bool = True) -> AsyncIterator[tuple[str, Any]]:
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
                async with stream as response:
                    if response.status_code != 200:
                        exchanges.downloaded(response.status_code, await response.aread())
                    async for line in response.aiter_lines():
                        event = reader.read(line)
                        if event is not None:
                            yield event
                            if event[0] == "end":
                                return
            await asyncio.sleep(1)

    async def _run(self, call: Request[T] | Exchange[T]) -> T:
        exchange = exchanges.asking(call) if isinstance(call, Request) else call
        try:
            body, seconds = next(exchange)
            while True:
                try:
                    answer = await self._step(body, seconds)
                except PenstockError as exc:
                    body, seconds = exchange.throw(exc)
                else:
                    body, seconds = exchange.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _step(self, body: str | None, seconds: float) -> Any:
        if body is None:
            await asyncio.sleep(seconds)
            return None
        if in_process.substitute is not None:
            return in_process.substitute.answer(body)
        with exchanges.reaching(self.url):
            response = await self._http.post(
                f"{self.url}/rpc", content=body, timeout=self._timeout + seconds, headers=exchanges.trace_headers()
            )
        answer = exchanges.answer_of(self.url, response.status_code, response.content)
        self._results.is_reached = True
        return answer
