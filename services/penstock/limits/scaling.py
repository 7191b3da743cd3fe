"""Scaling: how much waits for the workers of each lane, and how many handlers would have to run at once.

A lane is what one fleet of workers serves: the tasks of a route, or those of the outbound queue, which go by none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.db.session import Session

OUTBOUND = "_default"
"""Stands for the lane of the outbound queue; no route can have this name."""
COUNTED = 50_000
"""Counting stops there."""
DRAIN_SECONDS = 60.0
"""A backlog should be gone after this, unless somebody asks for another time."""
_LEVELS = 100
_LOOK_BACK_SECONDS = 60.0
_ROUNDS = 10  # handlers of which fewer ended within the look back are better known by what is in flight


@dataclass(frozen=True, slots=True)
class Work:
    """The tasks of one action in one lane.

    running: handlers at once, on the average of the last minute. run_seconds: of one attempt, None when no worker has
    ever told.
    """

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
class Lane:
    """What one fleet of workers has to do. ``name``: of the route, or ``OUTBOUND``."""

    name: str
    work: Sequence[Work]

    @property
    def waiting(self) -> int:
        """Tasks that are due and not claimed, and that no limit or pause holds back."""
        return sum(work.waiting for work in self.work)

    @property
    def in_flight(self) -> int:
        """Tasks that are claimed and not settled."""
        return sum(work.in_flight for work in self.work)

    @property
    def oldest_seconds(self) -> float:
        """For how long the oldest task has waited; 0 when none waits."""
        return max((work.oldest_seconds for work in self.work), default=0.0)

    def slots(self, drain_seconds: float = DRAIN_SECONDS) -> float:
        """How many handlers have to run at once, to keep up and to work off what waits within ``drain_seconds``.

        Those that ran lately (rate times run time, by Little's law), and for the rest of the tasks their run time over
        the time to drain; no more than there are tasks for them, and one while there are any. What comes in faster
        than it is done is seen as it heaps up. Actions of unknown run time count as the others of the lane do; where
        none is known, one handler has to run to learn it.
        """
        tasks = self.waiting + self.in_flight
        running = sum(work.running for work in self.work)
        known = [(work.run_seconds, work.tasks or 1) for work in self.work if work.run_seconds is not None]
        if not known:
            return float(min(1, tasks))
        usual = sum(seconds * tasks for seconds, tasks in known) / sum(tasks for _, tasks in known)
        behind = sum(
            max(0.0, work.tasks - work.running) * (usual if work.run_seconds is None else work.run_seconds)
            for work in self.work
        )
        return max(running, min(tasks, max(1.0, running + behind / drain_seconds)))


async def read_lanes(session: Session) -> list[Lane]:
    """Every lane, that of the outbound queue first, then routes by name. Bounded: see ``COUNTED``."""
    names = [row["name"] for row in await session.fetch("list_route_names")]
    counted = await session.fetch("read_lanes", COUNTED, _LEVELS)
    timed = {row["action"]: row for row in await session.fetch("read_run_times", _LOOK_BACK_SECONDS)}
    tasks: Counter[str] = Counter()
    for row in counted:
        tasks[row["action"]] += row["waiting"] + row["in_flight"]
    lanes: dict[str | None, list[Work]] = {route: [] for route in (None, *names)}
    for row in counted:
        # A route may have been deleted a moment ago; its tasks begin anew by the rules that there are.
        lane = lanes.get(row["route"], lanes[None])
        here = row["waiting"] + row["in_flight"]
        lane.append(_work(row, timed.get(row["action"]), here / tasks[row["action"]]))
    for action, row in timed.items():
        if action not in tasks and row["seconds"]:  # it runs, though no task of it is there at this instant
            nothing = {"action": action, "waiting": 0, "in_flight": 0, "oldest_seconds": None}
            lanes.get(row["route"], lanes[None]).append(_work(nothing, row, 1.0))
    return [Lane(OUTBOUND if route is None else route, work) for route, work in lanes.items()]


def _work(counted: Any, timed: Any, share: float) -> Work:
    """counted, timed: rows of the two statements. share: of what ran of the action lately, so much is taken to have run
    in this lane."""
    run_seconds, running = None, 0.0
    if timed is not None:
        run_seconds = timed["mean_seconds"]
        running = share * timed["seconds"] / _LOOK_BACK_SECONDS
        if run_seconds * _ROUNDS > _LOOK_BACK_SECONDS:
            running = min(running, counted["in_flight"])
    return Work(
        counted["action"], counted["waiting"], counted["in_flight"], counted["oldest_seconds"] or 0.0, running,
        run_seconds,
    )  # fmt: skip
