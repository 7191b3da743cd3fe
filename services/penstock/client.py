"""Enqueue and look from a program: over HTTP (Client), or straight into the inbound queue (InboundClient)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from penstock.errors import (
    InvalidParams,
    InvalidRequest,
    MethodNotFound,
    ParseError,
    RateLimited,
    RpcError,
    ScheduleNotFound,
    StateConflict,
    TaskNotFound,
    TooLarge,
    Unavailable,
)
from penstock.schedule_client import InboundSchedules, Schedules
from penstock.wire import join_batch, pack

if TYPE_CHECKING:
    from penstock.transports.sqs import SqsTransport

BATCH_TASKS = 1000
BATCH_BYTES = 4 * 1024 * 1024  # half of what the api takes unless told otherwise
MESSAGE_TASKS = 100
_SEND_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.1

_KINDS: dict[int, type[RpcError]] = {
    kind.code: kind
    for kind in (
        ParseError, InvalidRequest, MethodNotFound, InvalidParams, TaskNotFound, StateConflict, TooLarge, RateLimited,
        ScheduleNotFound,
    )
}  # fmt: skip


class Unfinished(Unavailable):
    """Some tasks of several were not accepted, or nobody knows: a connection broke before the answer.

    results: answers so far, in the order of the tasks. unsent: the tasks to send again; give them a ``unique_key``
    if none may be added twice.
    """

    def __init__(self, message: str, results: Sequence[Any], unsent: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(message)
        self.results = list(results)
        self.unsent = list(unsent)


class Client:
    """The api's methods over HTTP; safe to share between threads.

    url: base of the api, or its ``/rpc``. api_key: None for an api without keys. timeout: seconds for one call.
    Every method raises RpcError (or TaskNotFound, InvalidParams and the like) for an error that the api answers,
    and Unavailable when it cannot be reached or has lost its database. schedules: the methods about cron schedules.
    """

    def __init__(self, url: str = "http://127.0.0.1:8080", api_key: str | None = None, timeout: float = 30) -> None:
        self.url = url.rstrip("/").removesuffix("/rpc")
        headers = {"Content-Type": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        # A refused connection is tried again, for nothing was sent yet; anything later might be done twice.
        self.schedules = Schedules(self.call)
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=httpx.HTTPTransport(retries=1))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def call(self, method: str, params: Mapping[str, Any] | Sequence[Any] | None = None) -> Any:
        """Call any method and return its result."""
        answer = self._post(_request(method, params, 0))
        if not isinstance(answer, dict):
            raise Unavailable(f"{self.url} does not answer as a Penstock api: check the URL")
        if "error" in answer:
            raise error_of(answer["error"])
        return answer["result"]

    def batch(self, calls: Iterable[tuple[str, Mapping[str, Any] | Sequence[Any] | None]]) -> list[Any]:
        """Call several methods with one request; in the order of the calls, each one's result or its RpcError."""
        requests = [_request(method, params, number) for number, (method, params) in enumerate(calls)]
        return self._batch(requests) if requests else []

    def enqueue(self, action: str, payload: Any = None, **options: Any) -> dict[str, Any]:
        """Add a task; stored when this returns. Returns ``{"id", "state", "duplicate"}``.

        payload: an object or array of JSON, ``{}`` when None.
        options: run_at (datetime with a zone, RFC 3339 text or epoch ms) or delay (s), priority, unique_key,
        ordering_key, max_attempts, timeout (s).
        """
        answer: dict[str, Any] = self.call("enqueue", _task(action, payload, options))
        return answer

    def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Add tasks, each a mapping of ``action`` and what else `enqueue` takes, by as few requests as will do.

        Returns as ``batch`` does. Raises Unfinished, which tells what is left, when the api goes away in between.
        """
        given = list(tasks)
        texts = [_request("enqueue", _prepared(task), number) for number, task in enumerate(given)]
        results: list[Any] = []
        # Text is ASCII here, so characters are bytes.
        todo = list(pack([len(text) for text in texts], max_bytes=BATCH_BYTES, max_items=BATCH_TASKS))[::-1]
        while todo:
            start, end = todo.pop()
            try:
                results += self._batch(texts[start:end], first=start)
            except (Unavailable, RateLimited) as exc:
                problem = f"{len(given) - start} of {len(given)} tasks were not accepted: {exc}"
                raise Unfinished(problem, results, given[start:]) from exc
            except (TooLarge, InvalidRequest) as exc:
                # The api's limits are its operator's; it takes less at once than was tried here.
                if end - start == 1:
                    results.append(exc)
                    continue
                middle = (start + end) // 2
                todo += [(middle, end), (start, middle)]
        return results

    def status(self, task_id: int | Sequence[int], *, detail: bool = False) -> Any:
        """A task as a dict; for several ids a list, with None for one that there is not.

        detail: with payload, keys, claim and every failed attempt. Raises TaskNotFound for a single id.
        """
        which: dict[str, Any] = {"id": task_id} if isinstance(task_id, int) else {"ids": list(task_id)}
        return self.call("status", which | ({"detail": True} if detail else {}))

    def cancel(self, task_id: int) -> dict[str, Any]:
        """Cancel a task that is not settled. Raises TaskNotFound, StateConflict."""
        answer: dict[str, Any] = self.call("cancel", {"id": task_id})
        return answer

    def retry(self, task_id: int) -> dict[str, Any]:
        """Start a CRITICAL_ERROR or CANCELLED task anew. Raises TaskNotFound, StateConflict."""
        answer: dict[str, Any] = self.call("retry", {"id": task_id})
        return answer

    def list(
        self, *, state: str | None = None, action: str | None = None, limit: int = 50, cursor: str | None = None
    ) -> dict[str, Any]:
        """A page of tasks, newest first: ``{"tasks", "cursor"}``; go on with the cursor until it is None."""
        given = {"state": state, "action": action, "limit": limit, "cursor": cursor}
        answer: dict[str, Any] = self.call("list", {name: value for name, value in given.items() if value is not None})
        return answer

    def stats(self) -> dict[str, Any]:
        """Counts by state and action, rates over the last minute, lag."""
        answer: dict[str, Any] = self.call("stats")
        return answer

    def _batch(self, requests: Sequence[str], first: int = 0) -> Any:
        answers = self._post(f"[{','.join(requests)}]")
        if isinstance(answers, dict) and "error" in answers:
            raise error_of(answers["error"])
        by_id = {answer["id"]: answer for answer in answers}
        results: Any = []
        for number in range(first, first + len(requests)):
            answer = by_id[number]
            results.append(error_of(answer["error"]) if "error" in answer else answer["result"])
        return results

    def _post(self, body: str) -> Any:
        try:
            response = self._http.post(f"{self.url}/rpc", content=body)
        except httpx.TimeoutException as exc:
            raise Unavailable(f"the api at {self.url} did not answer in time: try again, or raise the timeout") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise Unavailable(
                f"the api at {self.url} cannot be reached ({exc}): start it with `penstock up` or `penstock api`, "
                "or name another URL"
            ) from exc
        try:
            answer = json.loads(response.content)
        except ValueError:
            answer = None
        if response.status_code == 503:
            reference = answer["error"].get("data") if isinstance(answer, dict) and "error" in answer else None
            raise Unavailable(f"the api at {self.url} is up, but not its database: try again later ({reference})")
        is_rpc = isinstance(answer, list) or (isinstance(answer, dict) and "jsonrpc" in answer)
        if not is_rpc:
            raise Unavailable(
                f"{self.url}/rpc answers HTTP {response.status_code}, and not as a Penstock api: check the URL"
            )
        return answer


class InboundClient:
    """Adds tasks through the inbound queue: needs SQS alone, and no answer comes back; use it with ``async with``.

    queue: name or URL of the inbound queue. endpoint_url: None for AWS. region: None for the SDK's own chain.
    A send that timed out may have arrived, and is tried again: give tasks a ``unique_key`` if none may run twice.
    schedules: changes of cron schedules.
    """

    def __init__(self, queue: str, endpoint_url: str | None = None, region: str | None = None) -> None:
        self._name = queue
        self._endpoint_url = endpoint_url
        self._region = region
        self._transport: SqsTransport | None = None
        self.schedules = InboundSchedules(self.send)

    async def __aenter__(self) -> InboundClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._transport is not None:
            transport, self._transport = self._transport, None
            await transport.close()

    async def enqueue(self, action: str, payload: Any = None, **options: Any) -> None:
        """Send one task; options as in :meth:`Client.enqueue`. Raises TooLarge, Unfinished."""
        await self.enqueue_many([_task(action, payload, options)])

    async def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> int:
        """Send tasks, each a mapping of ``action`` and what else `enqueue` takes, many to a message; returns how many.

        Raises TooLarge, before anything is sent, for a task that no message can hold; Unfinished, with the tasks
        that were not sent, when the queue does not take them after several tries.
        """
        given = list(tasks)
        await self._send_all([_request("enqueue", _prepared(task), None) for task in given], given)
        return len(given)

    async def send(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a request of a method whose answer is not needed, such as ``cancel``. Raises TooLarge, Unfinished."""
        await self._send_all([_request(method, params, None)], [params])

    async def _send_all(self, texts: Sequence[str], given: Sequence[Mapping[str, Any]]) -> None:
        """Send requests, of which those of ``given`` are told as unsent where they were not."""
        from penstock.transports.base import Outgoing
        from penstock.transports.sqs import LIMITS, SqsTransport

        for text in texts:
            if len(text) > LIMITS.max_message_bytes:
                raise TooLarge("a task", len(text), LIMITS.max_message_bytes)
        # Text is ASCII here, so characters are bytes.
        cuts = pack([len(text) for text in texts], max_bytes=LIMITS.max_message_bytes, max_items=MESSAGE_TASKS)
        left = [(start, end, Outgoing(join_batch(texts[start:end]))) for start, end in cuts]
        if self._transport is None:
            self._transport = SqsTransport(endpoint_url=self._endpoint_url, region=self._region)
        queue = self._transport.queue(self._name, label="inbound")
        reason: str | None = None
        for attempt in range(_SEND_TRIES):
            if not left:
                break
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1))
            report = await queue.send([message for _, _, message in left])
            left, reason = [left[position] for position in report.failed], report.reason
        if left:
            unsent = [task for start, end, _ in left for task in given[start:end]]
            raise Unfinished(f"{len(unsent)} of {len(given)} tasks were not sent: {reason}", [], unsent)


def error_of(error: Mapping[str, Any]) -> RpcError:
    """An error object of the api as an exception; codes that are known have a class of their own."""
    kind = _KINDS.get(error["code"], RpcError)
    made = kind.__new__(kind)
    RpcError.__init__(made, error["message"], error.get("data"))
    made.code = error["code"]
    return made


def _request(method: str, params: Mapping[str, Any] | Sequence[Any] | None, number: int | None) -> str:
    """One request as JSON text; without a number it asks for no answer. Raises ValueError, TypeError: not JSON."""
    request: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        request["params"] = params
    if number is not None:
        request["id"] = number
    return json.dumps(request, separators=(",", ":"), allow_nan=False)


def _task(action: str, payload: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    task = {"action": action} | ({} if payload is None else {"payload": payload})
    return _prepared(task | {name: value for name, value in options.items() if value is not None})


def _prepared(task: Mapping[str, Any]) -> dict[str, Any]:
    run_at = task.get("run_at")
    if not isinstance(run_at, datetime):
        return dict(task)
    if run_at.tzinfo is None:
        raise ValueError(f"run_at needs a zone: {run_at.isoformat()} is another instant in every one")
    return {**task, "run_at": run_at.isoformat()}
