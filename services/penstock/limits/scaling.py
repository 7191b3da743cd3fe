"""The load of each route, and the number of handlers that it needs, for autoscaling of workers."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.db.pool import Store
from penstock.db.session import Session

OUTBOUND = "_default"  # of tasks without a route; no route can have this name
COUNTED = 50_000  # counting stops there
DRAIN_SECONDS = 60.0  # default time to drain a backlog
_LEVELS = 100
_LOOK_BACK_SECONDS = 60.0
_ROUNDS = 10.0  # if fewer attempts ended within the look back, tasks in flight are the better estimate


@dataclass(frozen=True, slots=True)
class ActionLoad:
    """The tasks of one action and route. running: concurrent handlers, on the average of the last minute."""

    action: str
    waiting: int
    in_flight: int
    oldest_seconds: float
    running: float
    run_seconds: float | None

    @property
    def tasks(self) -> int:
        return self.waiting + self.in_flight


@dataclass(frozen=True, slots=True)
class RouteLoad:
    """name: of the route, or ``OUTBOUND``."""

    name: str
    actions: Sequence[ActionLoad]

    @property
    def waiting(self) -> int:
        """Due tasks that are not claimed, without those held back by a limit or a pause."""
        return sum(load.waiting for load in self.actions)

    @property
    def in_flight(self) -> int:
        return sum(load.in_flight for load in self.actions)

    @property
    def oldest_seconds(self) -> float:
        """The wait of the oldest task; 0 without waiting tasks."""
        return max((load.oldest_seconds for load in self.actions), default=0.0)

    def slots(self, drain_seconds: float = DRAIN_SECONDS) -> float:
        """The number of concurrent handlers needed to keep up and to drain the backlog within ``drain_seconds``.

        The sum of those that ran lately (rate times run time, by Little's law) and of the backlog's run time divided by
        the time to drain; at most one for each task, at least one while there are tasks. Actions of unknown run time
        count as the route's others do; if all are unknown, one handler runs to measure it.
        """
        tasks = self.waiting + self.in_flight
        running = sum(load.running for load in self.actions)
        known = [(load.run_seconds, load.tasks or 1) for load in self.actions if load.run_seconds is not None]
        if not known:
            return float(min(1, tasks))
        usual = sum(seconds * tasks for seconds, tasks in known) / sum(tasks for _, tasks in known)
        behind = sum(
            max(0.0, load.tasks - load.running) * (usual if load.run_seconds is None else load.run_seconds)
            for load in self.actions
        )
        return max(running, min(tasks, max(1.0, running + behind / drain_seconds)))


async def read_route_loads(session: Session | Store) -> list[RouteLoad]:
    """The outbound queue first, then routes by name."""
    names = [row["name"] for row in await session.fetch("list_route_names")]
    loads: dict[str | None, list[ActionLoad]] = {route: [] for route in (None, *names)}
    for route, *load in await session.fetch("read_lanes", COUNTED, _LEVELS, _LOOK_BACK_SECONDS, _ROUNDS):
        # A route may just have been deleted; its tasks are routed again.
        loads.get(route, loads[None]).append(ActionLoad(*load))
    return [RouteLoad(OUTBOUND if route is None else route, actions) for route, actions in loads.items()]
