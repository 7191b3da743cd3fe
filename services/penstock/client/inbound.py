"""The clients through the inbound queue, for programs that need no answers: for asyncio, and with blocking methods."""

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

from pydantic import SecretStr

from penstock.brokers.base import Outgoing, Queue
from penstock.brokers.opening import open_transport
from penstock.client.exchanges import Params, Request, Unfinished, request_text, trace_headers
from penstock.client.methods import AsyncNothing, Nothing, ScheduleChanges, WaitAnswers, WorkflowChanges
from penstock.payloads.codec import PayloadCodec, offered_aad
from penstock.protocol import in_process
from penstock.protocol.errors import TooLarge
from penstock.protocol.json_text import dumps
from penstock.protocol.options import EnqueueOptions
from penstock.protocol.requests import join_batch, pack, prepared, task_params
from penstock.runtime.loop_thread import LoopThread
from penstock.runtime.periodic import Pauses
from penstock.settings.model import Settings, load_settings

T = TypeVar("T")
MESSAGE_TASKS = 100
_SEND_TRIES = 4
_ATTRIBUTES_BYTES = 64  # of a message's attributes, beside their names and values
_FIRST_PAUSE_SECONDS = 0.1


class InboundClient(WaitAnswers[AsyncNothing]):
    """Adds tasks through the inbound queue, without a connection to the api; use it with ``async with``.

    queue: name of the inbound queue, of SQS its URL too. endpoint_url: None for AWS. region: None for the SDK's own
    chain. access_key: of SQS, as PENSTOCK_SQS_ACCESS_KEY; None for the SDK's own chain.
    transport_url: as PENSTOCK_TRANSPORT_URL, for a broker other than SQS; its other settings, such as
    PENSTOCK_KAFKA_*, are read from the environment.
    A send that timed out may have arrived, and is repeated: give tasks a ``unique_key`` if none may run twice.
    payloads: settings with the bucket for payloads over its threshold, so that no message has to hold them, and with
    the keys that encrypt payloads before they are sent.
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
        self._codec = PayloadCodec(payloads)
        if transport_url is None:
            key = SecretStr(access_key) if access_key else None
            settings = Settings.model_construct(sqs_endpoint_url=endpoint_url, aws_region=region, sqs_access_key=key)
        else:
            settings = load_settings(transport_url=transport_url)
        self._transport = open_transport(settings)
        self._queue: Queue = self._transport.queue(queue, label="inbound")
        self.schedules: ScheduleChanges[AsyncNothing] = ScheduleChanges(self._run)
        self.workflows: WorkflowChanges[AsyncNothing] = WorkflowChanges(self._run)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()
        await self._codec.close()

    async def enqueue(self, action: str, payload: Any = None, **options: Unpack[EnqueueOptions]) -> None:
        """Send one task; options as in :meth:`Client.enqueue`. Raises TooLarge, Unfinished."""
        await self.enqueue_many([task_params(action, payload, options)])

    async def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> int:
        """Send tasks, each a mapping of ``action`` and the other parameters of `enqueue`, many in a message.

        Returns their number. Raises TooLarge, before anything is sent, for a task that no message can hold;
        PayloadUnavailable when the bucket is unavailable; Unfinished, with the tasks that were not sent, when the queue
        rejects them after several tries.
        """
        given, texts = list[Mapping[str, Any]](), list[str]()
        for task in tasks:
            given.append(params := {**task})
            text = dumps(task.get("payload", {})) if self._codec.is_on else ""
            if in_process.substitute is None and (self._codec.encrypts or self._codec.is_large(text)):
                sealed = await self._codec.offer(text, offered_aad(task["action"], task.get("tenant")))
                others = {name: value for name, value in task.items() if name != "payload"}
                params = others | {"sealed_payload": json.loads(sealed)}
            texts.append(request_text("enqueue", prepared(params), None))
        # Unfinished has them with their payloads, which are sealed again when they are sent again.
        await self._send_all(texts, given)
        return len(given)

    async def send(self, method: str, params: Params) -> None:
        """Send a request of any method that changes something, such as ``cancel``. Raises TooLarge, Unfinished."""
        if method == "enqueue" and isinstance(params, Mapping):
            await self.enqueue_many([params])  # which encrypts its payload, or stores a large one
        else:
            await self._send_all([request_text(method, params, None)], [params])

    async def _run(self, call: Request[Any]) -> None:
        await self.send(call.method, call.params)

    async def _send_all(self, texts: Sequence[str], requests: Sequence[Any]) -> None:
        """Send requests as texts; Unfinished names the entries of ``requests`` that were not sent."""
        most = self._queue.limits.max_message_bytes
        for text in texts:
            if len(text) > most:
                raise TooLarge("a task", len(text), most)
        if in_process.substitute is not None:
            in_process.substitute.send(texts)
            return
        # Text is ASCII here, so characters are bytes.
        cuts = pack([len(text) for text in texts], max_bytes=most, max_items=MESSAGE_TASKS)
        headers = trace_headers()
        room = most - sum(len(name) + len(value) for name, value in headers.items()) - _ATTRIBUTES_BYTES
        bodies = [(start, end, join_batch(texts[start:end])) for start, end in cuts]
        left = [(start, end, Outgoing(body, headers if len(body) <= room else {})) for start, end, body in bodies]
        reason: str | None = None
        pauses = Pauses(_FIRST_PAUSE_SECONDS)
        for attempt in range(_SEND_TRIES):
            if not left:
                break
            if attempt:
                await asyncio.sleep(pauses.next_seconds())
            report = await self._queue.send([message for _, _, message in left])
            left, reason = [left[position] for position in report.failed], report.reason
        if left:
            unsent = [task for start, end, _ in left for task in requests[start:end]]
            raise Unfinished(f"{len(unsent)} of {len(requests)} tasks were not sent: {reason}", [], unsent)


class SyncInboundClient(WaitAnswers[Nothing]):
    """`InboundClient` with blocking methods, for Django, Flask and scripts; its arguments and errors are the same.

    Use it in a ``with`` block, or call ``close``. It is safe to share between threads, and not across a fork.
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
        self._client = InboundClient(
            queue, endpoint_url, region, access_key=access_key, transport_url=transport_url, payloads=payloads
        )
        self._thread = LoopThread("penstock-inbound")
        self.schedules: ScheduleChanges[Nothing] = ScheduleChanges(self._run)
        self.workflows: WorkflowChanges[Nothing] = WorkflowChanges(self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        if self._thread.is_alive():
            self._wait(self._client.close())
            self._thread.stop()

    def enqueue(self, action: str, payload: Any = None, **options: Unpack[EnqueueOptions]) -> None:
        """Send one task; options as in :meth:`Client.enqueue`."""
        self._wait(self._client.enqueue(action, payload, **options))

    def enqueue_many(self, tasks: Iterable[Mapping[str, Any]]) -> int:
        """Send tasks, many in a message; returns their number."""
        return self._wait(self._client.enqueue_many(tasks))

    def send(self, method: str, params: Params) -> None:
        """Send a request of any method that changes something."""
        self._wait(self._client.send(method, params))

    def _run(self, call: Request[Any]) -> None:
        self.send(call.method, call.params)

    def _wait(self, sending: Coroutine[Any, Any, T]) -> T:
        return self._thread.submit(sending).result()
