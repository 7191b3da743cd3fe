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
ACTIONS = ("plain", "stepped", "limited", "keyed", "routed")
BODIES_FROM = 200_000  # the numbers of tasks of such bodies
SIDE_QUEUE = "penstock-side"  # of what goes by a route
WORKER = 4
SIDE_WORKER = 5  # which receives from there, where there is a route
ROUTE = {"name": "side", "queue": SIDE_QUEUE, "actions": ["rout*"]}
LIMITS = {"limited": {"max_in_flight": 2}, "keyed": {"key_max_in_flight": 1}}


@dataclass(frozen=True)
class Call:
    """A request: by HTTP, or through the inbound queue. after: seconds since the call before.

    body: the parameters of several in one body, instead of params.
    """

    after: float
    method: str
    params: dict[str, Any]
    by_queue: bool = False
    body: tuple[dict[str, Any], ...] = ()


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
class Outage:
    """What the results queue delivers does not arrive: its messages count as received. kills: a process, soon after."""

    at: float
    seconds: float
    kills: int | None = None


@dataclass(frozen=True)
class Plan:
    """fault_share: how many calls of the queues and of Postgres go wrong until the clients are done. limited: actions
    have limits, so claims go by rules; otherwise turns promote many at once. routed: some tasks have a route, so claims
    go by rules too."""

    seed: str
    fault_share: float
    limited: bool
    routed: bool = False
    calls: tuple[Call, ...] = ()
    kills: tuple[Kill, ...] = ()
    holds: tuple[Hold, ...] = ()
    outages: tuple[Outage, ...] = ()

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong but locks of strangers."""
        return not (self.fault_share or self.kills or self.outages)

    def without(self, kind: str, start: int, count: int) -> Plan:
        """The plan without some of its calls, kills, holds or outages."""
        items = getattr(self, kind)
        return replace(self, **{kind: (*items[:start], *items[start + count :])})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_plan(path: Path) -> Plan:
    given = json.loads(path.read_text())
    kinds = {"kills": Kill, "holds": Hold, "outages": Outage}
    return Plan(
        **given
        | {name: tuple(kind(**one) for one in given[name]) for name, kind in kinds.items()}
        | {"calls": tuple(Call(**one | {"body": tuple(one["body"])}) for one in given["calls"])}
    )


def draw_plan(seed: int, steps: int) -> Plan:
    """A plan of so many calls."""
    chance = random.Random(f"plan {seed}")
    limited, routed, is_calm = chance.random() < 0.5, chance.random() < 0.3, chance.random() < 0.2
    is_out = not is_calm and chance.random() < 0.3
    draw = _Calls(chance, limited, routed, is_out)
    calls = tuple(draw.call(number) for number in range(steps))
    length = sum(call.after for call in calls)
    if is_calm:
        holds = tuple(
            Hold(chance.uniform(0, length), chance.uniform(6, 16), chance.randint(1, 4))
            for _ in range(chance.randint(1, 2))
        )
        return Plan(str(seed), 0.0, limited, routed, calls, (), holds)
    kills = tuple(
        Kill(chance.randrange(len(PROCESSES)), chance.randint(20, 900), chance.uniform(0, 4))
        for _ in range(chance.randint(0, 7))
    )
    holds = tuple(
        Hold(chance.uniform(0, length), chance.uniform(0.1, 8), chance.randint(1, 4))
        for _ in range(chance.randint(0, 2))
    )
    outages = tuple(
        Outage(chance.uniform(0, length), chance.uniform(4, 14), chance.choice((None, WORKER, SIDE_WORKER)))
        for _ in range(is_out)
    )
    return Plan(str(seed), chance.choice((0.0, 0.03, 0.1, 0.2)), limited, routed, calls, kills, holds, outages)


@dataclass
class _Calls:
    chance: random.Random
    limited: bool
    routed: bool
    is_out: bool
    sent: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)  # tasks that wait for an event
    next: list[Call] = field(default_factory=list)  # calls that belong to one before

    def call(self, number: int) -> Call:
        chance = self.chance
        if self.next:
            return self.next.pop(0)
        after = chance.choice((0.0, 0.0, 0.05, 0.3, 1.0, 2.5))
        kind = chance.random()
        if self.sent and kind < 0.25:
            method = chance.choice(("cancel", "retry", "reschedule", "status"))
            params: dict[str, Any] = {"id": chance.choice(self.sent)}
            if method == "reschedule":
                params["delay"] = chance.choice((0.1, 2.0))
            return Call(after, method, params)
        if self.waiting and kind > 0.85:
            return self._answer(after)
        if kind > 0.8:
            return Call(after, "schedule.create", self._schedule(number))
        if kind < 0.35:
            return self._workflow(after, number)
        if kind < 0.4:
            action = chance.choice(ACTIONS)
            self.next = [Call(chance.uniform(1, 4), "action.resume", {"action": action})]
            return Call(after, "action.pause", {"action": action})
        if kind < 0.5:
            return self._body(after, number)
        self.sent.append(number)
        task = self._task(number)
        by_queue = chance.random() < 0.4
        if task["action"] == "stepped" and not by_queue and chance.random() < 0.3:
            # Also while a step runs behind a sleep, of which the report comes when the task sleeps again.
            task["payload"] = {"n": number, "seconds": 1.5}
            self.next = [
                Call(chance.choice((0.3, 2.3, 2.6, 2.9)), "cancel", {"id": number}),
                Call(0.0, "retry", {"id": number, "from_step": "a"}),
            ]
        return Call(after, "enqueue", task, by_queue)

    def _body(self, after: float, number: int) -> Call:
        """Tasks of one ordering key, or of two limit keys; through the queue as many as one body may hold."""
        by_queue = self.chance.random() < 0.3
        body: list[dict[str, Any]] = []
        if self.routed and not by_queue and self.chance.random() < 0.6:
            # More than are in flight at once, so that the pause finds some behind the route.
            self.next = [
                Call(0.2, "action.pause", {"action": "routed"}), Call(3.0, "action.resume", {"action": "routed"}),
            ]  # fmt: skip
            payloads = [{"n": BODIES_FROM + 100 * number + place, "seconds": 1.5} for place in range(6)]
            return Call(after, "enqueue", {}, False, tuple({"action": "routed", "payload": one} for one in payloads))
        if self.limited and not by_queue and self.chance.random() < 0.5:
            # Of two limit keys, so that some wait for others of their key.
            for place in range(6):
                payload = {"n": BODIES_FROM + 100 * number + place, "seconds": self.chance.choice((0.05, 0.4, 1.5))}
                body.append({"action": "keyed", "limit_key": self.chance.choice("pq"), "payload": payload})
            return Call(after, "enqueue", {}, False, tuple(body))
        for place in range(2 if by_queue else self.chance.randint(2, 6)):
            payload = {"n": BODIES_FROM + 100 * number + place, "seconds": self.chance.choice((0.0, 0.05))}
            body.append({"action": self.chance.choice(("plain", "routed")), "ordering_key": "c", "payload": payload})
        return Call(after, "enqueue", {}, by_queue, tuple(body))

    def _workflow(self, after: float, number: int) -> Call:
        """Some are cancelled at the time when their last steps end, and begun again."""
        chance = self.chance
        steps = [self._step(number, place) for place in range(3)]
        if chance.random() < 0.5:
            for step in steps:
                step["payload"] = {"n": step["payload"]["n"]}
            self.next = [Call(chance.choice((0.2, 0.4, 0.8)), "workflow.cancel", {"id": number})]
            if chance.random() < 0.5:
                self.next.append(Call(1.0, "workflow.retry", {"id": number}))
        return Call(after, "workflow.create", {"chain": steps})

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
        if self.is_out and task["action"] != "stepped" and chance.random() < 0.3:
            task |= {"timeout": 30.0}  # longer than reports may be on their way
            task["payload"]["seconds"] = 16.0
        if task["action"] == "keyed":
            task["limit_key"] = chance.choice("pq")
        return task
