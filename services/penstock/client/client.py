"""Enqueue and look from a program: over HTTP (Client), or straight into the inbound queue (InboundClient)."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from penstock.client.long_poll import Patience, settled
from penstock.client.requests import (
    Talk,
    Unfinished,
    answer_of,
    answering,
    batching,
    calling,
    downloaded,
    enqueueing,
    request_text,
    result_of,
)
from penstock.client.schedules import InboundSchedules, Schedules
from penstock.client.workflows import InboundWorkflows, Workflows
from penstock.protocol import trace_context
from penstock.protocol.batching import join_batch, pack
from penstock.protocol.errors import PenstockError, TooLarge, Unavailable
from penstock.protocol.jsonable import dumps
from penstock.protocol.requests import prepared, task_params

if TYPE_CHECKING:
    from penstock.brokers.base import Queue, Transport
    from penstock.payloads.codec import PayloadCodec
    from penstock.settings.model import Settings

MESSAGE_TASKS = 100
_DEFAULT_URL = "http://127.0.0.1:8080"
_SEND_TRIES = 4
_ATTRIBUTES_BYTES = 64  # that a message's attributes take beside their names and values
_FIRST_PAUSE_SECONDS = 0.1


class Client:
    """The api's methods over HTTP; safe to share between threads.

    url: base of the api, or its ``/rpc``; None for PENSTOCK_API_URL, else http://127.0.0.1:8080. api_key: None for
    PENSTOCK_API_KEY, "" to send none. timeout: seconds for one call.
    Every method raises RpcError (or TaskNotFound, InvalidParams and the like) for an error that the api answers,
    and Unavailable when it cannot be reached or has lost its database. schedules: the methods about cron schedules;
    workflows: those about tasks that wait for each other.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, timeout: float = 30) -> None:
        self.url = base_url(url)
        # A refused connection is tried again, for nothing was sent yet; anything later might be done twice.
        self.schedules = Schedules(self.call)
        self.workflows = Workflows(self.call)
        self._timeout = timeout
        self._http = httpx.Client(headers=http_headers(api_key), transport=httpx.HTTPTransport(retries=1))

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
        return self._run(calling(method, params))

    def batch(self, calls: Iterable[tuple[str, Mapping[str, Any] | Sequence[Any] | None]]) -> list[Any]:
        """Call several methods with one request; in the order of the calls, each one's result or its RpcError."""
        results: list[Any] = self._run(batching(calls))
        return results

    def enqueue(self, action: str, payload: Any = None, **options: Any) -> dict[str, Any]:
        """Add a task; stored when this returns. Returns ``{"id", "state", "duplicate"}``.

        payload: an object or array of JSON, ``{}`` when None; what may stand in it is what a handler may return.
        options: run_at (datetime with a zone, RFC 3339 text or epoch ms) or delay (s), priority, unique_key,
        ordering_key, max_attempts, timeout (s), labels (dict of text), expires_at (as run_at) or expires_in (s),
        limit_key, unique ("retained", "live" or seconds), on_duplicate ("return", "replace" or "error"), tenant.
        Seconds may be a timedelta.
        With "replace" the answer has ``replaced``; with "error" DuplicateTask is raised, its data naming the first.
        """
        answer: dict[str, Any] = self.call("enqueue", task_params(action, payload, options))
        return answer

    def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Add tasks, each a mapping of ``action`` and what else `enqueue` takes, by as few requests as will do.

        Returns as ``batch`` does. Raises Unfinished, which tells what is left, when the api goes away in between.
        """
        return list(self._run(enqueueing(tasks)))

    def result(self, task_id: int, *, timeout: float | None = None) -> Any:
        """Wait until a task has settled and return its result, by long polls.

        timeout: seconds, None for as long as it takes. Raises TaskNotFound; TaskFailed for a CRITICAL_ERROR,
        TaskCalledOff for a CANCELLED one, ResultGone when retention has emptied the result; ResultTimeout, a
        TimeoutError, with the state that was seen last; and Unavailable when the api is away for longer than one call
        may take.
        """
        patience = Patience(timeout, self._timeout)
        while True:
            wait_seconds = patience.next_wait()
            try:
                outcome = self._run(calling("result", {"id": task_id, "timeout": wait_seconds}), wait_seconds)
            except PenstockError as exc:
                sleep(patience.pause_after(exc))
                continue
            patience.heard()
            if settled(outcome):
                return self.download(task_id, "result") if outcome.get("result_unread") else result_of(outcome)
            patience.check(task_id, outcome["state"])

    def download(self, task_id: int, what: str) -> Any:
        """The "payload" or the "result" of a task, however large. Raises TaskNotFound, Unavailable, PayloadLost."""
        try:
            response = self._http.get(f"{self.url}/tasks/{task_id}/{what}", timeout=self._timeout)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise unreachable(self.url, exc) from exc
        return downloaded(response.status_code, response.content)

    def status(self, task_id: int | Sequence[int], *, detail: bool = False) -> Any:
        """A task as a dict; for several ids a list, with None for one that there is not.

        detail: with payload, keys, claim and every failed attempt. Raises TaskNotFound for a single id.
        """
        which: dict[str, Any] = {"id": task_id} if isinstance(task_id, int) else {"ids": list(task_id)}
        return self.call("status", which | ({"detail": True} if detail else {}))

    def cancel(self, task_id: int, *, reason: str | None = None) -> dict[str, Any]:
        """Cancel a task that is not settled. Raises TaskNotFound, StateConflict."""
        given = {} if reason is None else {"reason": reason}
        answer: dict[str, Any] = self.call("cancel", {"id": task_id} | given)
        return answer

    def complete(self, token: str, result: Any = None, *, tenant: str | None = None) -> dict[str, Any]:
        """Give a task the result that it waits for; one that comes before its task waits is kept.

        tenant: of the task, with a token that its handler thought out.
        Returns ``{"id", "state", "kept", "duplicate"}``. Raises StateConflict, TaskNotFound, TooLarge.
        """
        answer: dict[str, Any] = self.call("task.complete", answering(token, tenant=tenant) | {"result": result})
        return answer

    def fail(
        self,
        token: str,
        error: str | Mapping[str, Any],
        *,
        final: bool = False,
        retry_after: float | None = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:
        """Fail the attempt of a task that waits, as ``complete`` gives it a result.

        error: text, or an object with message, code and data. final: no more attempts. retry_after: seconds until the
        next one, None for the usual delay.
        """
        given = answering(token, tenant=tenant, retry_after=retry_after)
        answer: dict[str, Any] = self.call("task.fail", given | {"error": error, "final": final})
        return answer

    def reschedule(
        self,
        task_id: int,
        *,
        run_at: datetime | str | int | None = None,
        delay: float | None = None,
        priority: int | None = None,
    ) -> dict[str, Any]:
        """Move a task that waits to another time or priority. Raises TaskNotFound, StateConflict."""
        given = {"id": task_id, "run_at": run_at, "delay": delay, "priority": priority}
        params = prepared({name: value for name, value in given.items() if value is not None})
        answer: dict[str, Any] = self.call("reschedule", params)
        return answer

    def ordering_list(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """A page of ordering keys that a task in CRITICAL_ERROR holds: ``{"keys", "cursor"}``."""
        given = {} if cursor is None else {"cursor": cursor}
        answer: dict[str, Any] = self.call("ordering.list", {"limit": limit} | given)
        return answer

    def ordering_release(self, key: str, *, tenant: str | None = None) -> dict[str, Any]:
        """Let a held ordering key go: ``{"key", "released", "next"}``, the last the task that may run now, or None.

        tenant: whose key it is.
        """
        given = {} if tenant is None else {"tenant": tenant}
        answer: dict[str, Any] = self.call("ordering.release", {"key": key} | given)
        return answer

    def retry(self, task_id: int) -> dict[str, Any]:
        """Start a CRITICAL_ERROR or CANCELLED task anew. Raises TaskNotFound, StateConflict.

        StateConflict also when another task has its unique key by now; ``data["holder"]`` is that one.
        """
        answer: dict[str, Any] = self.call("retry", {"id": task_id})
        return answer

    def list(
        self, *, state: str | None = None, action: str | None = None, labels: Mapping[str, str] | None = None,
        key: str | None = None, since: datetime | str | int | None = None, until: datetime | str | int | None = None,
        limit: int = 50, cursor: str | None = None, tenant: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """A page of tasks, newest first: ``{"tasks", "cursor"}``; go on with the cursor until it is None.

        labels: all of which they have. key: their unique or ordering key. since, until: created then or later, and
        before; datetime with a zone, RFC 3339 text or epoch ms.
        """
        given = {
            "state": state, "action": action, "labels": None if labels is None else dict(labels), "key": key,
            "since": since, "until": until, "limit": limit, "cursor": cursor, "tenant": tenant,
        }  # fmt: skip
        params = prepared({name: value for name, value in given.items() if value is not None})
        answer: dict[str, Any] = self.call("list", params)
        return answer

    def set_limits(self, action: str, **limits: Any) -> dict[str, Any]:
        """Limit an action: max_in_flight, rate and burst, the same by limit key with ``key_`` before, and ``per``.

        What is left out stays as it is; None takes a limit away. Returns the limits that it has now.
        """
        answer: dict[str, Any] = self.call("action.set", {"action": action, **limits})
        return answer

    def set_tenant_limits(self, tenant: str, **limits: Any) -> dict[str, Any]:
        """Give a tenant, or ``*``, limits of its own: max_in_flight, rate and burst, and ``per``. As ``set_limits``."""
        answer: dict[str, Any] = self.call("tenant.set", {"tenant": tenant, **limits})
        return answer

    def pause(self, action: str) -> dict[str, Any]:
        """Send no more tasks of an action, and go on taking them."""
        answer: dict[str, Any] = self.call("action.pause", {"action": action})
        return answer

    def resume(self, action: str) -> dict[str, Any]:
        """Send tasks of an action again."""
        answer: dict[str, Any] = self.call("action.resume", {"action": action})
        return answer

    def actions(self) -> Sequence[dict[str, Any]]:
        """The actions that are limited or paused."""
        answer: dict[str, Any] = self.call("action.list")
        found: Sequence[dict[str, Any]] = answer["actions"]
        return found

    def set_route(
        self, name: str, queue: str, actions: Sequence[str] = ("*",), labels: Mapping[str, str] | None = None,
        position: int = 0,
    ) -> None:  # fmt: skip
        """Have tasks of some actions, or with some labels, go to a queue of their own."""
        given = {"name": name, "queue": queue, "actions": [*actions], "labels": dict(labels or {})}
        self.call("route.set", given | {"position": position})

    def delete_route(self, name: str) -> None:
        """What waits for it goes by the other routes, or to the outbound queue. Raises RpcError when there is none."""
        self.call("route.delete", {"name": name})

    def routes(self) -> Sequence[dict[str, Any]]:
        """The routes in the order in which they are tried."""
        answer: dict[str, Any] = self.call("route.list")
        found: Sequence[dict[str, Any]] = answer["routes"]
        return found

    def stats(self, *, tenant: str | None = None) -> dict[str, Any]:
        """Counts by state and action, rates over the last minute, lag; of one tenant counts alone, and ``at_least``."""
        answer: dict[str, Any] = self.call("stats", None if tenant is None else {"tenant": tenant})
        return answer

    def bulk_cancel(self, **filters: Any) -> dict[str, Any]:
        """Have a job cancel what the filter means. Returns ``{"job"}``.

        filters: action, states, labels, older_than, newer_than (s), ids_from, ids_to; or ``all=True``. With
        ``dry_run=True`` nothing is changed, and the answer is ``{"count", "exact", "estimate", "sample"}``.
        """
        return self._bulk("cancel", filters)

    def bulk_retry(self, **filters: Any) -> dict[str, Any]:
        """Have a job start CRITICAL_ERROR and CANCELLED tasks anew; as bulk_cancel."""
        return self._bulk("retry", filters)

    def bulk_delete(self, **filters: Any) -> dict[str, Any]:
        """Have a job delete the records of settled tasks; as bulk_cancel."""
        return self._bulk("delete", filters)

    def bulk_reschedule(self, **filters: Any) -> dict[str, Any]:
        """Have a job give tasks that wait another time; as bulk_cancel.

        Also takes run_at (as enqueue) or delay (s), spread (s), priority.
        """
        return self._bulk("reschedule", prepared(filters))

    def job(self, job_id: int) -> dict[str, Any]:
        """A job as a dict. Raises JobNotFound."""
        answer: dict[str, Any] = self.call("job.get", {"id": job_id})
        return answer

    def jobs(self, *, limit: int = 50, cursor: str | None = None) -> dict[str, Any]:
        """A page of jobs, newest first: ``{"jobs", "cursor"}``."""
        answer: dict[str, Any] = self.call("job.list", {"limit": limit, "cursor": cursor})
        return answer

    def cancel_job(self, job_id: int) -> dict[str, Any]:
        """Stop a job; what it has done stays done. Raises JobNotFound."""
        answer: dict[str, Any] = self.call("job.cancel", {"id": job_id})
        return answer

    def wait_job(
        self,
        job_id: int,
        *,
        timeout: float | None = None,
        interval: float = 0.2,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Wait until a job has ended and return it; its state tells how.

        timeout: seconds, None for as long as it takes. interval: seconds between two looks. progress: called with the
        job at each look. Raises JobNotFound, and Unfinished, with the job as it is, when the time is up.
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
            sleep(interval)

    def _bulk(self, name: str, params: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.call(f"bulk.{name}", params)
        return answer

    def _run(self, talk: Talk, more_seconds: float = 0.0) -> Any:
        """Carry a conversation out. more_seconds: that the api may take beyond what one call may."""
        try:
            body = next(talk)
            while True:
                try:
                    answer = self._post(body, more_seconds)
                except PenstockError as exc:
                    body = talk.throw(exc)
                else:
                    body = talk.send(answer)
        except StopIteration as end:
            return end.value

    def _post(self, body: str, more_seconds: float) -> Any:
        try:
            response = self._http.post(
                f"{self.url}/rpc", content=body, timeout=self._timeout + more_seconds, headers=trace_headers()
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise unreachable(self.url, exc) from exc
        return answer_of(self.url, response.status_code, response.content)


class InboundClient:
    """Adds tasks through the inbound queue: needs that alone, and no answer comes back; use it with ``async with``.

    queue: name of the inbound queue, of SQS its URL too. endpoint_url: None for AWS. region: None for the SDK's own
    chain. access_key: of SQS, as PENSTOCK_SQS_ACCESS_KEY; None for the SDK's own chain.
    transport_url: as PENSTOCK_TRANSPORT_URL, for another broker than SQS; whatever else there is to say of it, such as
    PENSTOCK_KAFKA_*, is taken from the settings.
    A send that timed out may have arrived, and is tried again: give tasks a ``unique_key`` if none may run twice.
    payloads: settings whose bucket takes payloads that are larger than its threshold, so that no message has to hold
    them, and whose keys encrypt payloads before they are sent.
    schedules: changes of cron schedules; workflows: of workflows.
    """

    def __init__(
        self,
        queue: str,
        endpoint_url: str | None = None,
        region: str | None = None,
        *,
        access_key: str | None = None,
        transport_url: str | None = None,
        payloads: Settings | None = None,
    ) -> None:
        self._codec = None if payloads is None else _codec_of(payloads)
        self._name = queue
        self._endpoint_url = endpoint_url
        self._region = region
        self._access_key = access_key
        self._transport_url = transport_url
        self._transport: Transport | None = None
        self._queue: Queue | None = None
        self.schedules = InboundSchedules(self.send)
        self.workflows = InboundWorkflows(self.send)

    async def __aenter__(self) -> InboundClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._transport is not None:
            transport, self._transport, self._queue = self._transport, None, None
            await transport.close()
        if self._codec is not None:
            await self._codec.close()

    async def enqueue(self, action: str, payload: Any = None, **options: Any) -> None:
        """Send one task; options as in :meth:`Client.enqueue`. Raises TooLarge, Unfinished."""
        await self.enqueue_many([task_params(action, payload, options)])

    async def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> int:
        """Send tasks, each a mapping of ``action`` and what else `enqueue` takes, many to a message; returns how many.

        Raises TooLarge, before anything is sent, for a task that no message can hold; Unfinished, with the tasks
        that were not sent, when the queue does not take them after several tries.
        """
        given = list(tasks)
        if self._codec is not None:
            given = [await self._sealed(task, self._codec) for task in given]
        await self._send_all([request_text("enqueue", prepared(task), None) for task in given], given)
        return len(given)

    @staticmethod
    async def _sealed(task: Mapping[str, Any], codec: PayloadCodec) -> Mapping[str, Any]:
        """Raises PayloadUnavailable when the bucket is away."""
        text = dumps(task.get("payload", {}))
        if not codec.encrypts and not codec.is_large(text):
            return task
        from penstock.payloads.codec import offered_aad

        sealed = await codec.offer(text, offered_aad(task["action"], task.get("tenant")))
        return {name: value for name, value in task.items() if name != "payload"} | {
            "sealed_payload": json.loads(sealed)
        }

    async def complete(self, token: str, result: Any = None, *, tenant: str | None = None) -> None:
        """Send the result that a task waits for. Raises TooLarge, Unfinished."""
        await self.send("task.complete", answering(token, tenant=tenant) | {"result": result})

    async def fail(self, token: str, error: str | Mapping[str, Any], **options: Any) -> None:
        """Send a failure of the attempt that waits; options as in :meth:`Client.fail`. Raises TooLarge, Unfinished."""
        await self.send("task.fail", {"token": token, "error": error, **options})

    async def send(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a request of a method whose answer is not needed, such as ``cancel``. Raises TooLarge, Unfinished."""
        await self._send_all([request_text(method, params, None)], [params])

    def _open_transport(self) -> Transport:
        if self._transport_url is None:
            from penstock.brokers.sqs import SqsTransport

            return SqsTransport(endpoint_url=self._endpoint_url, region=self._region, access_key=self._access_key)
        from penstock.brokers.opening import open_transport
        from penstock.settings.loading import load_settings

        return open_transport(load_settings(transport_url=self._transport_url))

    async def _send_all(self, texts: Sequence[str], given: Sequence[Mapping[str, Any]]) -> None:
        """Send requests, of which those of ``given`` are told as unsent where they were not."""
        from penstock.brokers.base import Outgoing

        if self._queue is None:
            self._transport = self._open_transport()
            self._queue = self._transport.queue(self._name, label="inbound")
        queue = self._queue
        most = queue.limits.max_message_bytes
        for text in texts:
            if len(text) > most:
                raise TooLarge("a task", len(text), most)
        # Text is ASCII here, so characters are bytes.
        cuts = pack([len(text) for text in texts], max_bytes=most, max_items=MESSAGE_TASKS)
        headers = trace_headers()
        room = most - sum(len(name) + len(value) for name, value in headers.items()) - _ATTRIBUTES_BYTES
        bodies = [(start, end, join_batch(texts[start:end])) for start, end in cuts]
        left = [(start, end, Outgoing(body, headers if len(body) <= room else {})) for start, end, body in bodies]
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


