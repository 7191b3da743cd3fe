"""scheduler0.callback: jobs that are due together and have one URL are sent as one JSON array, in chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.compat.scheduler0.jobs import ACTION, Callback, job_told
from penstock.settings.model import Settings
from penstock.worker.deliveries.errors import NotDelivered
from penstock.worker.deliveries.http_client import HttpClient
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.batches import Call

CHUNK_HEADER = "x-payload-chunk-id"
BATCH = 3000
LINGER_SECONDS = 0.5
_REDIRECTS = 10
_LONGEST_SECONDS = 12 * 3600.0  # that a message may be held
_SHOWN_BYTES = 300  # of an unexpected answer, in the error

_encode = msgspec.json.Encoder().encode
Calls = Sequence[Call[Callback]]


def add_to(deliveries: Deliveries) -> None:
    callbacks = Callbacks(deliveries.http, deliveries.settings)
    deliveries.action(
        ACTION, callbacks.send, batch=BATCH, linger=LINGER_SECONDS, timeout=callbacks.longest_seconds
    )  # fmt: skip


class Callbacks:
    """The handler. What goes wrong with one chunk of one URL is the outcome of its jobs and of no others.

    longest_seconds: of one call, each of its jobs having a URL of its own and none of them answering.
    """

    def __init__(self, client: HttpClient, settings: Settings) -> None:
        self._client = client
        self._timeout_seconds = settings.scheduler0_timeout_seconds
        self._delay_seconds = settings.scheduler0_retry_delay_seconds
        self._limit_bytes = settings.scheduler0_payload_limit_bytes
        self._takes_any_status = settings.scheduler0_any_status
        # Of all batches together: a request that waits for a connection of the client does so within its own time.
        urls_at_once = max(1, settings.http_max_connections // 2)
        self._turns = asyncio.Semaphore(urls_at_once)
        self.longest_seconds = min(_LONGEST_SECONDS, self._timeout_seconds * (BATCH / urls_at_once + 10))

    async def send(self, calls: list[Call[Callback]]) -> list[object]:
        """One answer for each call: the status that its chunk got, or why it was not delivered."""
        by_url: dict[str, list[int]] = {}
        for place, call in enumerate(calls):
            by_url.setdefault(call.params.url, []).append(place)
        outcomes: list[object] = [None] * len(calls)

        async def send_to(url: str, places: list[int]) -> None:
            async with self._turns:
                for number, (chunk, body) in enumerate(self._chunks(calls, places)):
                    outcome = await self._post(url, number, body)
                    for place in chunk:
                        outcomes[place] = outcome
                        calls[place].answer(outcome)  # a slow URL must not delay the retries of the others

        async with asyncio.TaskGroup() as group:
            for url, places in by_url.items():
                group.create_task(send_to(url, places))
        return outcomes

    def _chunks(self, calls: Calls, places: Sequence[int]) -> Iterator[tuple[list[int], bytes]]:
        """Jobs in arrays within the limit; one that is beyond it alone travels alone."""
        chunk: list[int] = []
        texts: list[bytes] = []
        size = 2
        for place in places:
            text = _encode(job_told(calls[place].params))
            if chunk and size + len(text) + 1 > self._limit_bytes:
                yield chunk, b"[" + b",".join(texts) + b"]"
                chunk, texts, size = [], [], 2
            chunk.append(place)
            texts.append(text)
            size += len(text) + 1
        yield chunk, b"[" + b",".join(texts) + b"]"

    async def _post(self, url: str, number: int, body: bytes) -> dict[str, Any] | Exception:
        """What a chunk's jobs are answered with."""
        try:
            response = await self._client.request(
                "POST",
                url,
                headers={"Content-Type": "application/json", CHUNK_HEADER: str(number)},
                body=body,
                timeout_seconds=self._timeout_seconds,
                redirects=_REDIRECTS,
                limit_bytes=_SHOWN_BYTES,
            )
        except NotDelivered as exc:
            return NotDelivered(str(exc), self._delay_seconds if exc.delay is None else exc.delay)
        except Exception as exc:  # one URL's mishap is not that of the others in the batch
            return exc
        if self._takes_any_status or 200 <= response.status < 300:
            return {"status": response.status}
        said = response.body.decode("utf-8", "replace")
        return NotDelivered(
            f"{response.url} answered {response.status}, and a callback succeeds by 2xx alone"
            + (f": {said}" if said else ""),
            self._delay_seconds,
        )
