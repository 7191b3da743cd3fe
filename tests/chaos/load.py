"""A steady stream of tasks over HTTP and through the queue, from senders that try again as real ones do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.chaos.ledger import Accepted, Ledger

_AWAY = (httpx.HTTPError, OSError, TimeoutError, ValueError)
_DELAYED_SHARE = 0.1
_DELAY_SECONDS = 1.0


class Load:
    """Sends until stopped. api_url is asked for each time, since nothing says that it stays. send: puts a body into the
    inbound queue; False when it is unknown whether it is there.

    Of the tasks through HTTP half have a unique key, and are sent again until answered; the others are sent once, and
    count as accepted only if that was answered. Those through the queue all have a key, for there is no answer.
    http_per_second, queue_per_second: tasks.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        api_url: Callable[[], str],
        send: Callable[[str], Awaitable[bool]],
        http_per_second: int = 120,
        queue_per_second: int = 40,
    ) -> None:
        self._ledger = ledger
        self._api_url = api_url
        self._send = send
        self._rates = (http_per_second, queue_per_second)
        self._numbers = itertools.count(1)
        self._stop = asyncio.Event()
        self._pending: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._broken: BaseException | None = None

    async def __aenter__(self) -> Load:
        self._stack = contextlib.AsyncExitStack()
        self._http = await self._stack.enter_async_context(httpx.AsyncClient(timeout=10, trust_env=False))
        self._task = asyncio.create_task(self._send_steadily(), name="load")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.finish()
        await self._stack.aclose()

    async def finish(self) -> None:
        """Send nothing new, and wait until all that was begun is answered."""
        self._stop.set()
        if self._task is not None:
            await self._task
        while self._pending:
            await asyncio.wait(self._pending)
        if self._broken is not None:
            raise self._broken  # a mistake of ours; what it would have noted is missing from the ledger

    async def enqueue(self, action: str, **more: Any) -> int:
        """One task by HTTP, sent until it is accepted; returns its id."""
        key = f"one-{next(self._numbers)}"
        return (await self._until_answered([_request(action, 0, unique_key=key, **more)]))[0]

    async def _send_steadily(self) -> None:
        http, queue = (rate // 10 for rate in self._rates)
        while not self._stop.is_set():
            self._spawn(self._send_keyed(http // 2))
            self._spawn(self._send_once(http - http // 2))
            self._spawn(self._send_to_queue(queue))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.1)

    def _spawn(self, call: Awaitable[None]) -> None:
        task = asyncio.ensure_future(call)
        self._pending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._pending.discard(task)
        if not task.cancelled() and (broken := task.exception()) is not None:
            self._broken = self._broken or broken

    def _tasks(self, count: int, *, keyed: bool) -> tuple[list[dict[str, Any]], list[tuple[str | None, float]]]:
        requests: list[dict[str, Any]] = []
        told: list[tuple[str | None, float]] = []
        for _ in range(count):
            key = f"k-{next(self._numbers)}" if keyed else None
            delay = _DELAY_SECONDS if random.random() < _DELAYED_SHARE else 0.0
            action = "plain_work" if random.random() < 0.2 else "work"
            more: dict[str, Any] = {"unique_key": key} if key else {}
            if delay:
                more["delay"] = delay
            requests.append(_request(action, len(requests), payload={"ms": random.choice([1, 2, 5, 20])}, **more))
            told.append((key, delay))
        return requests, told

    async def _send_keyed(self, count: int) -> None:
        requests, told = self._tasks(count, keyed=True)
        began = time.time()
        ids = await self._until_answered(requests)
        self._ledger.accepted += [Accepted(id_, key, began, delay) for id_, (key, delay) in zip(ids, told, strict=True)]

    async def _until_answered(self, requests: list[dict[str, Any]]) -> list[int]:
        ids: dict[int, int] = {}
        while True:
            ids |= await self._post([request for request in requests if request["id"] not in ids])
            if len(ids) == len(requests):
                return [ids[request["id"]] for request in requests]
            await asyncio.sleep(random.uniform(0.2, 0.6))

    async def _send_once(self, count: int) -> None:
        requests, told = self._tasks(count, keyed=False)
        began = time.time()
        answered = await self._post(requests)
        self._ledger.accepted += [
            Accepted(answered[request["id"]], None, began, delay)
            for request, (_, delay) in zip(requests, told, strict=True)
            if request["id"] in answered
        ]

    async def _post(self, requests: list[dict[str, Any]]) -> dict[int, int]:
        """Task ids by request id, of those that were accepted."""
        try:
            reply = await self._http.post(f"{self._api_url()}/rpc", json=requests)
            answers = reply.json()
        except _AWAY:
            return {}
        answers = answers if isinstance(answers, list) else []
        return {answer["id"]: answer["result"]["id"] for answer in answers if "result" in answer}

    async def _send_to_queue(self, count: int) -> None:
        requests, told = self._tasks(count, keyed=True)
        began = time.time()
        while not await self._send(json.dumps(requests)):
            await asyncio.sleep(random.uniform(0.2, 0.6))
        self._ledger.accepted += [Accepted(None, key, began, delay) for key, delay in told]


def _request(action: str, number: int, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": action, **params}, "id": number}
