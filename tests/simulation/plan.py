"""What happens in a run: calls of clients, kills of processes, locks of strangers. Drawn from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.simulation.clock import BEGINNING

PROCESSES = ("api", "submitter", "scheduler", "scheduler", "worker", "worker", "resulter", "resulter", "supervisor")
ACTIONS = ("plain", "stepped", "limited", "keyed")
LIMITS = {"limited": {"max_in_flight": 2}, "keyed": {"key_max_in_flight": 1}}


@dataclass(frozen=True)
class Call:
    """A request: by HTTP, or through the inbound queue. after: seconds since the call before."""

    after: float
    method: str
    params: dict[str, Any]
    by_queue: bool = False


@dataclass(frozen=True)
class Kill:
    """SIGKILL to a process as it takes so many steps; another takes its place after a while."""

    process: int
    step: int
    down_seconds: float


@dataclass(frozen=True)
class Hold:
    """A stranger's transaction locks some live tasks, and ordering keys as an enqueuer does."""

    at: float
    seconds: float
    tasks: int


@dataclass(frozen=True)
class Plan:
    """fault_share: how many calls of the queues and of Postgres go wrong until the clients are done. limited: actions
    have limits, so claims go by rules; otherwise turns promote many at once."""

    seed: str
    fault_share: float
    limited: bool
    calls: tuple[Call, ...] = ()
    kills: tuple[Kill, ...] = ()
    holds: tuple[Hold, ...] = ()

    def without(self, kind: str, start: int, count: int) -> Plan:
        """The plan without some of its calls, kills or holds."""
        items = getattr(self, kind)
        return replace(self, **{kind: (*items[:start], *items[start + count :])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_plan(path: Path) -> Plan:
    given = json.loads(path.read_text())
    return Plan(
        given["seed"], given["fault_share"], given["limited"],
        tuple(Call(**one) for one in given["calls"]),
        tuple(Kill(**one) for one in given["kills"]), tuple(Hold(**one) for one in given["holds"]),
    )  # fmt: skip


def draw_plan(seed: int, steps: int) -> Plan:
    """A plan of so many calls."""
    chance = random.Random(f"plan {seed}")
    draw = _Calls(chance)
    calls = tuple(draw.call(number) for number in range(steps))
    kills = tuple(
        Kill(chance.randrange(len(PROCESSES)), chance.randint(20, 900), chance.uniform(0, 4))
        for _ in range(chance.randint(0, 7))
    )
    length = sum(call.after for call in calls)
    holds = tuple(
        Hold(chance.uniform(0, length), chance.uniform(0.1, 8), chance.randint(1, 4))
        for _ in range(chance.randint(0, 2))
    )
    return Plan(str(seed), chance.choice((0.0, 0.03, 0.1, 0.2)), chance.random() < 0.5, calls, kills, holds)


@dataclass
class _Calls:
    chance: random.Random
    sent: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # tasks that wait for an event

    def call(self, number: int) -> Call:
        chance = self.chance
        after = chance.choice((0.0, 0.0, 0.05, 0.3, 1.0, 2.5))
        kind = chance.random()
        if self.sent and kind < 0.25:
            method = chance.choice(("task.cancel", "task.retry", "task.reschedule", "task.status"))
            params: dict[str, Any] = {"id": chance.choice(self.sent)}
            if method == "task.reschedule":
                params["delay"] = chance.choice((0.1, 2.0))
            return Call(after, method, params)
        if self.waiting and kind > 0.85:
            return self._answer(after)
        if kind > 0.8:
            return Call(after, "schedule.create", self._schedule(number))
        if kind < 0.32:
            return Call(after, "workflow.create", {"chain": [self._step(number, place) for place in range(3)]})
        self.sent.append(number)
        return Call(after, "enqueue", self._task(number), by_queue=chance.random() < 0.4)

    def _answer(self, after: float) -> Call:
        """To a task that waits, or has not come to wait yet, or has had an answer."""
        token = {"token": f"t{self.chance.choice(self.waiting)}"}
        if self.chance.random() < 0.3:
            return Call(after, "task.fail", token | {"error": "refused", "final": self.chance.random() < 0.5})
        return Call(after, "task.complete", token | {"result": {}}, by_queue=self.chance.random() < 0.4)

    def _schedule(self, number: int) -> dict[str, Any]:
        """Every two seconds, for a few seconds from the first minute on; see Checks.look_for_instants."""
        chance = self.chance
        last = BEGINNING + timedelta(seconds=chance.randint(4, 30))
        return {
            "name": f"s{number}", "expression": "*/2 * * * * *", "action": chance.choice(ACTIONS), "missed": "all",
            "payload": {"n": 100_000 + number, "at": "{{scheduled_time}}", "seconds": chance.choice((0.0, 0.05, 1.5))},
            "overlap": chance.choice(("allow", "skip", "queue")), "end_at": last.isoformat(),
        }  # fmt: skip

    def _work(self, number: int) -> dict[str, Any]:
        """What a handler does: takes a while, fails a few times or for ever, outlasts its message."""
        chance = self.chance
        work: dict[str, Any] = {"n": number, "seconds": chance.choice((0.0, 0.05, 0.4, 1.5))}
        if chance.random() < 0.25:
            work["fails"] = chance.choice((1, 1, 2, 9))
        if chance.random() < 0.05:
            work["seconds"] = 7.0
        return work

    def _step(self, number: int, place: int) -> dict[str, Any]:
        return {"action": "plain", "name": f"s{place}", "payload": self._work(1000 * number + place), "max_attempts": 3}

    def _task(self, number: int) -> dict[str, Any]:
        chance = self.chance
        task: dict[str, Any] = {"action": chance.choice(ACTIONS), "payload": self._work(number)}
        if chance.random() < 0.35:
            task["ordering_key"] = chance.choice("ab")
        if chance.random() < 0.2:
            task |= {"unique_key": chance.choice("xy"), "unique": "live"}
        if chance.random() < 0.2:
            task["priority"] = chance.choice((-1, 1, 5))
        if chance.random() < 0.2:
            task["delay"] = chance.choice((0.5, 4.0))
        if chance.random() < 0.3:
            task["max_attempts"] = chance.choice((1, 2, 3))
        if chance.random() < 0.15:
            task["payload"] |= {"waits": chance.choice((0.5, 3.0, 8.0))}
            self.waiting.append(number)
        if task["action"] == "keyed":
            task["limit_key"] = chance.choice("pq")
        return task
