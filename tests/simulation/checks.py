"""What must hold after every commit, and at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from penstock.cli.doctor.database import INVARIANTS, LOOKED_AT
from penstock.db.statements import SQL
from tests.simulation.clock import Clock, wall
from tests.simulation.database import Bridge
from tests.simulation.plan import BODIES_FROM
from tests.simulation.queues import QueueService, claims_of

UNTAKEN_AFTER_SECONDS = 12.0
_HELD_UP_SECONDS = 5.0
_PAUSED_SECONDS = 1.0  # after the answer to a pause, within which claims end that began before it
_LOOK = "select * from sim.look()"
_STATE = """
select id, state::text from penstock.task union all select id, state::text from penstock.task_history
"""


_JOURNAL = "select name from penstock.journal_entry where task_id = $1"
_RUNS_BEFORE = re.compile(r"runs before task (\d+)$")
_OTHERS = (
    "select id, 'workflow ' || state as state from penstock.workflow where state in ('RUNNING', 'FAILING')"
    " union all select schedule_id, 'schedule' from penstock.schedule_clock where next_at is not null"
)
_COPIES = """
select number, count(*) as copies from (
    select (payload ->> 'n')::int as number from penstock.task where workflow is null
    union all select (payload ->> 'n')::int from penstock.task_history where workflow is null) made
group by number having count(*) > 1
"""
_FIRED_TWICE = """
select payload::text as payload, count(*) as copies from (
    select payload::text from penstock.task where payload ->> 'at' is not null
    union all select payload::text from penstock.task_history where payload ->> 'at' is not null) made
group by payload having count(*) > 1
"""
_OF_BODIES = """
select number, id from (
    select (payload ->> 'n')::int as number, id from penstock.task where ordering_key is not null
    union all select (payload ->> 'n')::int, id from penstock.task_history where ordering_key is not null) made
where number >= $1 order by number
"""
_REFUSED = """
select source, reason from penstock.rejected where position('"task.complete"'::bytea in body) = 0
"""
_CANCELLED = """
select id from penstock.workflow w where state = 'CANCELLED' and not exists (
    select from penstock.workflow_step s where s.workflow_id = w.id and s.state <> 'SUCCESS')
"""
_LEFT_OUT = """
select schedule_id, scheduled_at::text as at from (
    select schedule_id, scheduled_at,
        scheduled_at - lag(scheduled_at) over (partition by schedule_id order by scheduled_at) as gap
    from penstock.schedule_run) run
