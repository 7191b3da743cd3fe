"""What must hold after every commit, and at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from tests.simulation.database import Bridge

_CHANGES = """
delete from sim.change returning seq, what, id, state, attempts, max_attempts, claim, result::text as result
"""
_STANDING = """
select 'two tasks of ordering key ' || ordering_key || ' run: ' || string_agg(id::text, ', ') as problem
from penstock.task where state = 'ACQUIRED' and ordering_key is not null
group by ordering_key, tenant having count(*) > 1
union all
select 'task ' || t.id || ' of ordering key ' || t.ordering_key || ' runs before task ' || o.id
from penstock.task t join penstock.task o using (ordering_key)
where t.state = 'ACQUIRED' and o.id < t.id and o.tenant is not distinct from t.tenant
union all
select 'two live tasks have unique key ' || unique_key || ' of ' || action || ': ' || string_agg(id::text, ', ')
from penstock.task where unique_key is not null group by unique_key, action, tenant having count(*) > 1
union all
select count(*) || ' tasks of ' || t.action || ' run; its limit is ' || a.max_in_flight
from penstock.task t join penstock.action a on a.name = t.action
where t.state = 'ACQUIRED' group by t.action, a.max_in_flight having count(*) > a.max_in_flight
union all
select count(*) || ' tasks of ' || t.action || ' with limit key ' || t.limit_key || ' run; its limit is '
    || a.key_max_in_flight
from penstock.task t join penstock.action a on a.name = t.action
where t.state = 'ACQUIRED' and t.limit_key is not null
group by t.action, t.limit_key, a.key_max_in_flight having count(*) > a.key_max_in_flight
union all
select 'task ' || id || ' is both live and ended' from penstock.task join penstock.task_history using (id)
"""
_STATE = """
select id, state::text from penstock.task union all select id, state::text from penstock.task_history
"""


_WORKFLOWS = "select id, 'workflow ' || state as state from penstock.workflow where state in ('RUNNING', 'FAILING')"
_COPIES = """
select number, count(*) as copies from (
    select (payload ->> 'n')::int as number from penstock.task where workflow is null
    union all select (payload ->> 'n')::int from penstock.task_history where workflow is null) made
group by number having count(*) > 1
"""


class Violation(AssertionError):
    """A property does not hold. step: after how many commits."""


@dataclass
class _Life:
    """What is known of one task. attempts: as last seen. claim: the highest so far. running: the claim that holds it.
    ended: its final state."""

    attempts: int = 0
    claim: int = 0
    running: int | None = None
    result: str | None = None
    ended: str | None = None


@dataclass
class Checks:
    """Reads what each commit has changed. ledger: ids of tasks that clients know to be accepted; retried: those that a
    client wanted to run again, of which a result may be replaced."""

    bridge: Bridge
    ledger: dict[int, int] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)
    _lives: dict[int, _Life] = field(default_factory=dict)
    commits: int = 0
    succeeded: int = 0

    def look(self) -> None:
        """Raises Violation."""
        changes = sorted(self.bridge.ask(_CHANGES), key=lambda row: row["seq"])
        if not changes:
            return
        self.commits += 1
        for change in changes:
            for problem in self._problems(change):
                raise Violation(problem)
        try:
            for row in self.bridge.ask(_STANDING):
                raise Violation(row["problem"])
            self._look_for_lost()
        except asyncpg.LockNotAvailableError:
            return  # a partition is being dropped; the next commit is looked at again

    def _look_for_lost(self) -> None:
        known = {row["id"] for row in self.bridge.ask(_STATE)}
        for task_id in [*self._lives, *self.ledger]:
            if task_id not in known:
                raise Violation(f"task {task_id} is lost")

    def _problems(self, change: Any) -> Iterator[str]:
        task_id, state, what = change["id"], change["state"], change["what"]
        life = self._lives.setdefault(task_id, _Life())
        if change["attempts"] > change["max_attempts"]:
            yield f"task {task_id} has {change['attempts']} attempts; its limit is {change['max_attempts']}"
        if what == "ended insert":
            if state == "SUCCESS":
                self.succeeded += 1
                result = json.loads(change["result"])
                if life.running != change["claim"]:
                    yield f"task {task_id} succeeded by claim {change['claim']}, while claim {life.running} held it"
                elif result["claim"] != change["claim"]:
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
            elif state != "ACQUIRED":
                life.running = None
            life.attempts = change["attempts"]

    def look_for_repeated(self, sent: Mapping[int, int]) -> None:
        """No request made more tasks than it was sent. sent: how often, by number. Raises Violation."""
        for row in self.bridge.ask(_COPIES):
            if row["copies"] > sent.get(row["number"], row["copies"]):
                raise Violation(
                    f"request {row['number']} was sent {sent[row['number']]} times and made {row['copies']} tasks"
                )

    def unsettled(self) -> list[tuple[int, str]]:
        """Tasks and workflows that have not ended."""
        final = ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")
        tasks = [(row["id"], row["state"]) for row in self.bridge.ask(_STATE) if row["state"] not in final]
        return tasks + [(row["id"], row["state"]) for row in self.bridge.ask(_WORKFLOWS)]
