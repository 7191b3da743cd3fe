"""Keeps a duty that fails from stopping the other duties of its round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from penstock.protocol.errors import Unavailable
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger

_LOGGED_EVERY = 10

log = get_logger()


class Guard:
    """Runs the duties of a round one by one; a failure is logged, the first and every tenth in a row, and counted."""

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()
        self._failed: dict[str, Exception] = {}

    async def run(self, duty: str, work: Callable[[], Awaitable[int]]) -> int:
        """What ``work`` returns, or 0 when it fails."""
        try:
            changed = await work()
        except Exception as exc:
            self._failed[duty] = exc
            self._in_a_row[duty] += 1
            metrics.DUTIES_FAILED.labels(duty).inc()
            failures = self._in_a_row[duty]
            if failures % _LOGGED_EVERY == 1:
                if isinstance(exc, Unavailable):
                    log.warning("duty_failed", duty=duty, reason=str(exc), failures=failures)
                else:
                    log.exception("duty_failed", duty=duty, error=type(exc).__name__, failures=failures)
            return 0
        del self._in_a_row[duty]
        return changed

    def end_round(self) -> None:
        """Raises Unavailable when a duty of the round failed: the first that was, or one that names the others."""
        failed, self._failed = self._failed, {}
        for exc in failed.values():
            if isinstance(exc, Unavailable):
                raise exc
        if failed:
            kinds = ", ".join(f"{duty} ({type(exc).__name__})" for duty, exc in failed.items())
            raise Unavailable(f"upkeep failed: {kinds}; the log lines duty_failed have the tracebacks")
