"""The overview: the state of now and of the last hour as Postgres has it, and the live processes."""

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import httpx

from penstock.api.dashboard.pages import load_tenant
from penstock.api.dashboard.requests import PageRequest
from penstock.db.context import Recent
from penstock.protocol.errors import Unavailable
from penstock.runtime.budget import in_hand
from penstock.settings.model import Settings
from penstock.settings.values import named_url

FIRST_WITHIN_SECONDS = 0.05  # of a page that no stream follows yet
SAMPLE = 1000  # of the newest successes, for percentiles
FAILURES = 300  # of the newest, to be grouped
COUNTED_IN_FLIGHT = 100_000
MINUTES, MINUTE_SECONDS = 60, 60.0
LATELY_STEPS, LATELY_STEP_SECONDS = 34, 5.0  # within what is stored to the second
_MAX_ACTIONS = 12
PROBE_EVERY_SECONDS = 5.0


class Overview:
    """Reads the page's values at most once a second, for all browsers."""

    def __init__(self, settings: Settings) -> None:
        self._recent = Recent()
        self._reading: asyncio.Task[dict[str, Any]] | None = None
        self._probe = ProcessProbe(settings.dashboard_processes)

    async def load(self, request: PageRequest) -> dict[str, Any]:
        """All values, or on the first request only the cheap ones if the others take too long: a stream brings them.

        A key that is bound to a tenant gets that tenant's page. Raises Unavailable where the api is stopping.
        """
        if request.browser.caller.tenant is not None:
            return {"template": "tenant.html", **await load_tenant(request)}
        if self._reading is None or self._reading.done():
            read = self._recent.get("overview", "", partial(self._read, request))
            self._reading = asyncio.create_task(read, name="read overview")
        reading = self._reading  # which other requests may wait for too
        await asyncio.wait((reading,), timeout=None if request.is_stream else FIRST_WITHIN_SECONDS)
        if reading.cancelled():
            raise Unavailable("the api is stopping")
        if reading.done():
            return reading.result()
        # What costs the same however many tasks there are.
        now = await self._read_now(request)
        ((rates,),) = await request.methods.fetch(("read_rates",))
        lag = {"due": None, "oldest_due_seconds": None}
        return now | {"is_whole": False, "rates": rates, "lag": lag, "backlog": None}

    async def _read(self, request: PageRequest) -> dict[str, Any]:
        stats, now, history = await asyncio.gather(
            request.call("stats"),
            self._read_now(request),
            self._recent.get("history", "", partial(self._read_history, request), seconds=5.0),
        )
        live_states = [(state, stats.states[state]) for state in ("SCHEDULED", "WAITING", "ERROR", "ACQUIRED")]
        return {
            **history,
            **now,
            "is_whole": True,
            "rates": stats.rates,
            "lag": stats.lag,
            "states": stats.states,
            "backlog": sum(count for _, count in live_states),
            "live_states": live_states,
            "settings": request.settings,
            "age_seconds": in_hand().age_seconds,
        }

    async def _read_now(self, request: PageRequest) -> dict[str, Any]:
        """Values that change every second."""
        lately, (flight,) = await request.methods.fetch(
            ("read_tally_steps", LATELY_STEPS, LATELY_STEP_SECONDS), ("read_in_flight", COUNTED_IN_FLIGHT)
        )
        async with request.methods.session() as session:
            processes = await session.fetch("read_connections")
        return {"sparks": lately, "flight": flight, "processes": processes, "health": self._probe.latest()}

    async def _read_history(self, request: PageRequest) -> dict[str, Any]:
        """Values that are more expensive to read and change slowly."""
        minutes, actions, latency, groups = await request.methods.fetch(
            ("read_tally_steps", MINUTES, MINUTE_SECONDS),
            ("read_attempts_by_action", MINUTES * MINUTE_SECONDS),
            ("read_latency", SAMPLE, _MAX_ACTIONS),
            ("read_failure_groups", FAILURES, None),
        )
        highest = max(row["succeeded"] + row["failed"] for row in minutes)
        top = nice_top(max(highest, *(row["enqueued"] for row in minutes)))
        return {
            "throughput": {"minutes": minutes, "highest": highest, "top": top},
            "latency": _latency(latency),
            "sample": latency[0]["count"] if latency else 0,
            "handlers": {row["action"] or "all": row["mean_seconds"] for row in actions},
            "failed_actions": [row for row in actions if row["action"] and row["failed"]][:_MAX_ACTIONS],
            "groups": groups[:6],
            "failures": sum(len(group["ids"]) for group in groups),
        }

    def stop(self) -> None:
        for task in (self._reading, self._probe.probing):
            if task is not None:
                task.cancel()


def nice_top(value: float) -> float:
    """The top of an axis: the next 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten."""
    if value < 1e-9:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999)


def _latency(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Percentiles of the newest successes in seconds: of all, unless there is one action, then of actions."""
    shown = rows[1:] if len(rows) == 2 else rows
    found = [{"action": row["action"] or "all", "waited": row["waited"], "took": row["took"]} for row in shown]
    for measure in ("waited", "took"):
        logarithms = [[math.log(max(value, 0.001)) for value in entry[measure]] for entry in found]
        low, top = min(map(min, logarithms), default=0), max(map(max, logarithms), default=0)
        for entry, places in zip(found, logarithms, strict=True):
            entry[f"{measure}_at"] = [  # their places on the logarithmic scale of the column
                max(1.0, (place - low) / (top - low) * 98) if top > low else 50 for place in places
            ]
    return found


class ProcessHealth(NamedTuple):
    """ready: None before the first answer. text: of the answer, or the error."""

    name: str
    url: str
    ready: bool | None
    text: str


class ProcessProbe:
    """Probes processes without a connection to Postgres, such as workers, in the background: none delays a page."""

    def __init__(self, processes: Sequence[str]) -> None:
        self._latest = [ProcessHealth(*named_url(entry), None, "checking") for entry in processes]
        self._probed_at = float("-inf")
        self.probing: asyncio.Task[None] | None = None

    def latest(self) -> list[ProcessHealth]:
        """The last answers; starts a new round if these are some seconds old."""
        is_probing = self.probing is not None and not self.probing.done()
        if self._latest and not is_probing and monotonic() - self._probed_at > PROBE_EVERY_SECONDS:
            self.probing = asyncio.create_task(self.probe(), name="probe processes")
        return self._latest

    async def probe(self) -> None:
        async with httpx.AsyncClient(timeout=1.5, trust_env=False) as client:

            async def renewed(before: ProcessHealth) -> ProcessHealth:
                try:
                    answer = await client.get(f"{before.url}/readyz")
                except (httpx.HTTPError, httpx.InvalidURL) as exc:
                    return before._replace(ready=False, text=type(exc).__name__)
                return before._replace(ready=answer.status_code == 200, text=answer.text.strip()[:200])

            self._latest = await asyncio.gather(*map(renewed, self._latest))
        self._probed_at = monotonic()
