"""Processes that have no connection to Postgres, asked over HTTP whether they are ready."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import NamedTuple

import httpx

from penstock.settings.values import named_url

ASKED_EVERY_SECONDS = 5.0
_ANSWER_SECONDS = 1.5


class Seen(NamedTuple):
    """A process. ready: None before it was first asked. said: what it answered, or why it did not."""

    name: str
    url: str
    ready: bool | None
    said: str


class Alive:
    """What processes say of themselves, asked beside the pages: one that hangs keeps nobody waiting."""

    def __init__(self, processes: Sequence[str]) -> None:
        self._urls = [named_url(entry) for entry in processes]
        self._seen = [Seen(name, url, None, "being asked") for name, url in self._urls]
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    def look(self) -> list[Seen]:
        """What is known now; asks anew where that is some seconds old."""
        is_asking = self._asking is not None and not self._asking.done()
        if self._urls and not is_asking and monotonic() - self._asked_at > ASKED_EVERY_SECONDS:
            self._asking = asyncio.create_task(self.ask(), name="ask processes")
        return self._seen

    async def ask(self) -> None:
        """Ask all of them, at once."""
        async with httpx.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as client:
            self._seen = list(await asyncio.gather(*(_ask(client, name, url) for name, url in self._urls)))
        self._asked_at = monotonic()

    def stop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


async def _ask(client: httpx.AsyncClient, name: str, url: str) -> Seen:
    try:
        answer = await client.get(f"{url}/readyz")
    except httpx.HTTPError as exc:
        return Seen(name, url, False, type(exc).__name__)
    return Seen(name, url, answer.status_code == 200, answer.text.strip()[:200])
