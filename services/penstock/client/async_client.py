"""The client over an event loop: what Client does, and results awaited by the thousand over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Any

import httpx

from penstock.client.client import base_url, http_headers, trace_headers, unreachable
from penstock.client.long_poll import POLL_SECONDS, Patience, settled
from penstock.client.requests import (
    Params,
    Talk,
    Unfinished,
    answer_of,
    answering,
    batching,
    calling,
    downloaded,
    enqueueing,
    result_of,
)
from penstock.client.schedules import AsyncSchedules
from penstock.client.workflows import AsyncWorkflows
from penstock.protocol.errors import PenstockError, ResultTimeout, TaskNotFound
from penstock.protocol.requests import prepared, task_params

POLL_TASKS = 1000  # of one long poll
_GATHER_SECONDS = 0.01
_LONGEST_GATHER_SECONDS = 0.16


class AsyncClient:
    """As Client, method by method, for asyncio; use it with ``async with``, in one event loop.

    However many results are awaited at once, they are asked for by one long poll for each thousand tasks.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, timeout: float = 30) -> None:
        self.url = base_url(url)
        self.schedules = AsyncSchedules(self.call)
        self.workflows = AsyncWorkflows(self.call)
        self._timeout = timeout
        transport = httpx.AsyncHTTPTransport(retries=1)  # a refused connection alone, for nothing was sent yet
        self._http = httpx.AsyncClient(headers=http_headers(api_key), transport=transport)
        self._polls: list[_Poll] = []

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; who still awaits a result gets a CancelledError."""
        polls, self._polls = self._polls, []
        for poll in polls:
            await poll.close()
        await self._http.aclose()

    async def call(self, method: str, params: Params = None) -> Any:
        """Call any method and return its result."""
        return await self._run(calling(method, params))

    async def batch(self, calls: Iterable[tuple[str, Params]]) -> Sequence[Any]:
        """As Client.batch."""
        results: Sequence[Any] = await self._run(batching(calls))
        return results

    async def enqueue(self, action: str, payload: Any = None, **options: Any) -> dict[str, Any]:
        """As Client.enqueue."""
        return await self._dict("enqueue", task_params(action, payload, options))

    async def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> Sequence[Any]:
        """As Client.enqueue_many."""
        results: Sequence[Any] = await self._run(enqueueing(tasks))
        return results

    async def result(self, task_id: int, *, timeout: float | None = None) -> Any:
        """As Client.result. Await as many at once as you like: they share their long polls."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        poll = next((poll for poll in self._polls if poll.takes(task_id)), None)
        if poll is None:
            poll = _Poll(self._poll, self._timeout, ended=self._polls.remove)
            self._polls.append(poll)
        poll.add(task_id, future)
        try:
            async with asyncio.timeout(timeout):
                return await self._result_of(await future)
        except TimeoutError:
            if timeout is None:
                raise
        finally:
            poll.forget(task_id, future)
        # The last word, also for one who would not wait at all.
        outcome = await self.call("result", {"id": task_id, "timeout": 0})
        if settled(outcome):
            return await self._result_of(outcome)
        raise ResultTimeout(task_id, outcome["state"], timeout)

    async def download(self, task_id: int, what: str) -> Any:
        """As Client.download."""
        try:
            response = await self._http.get(f"{self.url}/tasks/{task_id}/{what}", timeout=self._timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise unreachable(self.url, exc) from exc
        return downloaded(response.status_code, response.content)

    async def _result_of(self, outcome: dict[str, Any]) -> Any:
        return await self.download(outcome["id"], "result") if outcome.get("result_unread") else result_of(outcome)

    async def status(self, task_id: int | Sequence[int], *, detail: bool = False) -> Any:
        """As Client.status."""
        which: dict[str, Any] = {"id": task_id} if isinstance(task_id, int) else {"ids": [*task_id]}
        return await self.call("status", which | ({"detail": True} if detail else {}))

    async def cancel(self, task_id: int, *, reason: str | None = None) -> dict[str, Any]:
        """As Client.cancel."""
        return await self._dict("cancel", {"id": task_id} | _given(reason=reason))

    async def complete(self, token: str, result: Any = None, *, tenant: str | None = None) -> dict[str, Any]:
        """As Client.complete."""
        return await self._dict("task.complete", answering(token, tenant=tenant) | {"result": result})

    async def fail(
        self,
        token: str,
        error: str | Mapping[str, Any],
        *,
        final: bool = False,
        retry_after: float | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:
        """As Client.fail."""
        given = answering(token, tenant=tenant, retry_after=retry_after)
        return await self._dict("task.fail", given | {"error": error, "final": final})

    async def reschedule(
        self,
        task_id: int,
        *,
        run_at: datetime | str | int | None = None,
        delay: float | None = None,
        priority: int | None = None,
    ) -> dict[str, Any]:
        """As Client.reschedule."""
        times = _given(run_at=run_at, delay=delay, priority=priority)
        return await self._dict("reschedule", prepared({"id": task_id} | times))

    async def ordering_list(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """As Client.ordering_list."""
        return await self._dict("ordering.list", _given(limit=limit, cursor=cursor))

    async def ordering_release(self, key: str, *, tenant: str | None = None) -> dict[str, Any]:
        """As Client.ordering_release."""
        return await self._dict("ordering.release", {"key": key} | _given(tenant=tenant))

    async def retry(self, task_id: int) -> dict[str, Any]:
        """As Client.retry."""
        return await self._dict("retry", {"id": task_id})

    async def list(
        self, *, state: str | None = None, action: str | None = None, labels: Mapping[str, str] | None = None,
        key: str | None = None, since: datetime | str | int | None = None, until: datetime | str | int | None = None,
        limit: int = 50, cursor: str | None = None, tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """As Client.list."""
        given = _given(
            state=state, action=action, labels=None if labels is None else dict(labels), key=key, since=since,
            until=until, limit=limit, cursor=cursor, tenant=tenant,
        )  # fmt: skip
        return await self._dict("list", prepared(given))

    async def set_limits(self, action: str, **limits: Any) -> dict[str, Any]:
        """As Client.set_limits."""
        return await self._dict("action.set", {"action": action, **limits})

    async def set_tenant_limits(self, tenant: str, **limits: Any) -> dict[str, Any]:
        """As Client.set_tenant_limits."""
        return await self._dict("tenant.set", {"tenant": tenant, **limits})

    async def pause(self, action: str) -> dict[str, Any]:
        """As Client.pause."""
        return await self._dict("action.pause", {"action": action})

    async def resume(self, action: str) -> dict[str, Any]:
        """As Client.resume."""
        return await self._dict("action.resume", {"action": action})

    async def actions(self) -> Sequence[dict[str, Any]]:
        """As Client.actions."""
        found: Sequence[dict[str, Any]] = (await self.call("action.list"))["actions"]
        return found

    async def set_route(
        self, name: str, queue: str, actions: Sequence[str] = ("*",), labels: Mapping[str, str] | None = None,
        position: int = 0,
    ) -> None:  # fmt: skip
        """As Client.set_route."""
        given = {"name": name, "queue": queue, "actions": [*actions], "labels": dict(labels or {})}
        await self.call("route.set", given | {"position": position})

    async def delete_route(self, name: str) -> None:
        """As Client.delete_route."""
        await self.call("route.delete", {"name": name})

    async def routes(self) -> Sequence[dict[str, Any]]:
        """As Client.routes."""
        found: Sequence[dict[str, Any]] = (await self.call("route.list"))["routes"]
        return found

    async def stats(self, *, tenant: str | None = None) -> dict[str, Any]:
        """As Client.stats."""
        return await self._dict("stats", None if tenant is None else {"tenant": tenant})

    async def bulk_cancel(self, **filters: Any) -> dict[str, Any]:
        """As Client.bulk_cancel."""
        return await self._dict("bulk.cancel", filters)

    async def bulk_retry(self, **filters: Any) -> dict[str, Any]:
        """As Client.bulk_retry."""
        return await self._dict("bulk.retry", filters)

    async def bulk_delete(self, **filters: Any) -> dict[str, Any]:
        """As Client.bulk_delete."""
        return await self._dict("bulk.delete", filters)

    async def bulk_reschedule(self, **filters: Any) -> dict[str, Any]:
        """As Client.bulk_reschedule."""
        return await self._dict("bulk.reschedule", prepared(filters))

    async def job(self, job_id: int) -> dict[str, Any]:
        """As Client.job."""
        return await self._dict("job.get", {"id": job_id})

    async def jobs(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """As Client.jobs."""
        return await self._dict("job.list", {"limit": limit, "cursor": cursor})

    async def cancel_job(self, job_id: int) -> dict[str, Any]:
        """As Client.cancel_job."""
        return await self._dict("job.cancel", {"id": job_id})

    async def wait_job(
        self,
        job_id: int,
        *,
        timeout: float | None = None,
        interval: float = 0.2,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """As Client.wait_job."""
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            job = await self.job(job_id)
            if progress is not None:
                progress(job)
            if job["state"] != "RUNNING":
                return job
            if deadline is not None and monotonic() >= deadline:
                raise Unfinished(f"job {job_id} still runs after {timeout} s", [job], [])
            await asyncio.sleep(interval)

    async def _dict(self, method: str, params: Params) -> dict[str, Any]:
        answer: dict[str, Any] = await self.call(method, params)
        return answer

    async def _run(self, talk: Talk, more_seconds: float = 0.0) -> Any:
        """Carry a conversation out. more_seconds: that the api may take beyond what one call may."""
        try:
            body = next(talk)
            while True:
                try:
                    answer = await self._post(body, more_seconds)
                except PenstockError as exc:
                    body = talk.throw(exc)
                else:
                    body = talk.send(answer)
        except StopIteration as end:
            return end.value

    async def _post(self, body: str, more_seconds: float) -> Any:
        try:
            response = await self._http.post(
                f"{self.url}/rpc", content=body, timeout=self._timeout + more_seconds, headers=trace_headers()
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise unreachable(self.url, exc) from exc
        return answer_of(self.url, response.status_code, response.content)

    async def _poll(self, ids: Sequence[int]) -> Any:
        params = {"ids": ids, "timeout": POLL_SECONDS, "wait": "any"}
        return await self._run(calling("result", params), POLL_SECONDS)


class _Poll:
    """One long poll after the other, for up to a thousand tasks.

    A task that is added while one is under way breaks it off, and the next one asks for all; those that are added
    one shortly after the other wait for each other, the longer the more of them there are.

    ask: sends one. ended: called when nobody waits any more.
    """

    def __init__(
        self, ask: Callable[[Sequence[int]], Awaitable[Any]], away_seconds: float, *, ended: Callable[[_Poll], None]
    ) -> None:
        self._ask = ask
        self._ended = ended
        self._patience = Patience(None, away_seconds)
        self._waiting: dict[int, set[asyncio.Future[Any]]] = {}
        self._added = asyncio.Event()
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="results")

    def takes(self, task_id: int) -> bool:
        return not self._closed and (task_id in self._waiting or len(self._waiting) < POLL_TASKS)

    def add(self, task_id: int, future: asyncio.Future[Any]) -> None:
        if task_id not in self._waiting:
            self._waiting[task_id] = set()
            self._added.set()
        self._waiting[task_id].add(future)

    def forget(self, task_id: int, future: asyncio.Future[Any]) -> None:
        futures = self._waiting.get(task_id)
        if futures is None:
            return
        futures.discard(future)
        if not futures:
            del self._waiting[task_id]
            if not self._waiting:
                self._added.set()  # what is under way is of no use any more

    async def close(self) -> None:
        self._closed = True
        self._task.cancel()
        await asyncio.wait((self._task,))
        for futures in self._waiting.values():
            for future in futures:
                future.cancel()

    async def _run(self) -> None:
        gather_seconds = 0.0
        try:
            while self._waiting:
                await asyncio.sleep(gather_seconds)
                self._added.clear()
                answered = await self._ask_once()
                # Whoever adds tasks one by one is given time to add more.
                gather_seconds = (
                    0.0 if answered else min(_LONGEST_GATHER_SECONDS, max(_GATHER_SECONDS, 2 * gather_seconds))
                )
        except Exception as exc:
            self._fail(exc)  # an answer that is none of a Penstock api: whoever waits must not wait for ever
        finally:
            if not self._closed:
                self._closed = True
                self._ended(self)

    async def _ask_once(self) -> bool:
        """Ask for all; returns False where it was broken off because there are more."""
        asking = asyncio.ensure_future(self._ask([*self._waiting]))
        adding = asyncio.ensure_future(self._added.wait())
        try:
            await asyncio.wait((asking, adding), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return False
            outcomes = asking.result()
        except PenstockError as exc:
            try:
                await asyncio.sleep(self._patience.pause_after(exc))
            except PenstockError:
                self._fail(exc)
            return True
        finally:
            for task in (asking, adding):
                task.cancel()
            await asyncio.wait((asking, adding))
        self._patience.heard()
        for outcome in outcomes:
            if outcome["state"] is None:
                self._settle(outcome["id"], TaskNotFound(outcome["id"]))
            elif settled(outcome):
                self._settle(outcome["id"], outcome)
        return True

    def _settle(self, task_id: int, outcome: Any) -> None:
        for future in self._waiting.pop(task_id, ()):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail(self, exc: Exception) -> None:
        for task_id in [*self._waiting]:
            self._settle(task_id, exc)


def _given(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}
