"""scheduler0.callback: jobs that are due together and have one URL are sent as JSON arrays of limited size."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from penstock.compat.scheduler0.jobs import ACTION, Callback, execution_id
from penstock.protocol.requests import pack
from penstock.settings.model import Settings
from penstock.worker.deliveries.errors import NotDelivered
from penstock.worker.deliveries.http_client import HttpClient
from penstock.worker.deliveries.registry import Deliveries
from penstock.worker.handlers.context import Call

BATCH = 3000
_REDIRECTS = 10
_LONGEST_SECONDS = 12 * 3600.0  # of a message's visibility
_SHOWN_BYTES = 300  # of an unexpected response, in the error


def add_to(deliveries: Deliveries) -> None:
    callbacks = Callbacks(deliveries.http, deliveries.settings)
    deliveries.action(ACTION, callbacks.send, batch=BATCH, linger=0.5, timeout=callbacks.longest_seconds)


class Callbacks:
    """The handler; each chunk of a URL has an outcome of its own."""

    def __init__(self, client: HttpClient, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        # Of all batches together, because waiting for a connection counts towards a request's timeout.
        urls_at_once = max(1, settings.http_max_connections // 2)
        self._url_slots = asyncio.Semaphore(urls_at_once)
        # Of a batch whose jobs all have different URLs that do not respond.
        self.longest_seconds = min(_LONGEST_SECONDS, settings.scheduler0_timeout_seconds * (BATCH / urls_at_once + 10))

    async def send(self, calls: list[Call[Callback]]) -> list[object]:
        """Returns for each call the status of its chunk's response, or the error."""
        by_url: dict[str, list[int]] = {}
        for place, call in enumerate(calls):
            by_url.setdefault(call.params.url, []).append(place)
        outcomes: list[object] = [None] * len(calls)

        async def send_to(url: str, places: list[int]) -> None:
            async with self._url_slots:
                for number, (chunk, body) in enumerate(self._chunks(calls, places)):
                    outcome = await self._post(url, number, body)
                    for place in chunk:
                        outcomes[place] = outcome
                        calls[place].answer(outcome)  # a slow URL must not delay the retries of the others

        async with asyncio.TaskGroup() as group:
            for url, places in by_url.items():
                group.create_task(send_to(url, places))
        return outcomes

    def _chunks(self, calls: Sequence[Call[Callback]], places: Sequence[int]) -> Iterator[tuple[Sequence[int], bytes]]:
        """Arrays of jobs within the limit; a job larger than the limit is sent alone."""
        texts = []
        for callback in (calls[place].params for place in places):
            executed = {"lastExecutionDate": callback.at, "executionId": execution_id(callback.run)}
            texts.append(msgspec.json.encode(callback.job | executed))
        limit = self._settings.scheduler0_payload_limit_bytes
        for start, end in pack([len(text) for text in texts], max_bytes=limit, max_items=len(texts)):
            yield places[start:end], b"[" + b",".join(texts[start:end]) + b"]"

    async def _post(self, url: str, number: int, body: bytes) -> dict[str, Any] | Exception:
        delay_seconds = self._settings.scheduler0_retry_delay_seconds
        try:
            response = await self._client.request(
                "POST",
                url,
                headers={"Content-Type": "application/json", "x-payload-chunk-id": str(number)},
                body=body,
                timeout_seconds=self._settings.scheduler0_timeout_seconds,
                redirects=_REDIRECTS,
                limit_bytes=_SHOWN_BYTES,
            )
        except NotDelivered as exc:
            return NotDelivered(str(exc), delay_seconds if exc.delay is None else exc.delay)
        except Exception as exc:  # must not fail the other URLs of the batch
            return exc
        if self._settings.scheduler0_any_status or 200 <= response.status < 300:
            return {"status": response.status}
        shown = response.body.decode("utf-8", "replace")
        reason = f"{response.url} answered {response.status}, and a callback succeeds by 2xx alone"
        return NotDelivered(f"{reason}: {shown}" if shown else reason, delay_seconds)
