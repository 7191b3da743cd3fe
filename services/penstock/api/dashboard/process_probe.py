"""Readiness over HTTP of processes that have no connection to Postgres, such as workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

import httpx

from penstock.settings.values import named_url

PROBE_EVERY_SECONDS = 5.0
_ANSWER_SECONDS = 1.5


class ProcessHealth(NamedTuple):
    """ready: None before the first answer. text: of the answer, or the error."""

    name: str
    url: str
    ready: bool | None
    text: str


class ProcessProbe:
    """Probes processes in the background, so that none delays a page."""

    def __init__(self, processes: Sequence[str]) -> None:
        self._urls = [named_url(entry) for entry in processes]
        self._latest = [ProcessHealth(name, url, None, "checking") for name, url in self._urls]
        self._probed_at = float("-inf")
        self._probing: asyncio.Task[None] | None = None

    def latest(self) -> list[ProcessHealth]:
        """The last answers; starts a new round if these are some seconds old."""
        is_probing = self._probing is not None and not self._probing.done()
        if self._urls and not is_probing and monotonic() - self._probed_at > PROBE_EVERY_SECONDS:
            self._probing = asyncio.create_task(self.probe(), name="probe processes")
        return self._latest

    async def probe(self) -> None:
        async with httpx.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as client:

            async def health(name: str, url: str) -> ProcessHealth:
                try:
                    answer = await client.get(f"{url}/readyz")
                except httpx.HTTPError as exc:
                    return ProcessHealth(name, url, False, type(exc).__name__)
                return ProcessHealth(name, url, answer.status_code == 200, answer.text.strip()[:200])

            self._latest = list(await asyncio.gather(*(health(name, url) for name, url in self._urls)))
        self._probed_at = monotonic()

    def stop(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
