"""Control: asks the api which of the tasks that run here are no longer this worker's, so that handlers can stop.

A worker without a URL of the api asks nothing: its cancelled tasks run to their end, and their results are ignored.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

import aiohttp  # the SQS client has loaded it already
import msgspec

from penstock.runtime.backoff import Pauses
from penstock.runtime.logs import get_logger
from penstock.worker.attempt import Job

_MAX_CLAIMS = 1000  # that the api takes at once
_TIMEOUT_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 60.0

log = get_logger()


class _Lost(msgspec.Struct):
    lost: list[str]


class _Answer(msgspec.Struct):
    result: _Lost


_decode = msgspec.json.Decoder(_Answer).decode


class _Away(Exception):
    """The api does not answer, or not as it should."""


class Control:
    """Asks at an interval, about tasks that have run for longer than that.

    url: of the api, or its ``/rpc``. jobs: those without an answer. lost: called with each that is lost.
    """

    def __init__(
        self,
        *,
        url: str,
        api_key: str | None,
        poll_seconds: float,
        jobs: Callable[[], Iterator[Job]],
        lost: Callable[[Job], None],
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/rpc") + "/rpc"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._poll_seconds = poll_seconds
        self._jobs = jobs
        self._lost = lost
        self._pauses = Pauses(2 * poll_seconds, max(_LONGEST_PAUSE_SECONDS, poll_seconds))
        self._retry_seconds = 0.0

    async def run(self) -> None:
        """The asking; a side task."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http:
            while True:
                await asyncio.sleep(self._pause_seconds())
                await self.ask_once(http)

    async def ask_once(self, http: aiohttp.ClientSession) -> int:
        """Ask about all that has run for long enough; returns how many are lost. An api that is away costs a line."""
        before = monotonic() - self._poll_seconds
        running = {
            f"{job.claim.task_id}:{job.claim.claim}": job  # without the token, which is for results alone
            for job in self._jobs()
            if 0 < job.started_at <= before and not job.is_lost
        }
        claims = list(running)
        found = 0
        for start in range(0, len(claims), _MAX_CLAIMS):
            try:
                lost = await self._ask(http, claims[start : start + _MAX_CLAIMS])
            except _Away as exc:
                if not self._pauses.failures:
                    log.warning("control_away", url=self._url, reason=str(exc), hint="cancelled tasks run to their end")
                self._retry_seconds = self._pauses.next_seconds()
                return found
            if self._pauses.failures:
                log.info("control_back", url=self._url, failures=self._pauses.failures)
                self._pauses.reset()
            for job in [running[claim] for claim in lost if claim in running]:
                self._lost(job)
                found += 1
        return found

    async def _ask(self, http: aiohttp.ClientSession, claims: Sequence[str]) -> list[str]:
        request = {"jsonrpc": "2.0", "method": "claims.check", "params": {"claims": claims}, "id": 1}
        try:
            headers = {"Content-Type": "application/json"}
            async with http.post(self._url, data=json.dumps(request), headers=headers) as reply:
                body = await reply.read()
            return _decode(body).result.lost
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise _Away(str(exc) or type(exc).__name__) from exc
        except msgspec.DecodeError as exc:
            raise _Away(f"HTTP {reply.status}: {body[:200].decode('utf-8', 'replace')}") from exc

    def _pause_seconds(self) -> float:
        if self._pauses.failures:
            return self._retry_seconds
        return self._poll_seconds * random.uniform(0.9, 1.1)  # so that many workers do not ask at once
