"""The overview: the state of now and of the last hour as Postgres has it, and the live processes."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from time import monotonic, time
from typing import Any

import msgspec
from markupsafe import Markup

from penstock.api.dashboard import charts
from penstock.api.dashboard.charts import Series
from penstock.api.dashboard.page_request import PageRequest
from penstock.api.dashboard.pages import show_tenant
from penstock.api.dashboard.process_probe import ProcessProbe
from penstock.protocol.task import State
from penstock.settings.model import Settings
from penstock.tasks import views
from penstock.tasks.stats import RATES_OVER_SECONDS

CACHE_SECONDS = 1.0
FIRST_WITHIN_SECONDS = 0.05  # of a page that no stream follows yet
HISTORY_CACHE_SECONDS = 5.0
SAMPLE = 1000  # of the newest successes, for percentiles
FAILURES = 300  # of the newest, to be grouped
COUNTED_IN_FLIGHT = 100_000
HOUR_SECONDS, MINUTE_SECONDS = 3660.0, 60.0
LATELY_SECONDS, LATELY_STEP_SECONDS = 170.0, 5.0  # within what is stored to the second
LIVE = ("SCHEDULED", "WAITING", "ERROR", "ACQUIRED")
_FAILED = ("ERROR", "CRITICAL_ERROR")
_MAX_ACTIONS = 12
_NAME = re.compile(r"penstock-(?P<process>\w+)(?:@(?P<host>.*?):(?P<pid>\d+))?(?P<listen>-listen)?")


class Overview:
    """Reads the page's values at most once a second, for all browsers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._values: dict[str, Any] | None = None
        self._read_at = 0.0
        self._reading: asyncio.Task[dict[str, Any]] | None = None
        self._history: dict[str, Any] | None = None
        self._history_at = 0.0
        self._probe = ProcessProbe(settings.dashboard_processes)

    async def load(self, request: PageRequest) -> dict[str, Any]:
        """All values, or on the first request only the cheap ones if the others take too long: a stream brings them.

        A key that is bound to a tenant gets that tenant's page.
        """
        if request.browser.tenant is not None:
            return {"template": "tenant.html", **await show_tenant(request, request.browser.tenant)}
        if self._values is not None and monotonic() - self._read_at < CACHE_SECONDS:
            return self._values
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(request), name="read overview")
            self._reading.add_done_callback(self._on_read)
        waiting = asyncio.shield(self._reading)
        if request.is_stream:
            return await waiting
        try:
            async with asyncio.timeout(FIRST_WITHIN_SECONDS):
                return await waiting
        except TimeoutError:
            return await self._read_cheap(request)

    def _on_read(self, reading: asyncio.Task[dict[str, Any]]) -> None:
        self._reading = None
        if not reading.cancelled() and reading.exception() is None:  # an error is raised to those that wait
            self._values, self._read_at = reading.result(), monotonic()

    async def _read_cheap(self, request: PageRequest) -> dict[str, Any]:
        """Values that cost the same however many tasks there are."""
        now = await self._read_now(request)
        async with request.methods.session() as session:
            counted: dict[str, int] = dict(map(tuple, await session.fetch("read_rates", RATES_OVER_SECONDS)))
        return now | {
            "is_whole": False,
            "rates": views.rates(counted, RATES_OVER_SECONDS),
            "lag": {"due": None, "oldest_due_seconds": None},
            "backlog": None,
        }

    async def _read(self, request: PageRequest) -> dict[str, Any]:
        found, now, history = await asyncio.gather(
            request.call("stats"), self._read_now(request), self._read_history(request)
        )
        stats = msgspec.to_builtins(found)
        states = stats["states"]
        live = {f"s-{state.lower()}": states[state] for state in LIVE if states[state]}
        values: dict[str, Any] = history | now | {
            "is_whole": True,
            "rates": stats["rates"],
            "lag": stats["lag"],
            "states": states,
            "backlog": sum(states[state] for state in LIVE),
            "live_bar": charts.share_bar(live) if live else None,
            "live_states": [(state, states[state]) for state in LIVE],
            "floor": self._settings.in_flight_floor,
            "ceiling": self._settings.in_flight_limit,
        }  # fmt: skip
        return values

    async def _read_now(self, request: PageRequest) -> dict[str, Any]:
        """Values that change every second."""
        async with request.methods.session() as session:
            lately = await session.fetch("read_history", LATELY_SECONDS, LATELY_STEP_SECONDS)
            flight = (await session.fetch("read_in_flight", COUNTED_IN_FLIGHT))[0]
            connections = await session.fetch("read_connections")
        return {
            "sparks": _sparks(lately, time()),
            "flight": flight,
            "last_result": _last_result(lately),
            "processes": _processes(connections),
            "health": self._probe.latest(),
        }

    async def _read_history(self, request: PageRequest) -> dict[str, Any]:
        """Values that are more expensive to read and change slowly; cached for some seconds."""
        if self._history is not None and monotonic() - self._history_at < HISTORY_CACHE_SECONDS:
            return self._history
        async with request.methods.session() as session:
            hour = await session.fetch("read_history", HOUR_SECONDS, MINUTE_SECONDS)
            successes = await session.fetch("read_recent_successes", SAMPLE)
            failures = await session.fetch("read_recent_failures", FAILURES)
        self._history_at = monotonic()
        self._history = {
            "throughput": _by_minute(hour, time()),
            "latency": _latency(successes),
            "sample": len(successes),
            "handlers": _handler_times(hour),
            "failed_actions": _failed_actions(hour),
            "groups": _grouped(failures),
        }
        return self._history

    def stop(self) -> None:
        self._probe.stop()
        if self._reading is not None:
            self._reading.cancel()


