"""What must hold after every commit, and at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from penstock.cli.doctor.invariants import INVARIANTS, LOOKED_AT
from penstock.db.statements import SQL
from tests.simulation.database import Bridge

_LOOK = "select * from sim.look()"
_STATE = """
select id, state::text from penstock.task union all select id, state::text from penstock.task_history
"""


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
    """What is known of one task. attempts: as last seen. claim: the highest so far. running: the claim that holds it.
    ended: its final state. records: whether there is a live one, and one of its end."""

    attempts: int = 0
    claim: int = 0
    running: int | None = None
    result: str | None = None
    ended: str | None = None
    records: set[str] = field(default_factory=set)


@dataclass
class Checks:
    """Reads what each commit has changed. ledger: ids of tasks that clients know to be accepted; retried: those that a
    client wanted to run again, of which a result may be replaced. doubled: those that may have had two messages at
    once, for a claim was given up before a worker reported it. steps: what those that returned gave. commits_seen: what
    each commit left of the tasks that it changed: state, attempts, claim, most attempts, ordering key."""

    bridge: Bridge
    ledger: dict[int, int] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    doubled: set[int] = field(default_factory=set)
    steps: dict[tuple[int, str], str] = field(default_factory=dict)
    _lives: dict[int, _Life] = field(default_factory=dict)
    commits_seen: list[dict[int, tuple[Any, ...]]] = field(default_factory=list)
    commits: int = 0
    succeeded: int = 0

    def look(self) -> None:
        """Raises Violation."""
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
            for problem in self._problems(change):
                raise Violation(problem)
        for row in rows:
            if row["problem"] is not None:
                raise Violation(row["problem"])
        for task_id in {change["id"] for change in changes}:
            if not self._lives[task_id].records:
                raise Violation(f"task {task_id} is lost")

    def look_for_broken(self) -> None:
        """What `penstock doctor --invariants` asks. Raises Violation."""
        for invariant in INVARIANTS:
            args = (LOOKED_AT, 0.0) if invariant.statement == "find_work_overdue" else (LOOKED_AT,)
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

    def _problems(self, change: Any) -> Iterator[str]:
        task_id, state, what = change["id"], change["state"], change["what"]
        life = self._lives.setdefault(task_id, _Life())
        kind, _, event = what.partition(" ")
        if event == "insert":
            life.records.add(kind)
        elif event == "delete":
            life.records.discard(kind)
        if change["attempts"] > change["max_attempts"]:
            yield f"task {task_id} has {change['attempts']} attempts; its limit is {change['max_attempts']}"
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
            if task_id not in self.retried or life.ended == "SUCCESS":
                yield f"the record of task {task_id} was removed"
            life.ended = None
            life.attempts = 0
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
                life.claim = life.running = change["claim"]
            elif state in ("SCHEDULED", "ERROR") and life.running is not None and change["worker"] is None:
                self.doubled.add(task_id)
                life.running = None
            elif state != "ACQUIRED" and (state != "WAITING" or life.running != change["claim"]):
                life.running = None  # else it waits for an event, and its claim holds
            life.attempts = change["attempts"]

    def step_begins(self, task_id: int, name: str) -> None:
        """A step that has returned never runs again. Raises Violation."""
        if (task_id, name) in self.steps and task_id not in self.doubled:
            raise Violation(f"step {name} of task {task_id} runs again after its report")

    def step_returns(self, task_id: int, name: str, result: str) -> None:
        """It returns the same in each attempt. Raises Violation."""
        before = self.steps.setdefault((task_id, name), result)
        if before != result and task_id not in self.doubled:
            raise Violation(f"step {name} of task {task_id} returned {before}, and now {result}")

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