where gap <> interval '2 seconds'
"""


class Violation(AssertionError):
    """A property does not hold. step: after how many commits."""


@dataclass
class _Life:
    """What is known of one task. attempts, failures, waits, workflow: as last seen. claim: the highest so far. running:
    the claim that holds it. seen_at: when it was claimed, or a report of it was recorded. ended: its final state.
    records: whether there is a live one, and one of its end. rewound: reports of steps by claims up to this one count
    no more."""

    attempts: int = 0
    failures: int = 0
    seen_at: float = 0.0
    rewound: int = 0
    claim: int = 0
    running: int | None = None
    workflow: int | None = None
    waits: bool = False
    result: str | None = None
    ended: str | None = None
    records: set[str] = field(default_factory=set)


@dataclass
class Checks:
    """Reads what each commit has changed.

    queues: know what they delivered. ledger: ids of tasks that clients know to be accepted. retried, flows_retried:
    tasks and workflows that a client wanted to run again, so that a result may be replaced. given_up: tasks of which a
    claim was given up before a worker reported it, so that a message of an older one may be on its way. paused: since
    when, by action. rewinding: tasks that begin again from a step with the next commit. steps: the claim under which
    each that returned ran. commits_seen: what each commit left of the tasks that it changed: state, attempts, claim,
    most attempts, ordering key.
    """

    bridge: Bridge
    queues: QueueService
    ledger: dict[int, int] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    flows_retried: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    paused: dict[str, float] = field(default_factory=dict)
    rewinding: set[int] = field(default_factory=set)
    steps: dict[tuple[int, str], int] = field(default_factory=dict)
    _lives: dict[int, _Life] = field(default_factory=dict)
    commits_seen: list[dict[int, tuple[Any, ...]]] = field(default_factory=list)
    commits: int = 0
    succeeded: int = 0

    def look(self, by: str = "") -> None:
        """Raises Violation. by: the process that has committed."""
        try:
            rows = self.bridge.ask(_LOOK)
        except asyncpg.LockNotAvailableError:
            return  # a partition is being dropped; the next commit is looked at again
        changes = sorted((row for row in rows if row["seq"] is not None), key=lambda row: row["seq"])
        if not changes:
            return
        self.commits += 1
        self.commits_seen.append(
            {
                change["id"]: (
                    change["state"], change["attempts"], change["claim"], change["max_attempts"], change["key"]
                )
                for change in changes
                if change["what"] not in ("live delete", "ended delete")
            }
        )  # fmt: skip
        for change in changes:
            for problem in self._problems(change, by):
                raise Violation(problem)
        for row in rows:
            if row["problem"] is not None and not self._was_retried(row["problem"]):
                raise Violation(row["problem"])
        for task_id in {change["id"] for change in changes}:
            if not self._lives[task_id].records:
                raise Violation(f"task {task_id} is lost")

    def look_for_broken(self) -> None:
        """What `penstock doctor --invariants` asks. Raises Violation."""
        for invariant in INVARIANTS:
            args = (LOOKED_AT, 0.0, 0.0) if invariant.statement == "find_work_overdue" else (LOOKED_AT,)
            try:
                for row in self.bridge.ask(SQL[invariant.statement], *args):
                    raise Violation(f"doctor: {invariant.holds}: {row['seen']}")
            except asyncpg.LockNotAvailableError:
                pass  # a partition is being dropped

    def look_for_lost(self) -> None:
        """None of the tasks that clients know of is missing. Raises Violation."""
        known = {row["id"] for row in self.bridge.ask(_STATE)}
        for task_id in [*self._lives, *self.ledger]:
            if task_id not in known:
                raise Violation(f"task {task_id} is lost")

    def _was_retried(self, problem: str) -> bool:
        """Whether it is about a task that begins again behind younger ones of its ordering key."""
        found = _RUNS_BEFORE.search(problem)
        return found is not None and int(found[1]) in self.retried

    def _life(self, task_id: int) -> _Life:
        return self._lives.setdefault(task_id, _Life())

    def _problems(self, change: Any, by: str) -> Iterator[str]:
        task_id, state, what = change["id"], change["state"], change["what"]
        life = self._life(task_id)
        kind, _, event = what.partition(" ")
        if event == "insert":
            life.records.add(kind)
        elif event == "delete":
            life.records.discard(kind)
        if change["attempts"] > change["max_attempts"]:
            yield f"task {task_id} has {change['attempts']} attempts; its limit is {change['max_attempts']}"
        has_failed = change["failures"] > life.failures
        life.failures, life.workflow = change["failures"], change["workflow"]
        by_repair = by == "supervisor" and not life.waits  # else its wait has timed out
        life.waits = state == "WAITING" or (life.waits and life.running == change["claim"])
        if by_repair and has_failed and life.running and self.queues.reports(task_id, life.running):
            yield f"claim {life.running} of task {task_id} failed as silent; a report of it is in the results queue"
        if what == "ended insert":
            if state == "SUCCESS":
                self.succeeded += 1
                result = json.loads(change["result"])
                if life.running != change["claim"]:
                    yield f"task {task_id} succeeded by claim {change['claim']}, while claim {life.running} held it"
                elif result.get("claim", change["claim"]) != change["claim"]:  # an answer to a wait names none
                    yield f"task {task_id} has the result of claim {result['claim']} under claim {change['claim']}"
                elif life.result is not None and task_id not in self.retried:
                    yield f"task {task_id} has a second result"
                life.result = change["result"]
            life.ended, life.running = state, None
        elif what == "ended delete":
            if change["workflow"] in self.flows_retried:
                self.retried.add(task_id)
            if task_id not in self.retried or life.ended == "SUCCESS":
                yield f"the record of task {task_id} was removed"
            life.ended = None
            life.attempts = 0
            # What was reported while the task had ended, for it was cancelled, is not kept.
            kept = {row["name"] for row in self.bridge.ask(_JOURNAL, task_id)}
            if task_id in self.rewinding:
                self.rewinding.discard(task_id)
                life.rewound = life.claim
                kept.clear()
            self.steps = {step: by for step, by in self.steps.items() if step[0] != task_id or step[1] in kept}
        elif what != "live delete":
            if change["attempts"] < life.attempts - 1:
                yield f"task {task_id} has {change['attempts']} attempts after {life.attempts}"
            if state == "ACQUIRED" and life.running != change["claim"]:
                if life.running is not None:
                    yield f"task {task_id} is claimed by {change['claim']} while claim {life.running} holds it"
                if change["claim"] <= life.claim:
                    yield f"task {task_id} is claimed by {change['claim']} after claim {life.claim}"
                if change["attempts"] != life.attempts + 1:
                    yield f"task {task_id} is claimed for attempt {change['attempts']} after {life.attempts} attempts"
                if Clock.now - self.paused.get(change["action"], Clock.now) > _PAUSED_SECONDS:
                    yield f"task {task_id} is claimed, while {change['action']} is paused"
                life.claim = life.running = change["claim"]
            elif state in ("SCHEDULED", "ERROR") and life.running is not None:
                is_released = by_repair and not has_failed
                if is_released and change["worker"] and Clock.now - life.seen_at < UNTAKEN_AFTER_SECONDS:
                    yield f"claim {life.running} of task {task_id} is given back, which its worker has reported"
                if is_released or change["worker"] is None:
                    self.given_up.add(task_id)
                life.running = None
            elif state != "ACQUIRED" and (state != "WAITING" or life.running != change["claim"]):
                life.running = None  # else it waits for an event, and its claim holds
            life.attempts = change["attempts"]
            if state == "ACQUIRED" and by != "api":  # which changes what is claimed, and has heard nothing
                life.seen_at = Clock.now

    def step_begins(self, task_id: int, claim: int, name: str) -> None:
        """A step that has returned never runs again. Raises Violation."""
        is_over = claim <= self._life(task_id).rewound
        if (task_id, name) in self.steps and not is_over and not self._may_run_twice(task_id):
            raise Violation(f"step {name} of task {task_id} runs again after its report")

    def step_returns(self, task_id: int, claim: int, name: str, by: int) -> None:
        """It returns the same in each attempt. by: the claim that it ran under. Raises Violation."""
        rewound = self._life(task_id).rewound
        if claim <= rewound:
            return
        if by <= rewound:
            raise Violation(f"step {name} of task {task_id} returned what claim {by} reported before it began again")
        before = self.steps.setdefault((task_id, name), by)
        if before != by and not self._may_run_twice(task_id):
            raise Violation(f"step {name} of task {task_id} returned that of claim {before}, and now of claim {by}")

    def _may_run_twice(self, task_id: int) -> bool:
        """Whether two workers may have held the task at once, each by a message whose lease had not ended."""
        return task_id in self.given_up or task_id in self.queues.doubled

    def look_for_disorder(self, sent: Mapping[int, int]) -> None:
        """Tasks of one body and key have ids in their order. sent: as look_for_repeated. Raises Violation."""
        last: dict[int, int] = {}
        for row in self.bridge.ask(_OF_BODIES, BODIES_FROM):
            body = row["number"] // 100
            if sent[row["number"]] == 1 and row["id"] < last.get(body, 0):
                raise Violation(f"task {row['id']} stands behind {last[body]}, which its body has later")
            last[body] = row["id"]

    def look_for_refused(self) -> None:
        """No message was refused, but for an answer to a task that does not wait for it. Raises Violation."""
        for row in self.bridge.ask(_REFUSED):
            raise Violation(f"a message of {row['source']} was refused: {row['reason']}")

    def look_for_dead(self) -> None:
        """Nothing became a dead letter, in a run in which only locks are in the way. Raises Violation."""
        for name in ("penstock-inbound", "penstock-results"):
            if self.queues.dead[name]:
                raise Violation(f"{len(self.queues.dead[name])} messages of {name} are dead letters")

    def look_for_held_up(self, locked: Collection[int]) -> None:
        """No report of a task waits for the locks of others. locked: the tasks that have been. Raises Violation.

        Steps of workflows are left out: a request that cancels one holds all, and may wait for the lock of one.
        """
        for stored in self.queues.messages["penstock-results"]:
            tasks = {task_id for task_id, _ in claims_of(stored)}
            if any(task_id in locked or self._life(task_id).workflow for task_id in tasks):
                continue
            if wall().timestamp() - stored.sent_at > _HELD_UP_SECONDS:
                raise Violation(f"a report of tasks {sorted(tasks)} is not recorded, while {sorted(locked)} are locked")

    def look_for_false_cancellations(self) -> None:
        """A workflow whose steps have all succeeded is not cancelled. Raises Violation."""
        for row in self.bridge.ask(_CANCELLED):
            raise Violation(f"workflow {row['id']} is cancelled, and all of its steps have succeeded")

    def look_for_repeated(self, sent: Mapping[int, int]) -> None:
        """No request made more tasks than it was sent. sent: how often, by number. Raises Violation."""
        for row in self.bridge.ask(_COPIES):
            if row["copies"] > sent.get(row["number"], row["copies"]):
                raise Violation(
                    f"request {row['number']} was sent {sent[row['number']]} times and made {row['copies']} tasks"
                )

    def look_for_instants(self) -> None:
        """Every instant of a schedule was fired once or is recorded. Raises Violation."""
        for row in self.bridge.ask(_FIRED_TWICE):
            raise Violation(f"{row['copies']} tasks of one instant: {row['payload']}")
        for row in self.bridge.ask(_LEFT_OUT):
            raise Violation(f"no run before {row['at']} of schedule {row['schedule_id']} is recorded")

    def unsettled(self) -> list[tuple[int, str]]:
        """Tasks, workflows and schedules that have not ended."""
        final = ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")
        tasks = [(row["id"], row["state"]) for row in self.bridge.ask(_STATE) if row["state"] not in final]
        return tasks + [(row["id"], row["state"]) for row in self.bridge.ask(_OTHERS)]
