"""Run times of handlers, for the metrics and for the scheduler, which packs messages by them."""

from __future__ import annotations

from collections import defaultdict
from time import monotonic

from penstock.protocol.reports import encode_run_times
from penstock.runtime import metrics

_SEND_SECONDS = 0.25
_MAX_ACTIONS = 1000  # in one notification


class Timings:
    """Run times not yet in the metrics or in a notification; adding one is cheap."""

    def __init__(self) -> None:
        self._new: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._exemplars: defaultdict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
        self._unsent: dict[str, tuple[int, float]] = {}
        self._sent_at = float("-inf")

    def add(self, action: str, outcome: str, seconds: float, trace_id: str | None = None) -> None:
        """Add the run time of an attempt. outcome: ok, error or timeout. trace_id: of a recorded trace."""
        self._new[action, outcome].append(seconds)
        if trace_id is not None:
            self._exemplars[action, outcome].append((seconds, trace_id))

    def flush(self) -> None:
        """Move added run times into the metrics."""
        if not self._new:
            return
        new, self._new = self._new, defaultdict(list)
        exemplars, self._exemplars = self._exemplars, defaultdict(list)
        for (action, outcome), seconds in new.items():
            metrics.RUN_SECONDS.labels(action, outcome).observe_many(seconds, exemplars[action, outcome])
            count, total = self._unsent.get(action, (0, 0.0))
            self._unsent[action] = count + len(seconds), total + sum(seconds)

    def unsent(self) -> str | None:
        """The notification of unsent run times; None when there are none, or the last one is recent."""
        self.flush()
        now = monotonic()
        if not self._unsent or now - self._sent_at < _SEND_SECONDS:
            return None
        self._sent_at = now
        sent = dict(list(self._unsent.items())[:_MAX_ACTIONS])
        for action in sent:
            del self._unsent[action]
        return encode_run_times(sent)