def _per_step(rows: Iterable[Any], steps: Iterable[int], *events: str) -> list[float]:
    """Events in each step."""
    counts: dict[int, int] = defaultdict(int)
    for row in rows:
        if row["event"] in events:
            counts[row["step"]] += row["count"]
    return [counts[step] for step in steps]


def _by_minute(rows: Sequence[Any], now: float) -> dict[str, Any]:
    """The chart of the last hour without the current minute, and its sums."""
    last = int(now // MINUTE_SECONDS)
    steps = range(last - 60, last)
    labels = [datetime.fromtimestamp(step * MINUTE_SECONDS, UTC).strftime("%H:%M") for step in steps]
    succeeded, failed = _per_step(rows, steps, State.SUCCESS), _per_step(rows, steps, *_FAILED)
    enqueued = _per_step(rows, steps, "ENQUEUED")
    drawn = charts.columns(
        [Series("succeeded", "ok", succeeded), Series("failed", "bad", failed)], Series("enqueued", "in", enqueued),
        labels, "tasks a minute",
    )  # fmt: skip
    return {"chart": drawn, "enqueued": sum(enqueued), "succeeded": sum(succeeded), "failed": sum(failed)}


def _sparks(rows: Sequence[Any], now: float) -> dict[str, Markup]:
    """Three small charts of the last minutes without the current step."""
    last = int(now // LATELY_STEP_SECONDS)
    steps = range(last - int(LATELY_SECONDS // LATELY_STEP_SECONDS), last)
    kinds = {"in": ("ENQUEUED",), "ok": (State.SUCCESS,), "bad": _FAILED}
    return {kind: charts.sparkline(_per_step(rows, steps, *events), kind) for kind, events in kinds.items()}


def _latency(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Percentiles of the newest successes in seconds: of all, then of the most frequent actions."""
    by_action: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        by_action[row["action"]].append(row)
    groups = [("all", list(rows))] if rows else []
    if len(by_action) > 1:
        groups += sorted(by_action.items(), key=lambda item: -len(item[1]))[: _MAX_ACTIONS - 1]
    elif by_action:
        groups = list(by_action.items())
    found = []
    for name, of_group in groups:
        entry: dict[str, Any] = {"action": name, "count": len(of_group)}
        for measure in ("waited", "took"):
            ordered = sorted(row[measure] for row in of_group)
            entry[measure] = tuple(charts.percentile(ordered, share) for share in (0.5, 0.95, 0.99))
        found.append(entry)
    for measure in ("waited", "took"):
        values = [max(value, 0.001) for entry in found for value in entry[measure]]
        low, top = min(values, default=0.001), max(values, default=1.0)
        for entry in found:
            entry[measure + "_bar"] = charts.quantiles(entry[measure], low, top)
    return found


def _handler_times(rows: Iterable[Any]) -> dict[str, float]:
    """The mean run time of handlers over the hour by action and of all, in seconds, as workers report it."""
    counted: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        if row["event"] == "RAN":
            counted[row["action"]] += row["count"]
            seconds[row["action"]] += row["seconds"]
    means = {action: seconds[action] / count for action, count in counted.items() if count}
    if counted:
        means["all"] = sum(seconds.values()) / max(1, sum(counted.values()))
    return means


def _failed_actions(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Failed attempts of the hour by action, most first; final: those that failed permanently."""
    attempts: dict[str, int] = defaultdict(int)
    final: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["event"] in _FAILED:
            attempts[row["action"]] += row["count"]
        if row["event"] == State.CRITICAL_ERROR:
            final[row["action"]] += row["count"]
    top = max(attempts.values(), default=0)
    ordered = sorted(attempts.items(), key=lambda item: (-item[1], item[0]))[:_MAX_ACTIONS]
    return [
        {"action": name, "attempts": count, "final": final[name], "bar": charts.bar(count, top, "bad")}
        for name, count in ordered
    ]


def _grouped(failures: Sequence[Any]) -> list[dict[str, Any]]:
    """The newest failures by action and error, most first; messages that differ only in numbers are one error."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in failures:
        message = row["message"] or "no message"
        key = row["action"], row["kind"] or "", re.sub(r"\d+", "0", message)
        group = groups.setdefault(
            key, {"action": row["action"], "kind": row["kind"], "message": message, "count": 0, "newest": row["id"]}
        )
        group["count"] += 1
    return sorted(groups.values(), key=lambda group: -group["count"])[:6]


def _processes(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Processes by their connections to Postgres; those of an older version name no host and are one of each kind."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        match = _NAME.match(row["name"])
        if match is None:
            continue
        key = match["process"], match["host"] or row["address"] or "", match["pid"] or ""
        entry = found.setdefault(
            key, {"process": key[0], "host": key[1], "pid": key[2], "connections": 0, "since": row["since"]}
        )
        entry["connections"] += row["count"]
        if row["since"] is not None:
            entry["since"] = min(entry["since"] or row["since"], row["since"])
    return [found[key] for key in sorted(found)]


def _last_result(rows: Iterable[Any]) -> datetime | None:
    """When an attempt last ended, rounded up to a step."""
    steps = [row["step"] for row in rows if row["event"] in (State.SUCCESS, *_FAILED)]
    return datetime.fromtimestamp((max(steps) + 1) * LATELY_STEP_SECONDS, UTC) if steps else None
