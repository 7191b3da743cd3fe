"""Timings: how long handlers ran, kept for the metrics and told to the pipeline, which packs messages by it."""

from __future__ import annotations

from collections import defaultdict
from time import monotonic

from penstock.protocol.reports import encode_run_times
from penstock.runtime import metrics

_TELL_SECONDS = 0.25
_ACTIONS_TOLD = 1000  # in one notification


class Timings:
    """Adding one costs no more than keeping a number; ``flush`` does the rest for many."""

    def __init__(self) -> None:
        self._new: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self._exemplars: defaultdict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
        self._untold: dict[str, tuple[int, float]] = {}
        self._told_at = float("-inf")

    def add(self, action: str, outcome: str, seconds: float, trace_id: str | None = None) -> None:
        """One attempt has ended after that time; outcome: ok, error or timeout. trace_id: where it is recorded."""
        self._new[action, outcome].append(seconds)
        if trace_id is not None:
            self._exemplars[action, outcome].append((seconds, trace_id))

    def flush(self) -> None:
        """Enter what was added into the metrics."""
        if not self._new:
            return
        new, self._new = self._new, defaultdict(list)
        exemplars, self._exemplars = self._exemplars, defaultdict(list)
        for (action, outcome), seconds in new.items():
            metrics.RUN_SECONDS.labels(action, outcome).observe_many(seconds, exemplars[action, outcome])
            count, total = self._untold.get(action, (0, 0.0))
            self._untold[action] = count + len(seconds), total + sum(seconds)

    def tell(self) -> str | None:
        """The notification of what has not been told yet; None when there is nothing, or the last one is fresh."""
        self.flush()
        now = monotonic()
        if not self._untold or now - self._told_at < _TELL_SECONDS:
            return None
        self._told_at = now
        told = dict(list(self._untold.items())[:_ACTIONS_TOLD])
        for action in told:
            del self._untold[action]
        return encode_run_times(told)
