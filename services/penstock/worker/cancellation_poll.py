"""Asks the api which running tasks have lost their claim; without it they run to their end, and are ignored then."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic

import aiohttp  # the SQS client has loaded it already
import msgspec

from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses, repeat
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt

_MAX_CLAIMS = 1000  # that the api takes at once
_TIMEOUT_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 60.0


class _LostClaims(msgspec.Struct):
    lost: list[str]


class _Answer(msgspec.Struct):
    result: _LostClaims


class CancellationPoll:
    """Polls at an interval for attempts that have run for longer, and calls ``lost`` with each lost one."""

    def __init__(
        self, settings: Settings, url: str, attempts: Callable[[], Iterator[Attempt]], lost: Callable[[Attempt], None]
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/rpc") + "/rpc"
        key = settings.control_api_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
        self._poll_seconds = settings.cancel_poll_seconds
        self._attempts = attempts
        self._lost = lost
        self._pauses = Pauses(2 * self._poll_seconds, max(_LONGEST_PAUSE_SECONDS, self._poll_seconds))

    async def run(self) -> None:
        """Poll; a side task."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http:
            await repeat("poll for lost claims", partial(self.poll_once, http))

    async def poll_once(self, http: aiohttp.ClientSession) -> float:
        """Poll once; returns the seconds until the next time. An unreachable api is logged once."""
        before = monotonic() - self._poll_seconds
        running = {
            f"{attempt.claim.task_id}:{attempt.claim.claim}": attempt  # without the token, which is for results alone
            for attempt in self._attempts()
            if 0 < attempt.started_at <= before and not attempt.is_lost
        }
        claims = list(running)
        for start in range(0, len(claims), _MAX_CLAIMS):
            try:
                lost = await self._lost_claims(http, claims[start : start + _MAX_CLAIMS])
            except Unavailable as exc:
                if not self._pauses.failures:
                    log.warning("control_away", url=self._url, reason=str(exc), hint="cancelled tasks run to their end")
                return self._pauses.next_seconds()
            if self._pauses.failures:
                log.info("control_back", url=self._url, failures=self._pauses.failures)
                self._pauses.reset()
            for claim in running.keys() & lost:
                self._lost(running[claim])
        return self._poll_seconds * random.uniform(0.9, 1.1)  # so that many workers do not poll at once

    async def _lost_claims(self, http: aiohttp.ClientSession, claims: Sequence[str]) -> list[str]:
        """Raises Unavailable without a valid response."""
        request = {"jsonrpc": "2.0", "method": "claims.check", "params": {"claims": claims}, "id": 1}
        try:
            async with http.post(self._url, json=request) as reply:
                body = await reply.read()
            return msgspec.json.decode(body, type=_Answer).result.lost
        except (aiohttp.ClientError, OSError) as exc:
            raise Unavailable(str(exc) or type(exc).__name__) from exc
        except msgspec.DecodeError as exc:
            raise Unavailable(f"HTTP {reply.status}: {body[:200].decode('utf-8', 'replace')}") from exc