def _codec_of(settings: Settings) -> PayloadCodec:
    from penstock.payloads.codec import PayloadCodec

    return PayloadCodec(settings)


def unreachable(url: str, exc: Exception) -> Unavailable:
    """What became of a request that has no answer, in our words."""
    if isinstance(exc, httpx.TimeoutException):
        return Unavailable(f"the api at {url} did not answer in time: try again, or raise the timeout")
    return Unavailable(
        f"the api at {url} cannot be reached ({exc}): start it with `penstock up` or `penstock api`, "
        "or name another URL"
    )


def trace_headers() -> dict[str, str]:
    """Headers, or attributes of a message, by which the span that is active in the caller's program goes on."""
    trace = trace_context.current()
    return {} if trace is None else trace.headers


def base_url(url: str | None) -> str:
    """Where the api is: as given, else PENSTOCK_API_URL, else on this machine."""
    return (url or os.environ.get("PENSTOCK_API_URL") or _DEFAULT_URL).rstrip("/").removesuffix("/rpc")


def http_headers(api_key: str | None) -> dict[str, str]:
    """Headers of every request, with PENSTOCK_API_KEY where no key is given."""
    headers = {"Content-Type": "application/json"}
    if api_key is None:
        api_key = os.environ.get("PENSTOCK_API_KEY")
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers
