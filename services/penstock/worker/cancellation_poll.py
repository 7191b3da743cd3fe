"""Asks the api which running tasks have lost their claim; without it they run to their end, and are ignored then."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from penstock.protocol.errors import RpcError, Unavailable
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses, repeat
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt

_MAX_CLAIMS = 1000  # that the api takes at once


@dataclass
class CancellationPoll:
    """Polls at an interval for attempts that have run for longer, and calls ``lost`` with each lost one."""

    settings: Settings
    url: str
    attempts: Callable[[], Iterator[Attempt]]
    lost: Callable[[Attempt], None]

    def __post_init__(self) -> None:
        self._poll_seconds = self.settings.cancel_poll_seconds
        self._pauses = Pauses(2 * self._poll_seconds, max(60.0, self._poll_seconds))

    async def run(self) -> None:
        """Poll; a side task."""
        from penstock.client.async_client import AsyncClient  # its library takes long to load

        key = self.settings.control_api_key
        async with AsyncClient(self.url, "" if key is None else key.get_secret_value(), timeout=10.0) as api:
            await repeat("poll for lost claims", partial(self.poll_once, api))

    async def poll_once(self, api: Any) -> float:
        """Poll once; returns the seconds until the next time. An unreachable api is logged once."""
        before = monotonic() - self._poll_seconds
        running = {
            f"{attempt.claim.task_id}:{attempt.claim.claim}": attempt  # without the token, which is for results alone
            for attempt in self.attempts()
            if 0 < attempt.started_at <= before and not attempt.is_lost
        }
        claims = list(running)
        for start in range(0, len(claims), _MAX_CLAIMS):
            try:
                answer = await api.call("claims.check", {"claims": claims[start : start + _MAX_CLAIMS]})
            except (Unavailable, RpcError) as exc:
                if not self._pauses.failures:
                    log.warning("control_away", url=self.url, reason=str(exc), hint="cancelled tasks run to their end")
                return self._pauses.next_seconds()
            if self._pauses.failures:
                log.info("control_back", url=self.url, failures=self._pauses.failures)
                self._pauses.reset()
            for claim in running.keys() & answer["lost"]:
                self.lost(running[claim])
        return self._poll_seconds * random.uniform(0.9, 1.1)  # so that many workers do not poll at once
