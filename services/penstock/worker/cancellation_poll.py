"""Asks the api which running tasks have lost their claim; without it they run to their end, and are ignored then."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any

from penstock.protocol.errors import RpcError, Unavailable
from penstock.runtime.logs import log
from penstock.runtime.periodic import Pauses, repeat
from penstock.settings.model import Settings
from penstock.worker.attempt import Attempt

_MAX_CLAIMS = 1000  # that the api takes at once
_TIMEOUT_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 60.0


class CancellationPoll:
    """Polls at an interval for attempts that have run for longer, and calls ``lost`` with each lost one."""

    def __init__(
        self, settings: Settings, url: str, attempts: Callable[[], Iterator[Attempt]], lost: Callable[[Attempt], None]
    ) -> None:
        self._url = url
        key = settings.control_api_key
        self._key = "" if key is None else key.get_secret_value()
        self._poll_seconds = settings.cancel_poll_seconds
        self._attempts = attempts
        self._lost = lost
        self._pauses = Pauses(2 * self._poll_seconds, max(_LONGEST_PAUSE_SECONDS, self._poll_seconds))

    async def run(self) -> None:
        """Poll; a side task."""
        from penstock.client.async_client import AsyncClient  # its library takes long to load

        async with AsyncClient(self._url, self._key, _TIMEOUT_SECONDS) as api:
            await repeat("poll for lost claims", partial(self.poll_once, api))

    async def poll_once(self, api: Any) -> float:
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
                answer = await api.call("claims.check", {"claims": claims[start : start + _MAX_CLAIMS]})
            except (Unavailable, RpcError) as exc:
                if not self._pauses.failures:
                    log.warning("control_away", url=self._url, reason=str(exc), hint="cancelled tasks run to their end")
                return self._pauses.next_seconds()
            if self._pauses.failures:
                log.info("control_back", url=self._url, failures=self._pauses.failures)
                self._pauses.reset()
            for claim in running.keys() & answer["lost"]:
                self._lost(running[claim])
        return self._poll_seconds * random.uniform(0.9, 1.1)  # so that many workers do not poll at once
