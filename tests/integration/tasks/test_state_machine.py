"""Random lives of tasks: the real statements against a model of twenty lines each, compared after every step."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from penstock.db.pool import Store
from penstock.db.session import Pair, Session
from penstock.methods.table import read_command
from penstock.protocol.answers import Answered
from penstock.protocol.errors import AnsweredAlready, RpcError, StateConflict, TaskNotFound
from penstock.protocol.reports import (
    NO_HINTS,
    decode_reports,
    encode_error,
    encode_notification,
    encode_progress,
    encode_result,
)
from penstock.protocol.requests import join_batch
from penstock.protocol.task import (
    EVERYTHING,
    EXPIRED,
    FINAL_STATES,
    Failure,
    NewTask,
    Position,
    State,
    Stretch,
)
from penstock.results.apply import ApplySummary, apply_reports, delay_after
from penstock.results.methods import AnswerWait, answer_wait, give_up_overdue
from penstock.scheduler.scan_bounds import LEVELS, ScanBounds
from penstock.settings.model import Settings, load_settings
from penstock.supervisor.duties import expire_some
from penstock.tasks import claim as claims
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import ordering
from penstock.tasks import reschedule as rescheduling
from penstock.tasks import settle as settling
from penstock.tasks.claim import ClaimBatch
from tests.rounds import run_rounds
from tests.transitions import READY_STATES, TRANSITIONS
from tests.unit.protocol.test_message_properties import payloads

T = TypeVar("T")
LATER_SECONDS = 50_000.0
RETRY_SECONDS = 10_000.0
STALE_AFTER_SECONDS = 60.0
ALIVE = '{"percent":40.0,"note":null}'
TABLES = "task, task_history, unique_key, ordering_head, dispatch, tally, wait, turn"
FEWEST_STEPS = 1000
STEPS: set[str] = set()
# What the run must have met, beside each of its steps, to count as having tried the interleavings.
MET = {
    "claim", "bounded claim", "bounded claim past tasks before its bounds", "sweep that found them", "send failure",
    "unsent release", "unsent claim with a heartbeat",
    "result", "late result", "duplicate result", "failure", "repair", "suspect sent again", "cancel",
    "cancel of a claimed task", "retry", "cleaning",
    "key taken from a settled task", "key taken from a live task", "replacement", "retry refused for its key", "expiry",
    "hold", "hold ended by a retry", "hold ended by hand", "hold ended by cleaning", "reschedule to now",
    "wait", "event", "event kept", "kept event taken", "event again", "late event refused", "next event kept",
    "wait timed out", "token of another", "second token", "cancel of a waiting task",
    "claim of a turn", "turn left", "turn over",
}  # fmt: skip


def in_a_day() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


@dataclass
class Model:
    """What a task ought to be.

    ``due`` counts from now; ``claims`` are all that it ever had, oldest first; ``beat`` is the last with a heartbeat.
    """

    new: NewTask
    state: State
    due: bool
    attempts: int = 0
    claims: list[int] = field(default_factory=list)
    beat: int = 0
    result: int | None = None
    failures: int = 0
    suspect: bool = False
    payload: str = ""
    priority: int = 0
    expires: bool = False
    reason: str | None = None

    @property
    def claim(self) -> int:
        return self.claims[-1] if self.claims else 0

    @property
    def awaits_event(self) -> bool:
        return self.state is State.WAITING and self.attempts > 0


@dataclass
class Token:
    """``pair``: who waits or waited. ``answer``: the last one, kept as long as ``is_kept``."""

    pair: Pair | None = None
    is_active: bool = False
    is_kept: bool = False
    answer: str | None = None


few_payloads = st.sampled_from(["{}", "[]", '{"n": 1.0}']) | payloads  # each drawn one takes room from further steps
new_tasks = st.builds(
    NewTask,
    action=st.sampled_from(["a", "b"]),
    payload=few_payloads,
    delay_seconds=st.sampled_from([None, None, LATER_SECONDS]),
    priority=st.integers(-1, 1),
    unique_key=st.sampled_from([None, None, "u1", "u2"]),
    ordering_key=st.sampled_from([None, "o1", "o2"]),
    max_attempts=st.integers(1, 3),
    labels=st.sampled_from([None, '{"a": "b"}']),
    expires_in_seconds=st.sampled_from([None, None, None, None, None, LATER_SECONDS]),
    limit_key=st.sampled_from([None, "l"]),
    unique=st.sampled_from(["retained", "live", "live", 0.000001, LATER_SECONDS]),
    on_duplicate=st.sampled_from(["return", "replace"]),
    replaces_priority=st.booleans(),
)
plain_tasks = st.builds(NewTask, action=st.just("a"), payload=few_payloads, max_attempts=st.integers(1, 3))
batches = st.one_of(st.lists(new_tasks, min_size=1, max_size=4), st.lists(plain_tasks, min_size=1, max_size=4))
kinds = st.sampled_from(
    ["success", "success", "fail", "fail_now", "fail_for_good", "alive", "success_by_attempt", "wait t1", "wait t2"]
)
tokens = st.sampled_from(["t1", "t2"])
EVENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "complete": ("task.complete", {"result": {"claim": 0}}),
    "fail": ("task.fail", {"error": "no"}),
    "fail_now": ("task.fail", {"error": "no", "retry_after": 0}),
    "fail_for_good": ("task.fail", {"error": "no", "final": True}),
}


def step(work: Callable[..., None]) -> Callable[..., None]:
    """Counts, so that the test knows how much it has tried."""
    STEPS.add(work.__name__)

    @wraps(work)
    def counted(self: Lives, **drawn: Any) -> None:
        self.steps[work.__name__] += 1
        work(self, **drawn)

    return counted


class Lives(RuleBasedStateMachine):
    """One machine is one run over empty tables; the database, its connections and its sequences stay."""

    store: Store
    settings: Settings
    loop: asyncio.AbstractEventLoop
    steps: Counter[str]
    met: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.tasks: dict[int, Model] = {}
        self.unique: dict[tuple[str, str], int] = {}
        self.heads: dict[str, int] = {}
        self.held: set[str] = set()
        self.tokens: dict[str, Token] = {}
        self.batches: dict[int, list[Pair]] = {}
        self.handed_out: list[Pair] = []
        self.reported: set[Pair] = set()
        self.missed: set[int] = set()
        self.seen: dict[int, State] = {}
        self.now = 0.0
        self.turned: set[int] = set()  # SCHEDULED here, and there WAITING with their turn
        self.bounds = [ScanBounds(), ScanBounds()]  # of two schedulers, each of which knows only its own claims

    # Running the real thing

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)  # Runner.run sets a signal handler each time, a tenth of the test

    def fetch(self, name: str, *args: Any) -> list[Any]:
        async def work() -> list[Any]:
            async with self.store.session() as session:
                return await session.fetch(name, *args)

        return self.run(work())

    # What the model does on its own

    def settle(self, task_ids: Iterable[int], state: State) -> None:
        for task_id in task_ids:
            self.tasks[task_id].state = state
        self.promote()

    def promote(self) -> None:
        for key, head in list(self.heads.items()):
            if key not in self.held and (head not in self.tasks or self.tasks[head].state in FINAL_STATES):
                behind = self.live_behind(key)
                if behind:
                    self.heads[key] = behind[0]
                    self.tasks[behind[0]].state = State.SCHEDULED
                else:
                    del self.heads[key]

    def live_behind(self, key: str) -> list[int]:
        return sorted(
            task_id
            for task_id, task in self.tasks.items()
            if task.new.ordering_key == key and task.state not in FINAL_STATES
        )

    def begin(self, task_id: int, task: Model) -> None:
        """SCHEDULED, or WAITING behind the head of its key."""
        key = task.new.ordering_key
        task.state = State.SCHEDULED if key is None or self.heads.setdefault(key, task_id) == task_id else State.WAITING

    def release_model(self, pairs: Iterable[Pair], *, lost: bool = False) -> int:
        count = 0
        for task_id, claim in pairs:
            task = self.tasks.get(task_id)
            if task and task.state is State.ACQUIRED and task.claim == claim:
                task.attempts -= 1
                task.state = State.ERROR if task.attempts else State.SCHEDULED
                task.suspect = task.suspect or lost
                task.failures += lost
                count += 1
        return count

    def unreported(self, pairs: Iterable[Pair]) -> list[Pair]:
        """A release leaves those alone whose worker has sent a heartbeat."""
        return [(n, claim) for n, claim in pairs if n not in self.tasks or self.tasks[n].beat != claim]

    def fail_model(
        self, task_id: int, *, at_once: bool, for_good: bool, suspect: bool = False, hold: bool = False
    ) -> None:
        task = self.tasks[task_id]
        task.failures += 1
        task.suspect = task.suspect or suspect
        if for_good or task.attempts >= task.new.max_attempts:
            if hold and task.new.ordering_key is not None:
                self.held.add(task.new.ordering_key)
                self.met["hold"] += 1
            self.settle([task_id], State.CRITICAL_ERROR)
        else:
            task.state, task.due = State.ERROR, at_once

    def settle_by(self, task_id: int, kind: str) -> None:
        """A result or a failure of the claim that holds the task, given by a worker or by an event."""
        task = self.tasks[task_id]
        if kind in ("success", "success_by_attempt", "complete"):
            task.result = task.claim if kind == "success" else 0
            self.settle([task_id], State.SUCCESS)
        else:
            self.fail_model(task_id, at_once=kind == "fail_now", for_good=kind == "fail_for_good")

    def end_tokens_of(self, task_id: int) -> None:
        for token in self.tokens.values():
            if token.pair is not None and token.pair[0] == task_id:
                token.is_active = False

    def begin_wait(self, pair: Pair, token: str) -> str:
        """waits, stale, or the kind of outcome."""
        task = self.tasks[pair[0]]
        known = self.tokens.get(token)
        if known is not None and known.is_kept:
            assert known.answer is not None
            self.end_tokens_of(pair[0])
            self.tokens[token] = Token(pair, answer=known.answer)
            self.met["kept event taken"] += 1
            return known.answer
        if known is not None and known.is_active and known.pair != pair:
            assert known.pair is not None
            if known.pair[0] != pair[0]:
                self.met["token of another"] += 1
                return "fail" if task.state is State.ACQUIRED else "stale"
        if known is not None and known.is_active and known.pair == pair:
            return "stale"
        self.met["second token"] += task.awaits_event
        self.tokens[token] = Token(pair, is_active=True)
        task.state = State.WAITING
        self.met["wait"] += 1
        return "waits"

    def holds(self, task_id: int, claim: int) -> bool:
        task = self.tasks.get(task_id)
        return task is not None and task.state is State.ACQUIRED and task.claim == claim

    # Steps

    @initialize(batch=batches, turns_from=st.sampled_from([1, 1000]))
    def begin_with_a_few_tasks_in_empty_tables(self, batch: list[NewTask], turns_from: int) -> None:
        settling.PROMOTIONS_FROM = turns_from

        async def work() -> None:
            async with self.store.session() as session:
                await session._connection.execute(
                    f"truncate {', '.join(f'penstock.{table}' for table in TABLES.split(', '))}"
                )

        self.run(work())
        self.enqueue(batch=batch)

    @rule(batch=batches)
    @step
    def enqueue(self, batch: list[NewTask]) -> None:
        async def work() -> list[Any]:
            async with self.store.transaction() as session:
                return await enqueuing.enqueue(session, batch)

        answers = self.run(work())
        assert len(answers) == len(batch)
        added: set[int] = set()  # of one instant, so that no time at all has passed since they took their keys
        for task, answer in zip(batch, answers, strict=True):
            key = None if task.unique_key is None else (task.action, task.unique_key)
            first = self.unique.get(key) if key else None
            if first is not None and self.may_take_key(task, self.tasks[first], first in added):
                self.met[f"key taken from a {'settled' if self.tasks[first].state.final else 'live'} task"] += 1
                first = None
            assert answer.duplicate == (first is not None)
            if first is not None:
                assert answer.id == first
                self.replace(task, self.tasks[first], answer.replaced)
            else:
                assert answer.id not in self.tasks
                model = Model(task, State.SCHEDULED, due=task.delay_seconds is None)
                model.payload, model.priority = task.payload, task.priority
                model.expires = task.expires_in_seconds is not None
                self.tasks[answer.id] = model
                added.add(answer.id)
                self.begin(answer.id, model)
                if key:
                    self.unique[key] = answer.id
        for answer in answers:
            assert answer.state is self.told_state(answer.id)

    def told_state(self, task_id: int) -> State:
        """The row of a task with its turn stays WAITING until a claim or the end of the turn; answers show the row."""
        return State.WAITING if task_id in self.turned else self.tasks[task_id].state

    @staticmethod
    def may_take_key(task: NewTask, holder: Model, is_of_this_batch: bool) -> bool:
        """Whether a new task takes its unique key from the one that has it."""
        return holder.state.final if task.unique == "live" else task.unique == 0.000001 and not is_of_this_batch

    def replace(self, task: NewTask, first: Model, replaced: bool | None) -> None:
        if task.on_duplicate != "replace":
            assert replaced is None
            return
        assert replaced == (first.state in {State.WAITING, *READY_STATES} and not first.awaits_event)
        if replaced:
            self.met["replacement"] += 1
            first.payload = task.payload
            first.expires = first.expires or task.expires_in_seconds is not None
            if task.delay_seconds is not None:
                first.due = False
            if task.replaces_priority:
                first.priority = task.priority

    def in_state(self, *states: State) -> list[int]:
        return [task_id for task_id, task in self.tasks.items() if task.state in states]

    # Promotions

    def promote_overdue(self) -> None:
        """As a scheduler does; it would find out about the moved and the cancelled ones by and by."""

        async def work() -> tuple[int, set[int]]:
            async with self.store.transaction() as session:
                if not await session._connection.fetchval("select exists (select from penstock.turn)"):
                    return 0, set()
                await session._connection.execute(
                    "update penstock.turn u set ends_at = now() where exists (select from unnest(u.task_ids, u.run_ats)"
                    " e (id, run_at) left join penstock.task t on t.id = e.id and t.run_at = e.run_at"
                    " and t.priority = u.priority where t.id is null)"
                )
                promoted = (await ordering.promote_overdue(session, 100)).promoted
                rows = await session._connection.fetch("select unnest(task_ids) as id from penstock.turn")
                return promoted, {row["id"] for row in rows}

        promoted, self.turned = self.run(work())
        self.met["turn over"] += promoted > 0

    # Claiming

    @precondition(lambda self: self.in_state(*READY_STATES))
    @rule(limit=st.integers(1, 5), much_later=st.booleans())
    @step
    def claim(self, limit: int, much_later: bool) -> None:
        self.claim_out_of(EVERYTHING, limit, much_later)

    @precondition(lambda self: self.in_state(*READY_STATES))
    @rule(limit=st.integers(1, 5), scheduler=st.integers(0, 1), much_later=st.booleans())
    @step
    def claim_behind_the_bounds(self, limit: int, scheduler: int, much_later: bool) -> None:
        """The bounds may be as old as they like: what stands before them is not found, and nothing else is missed."""
        bounds = self.bounds[scheduler]
        stretches = bounds.from_bounds()
        self.promote_overdue()
        missed = set(self.due_in(EVERYTHING, much_later)) - set(self.due_in(stretches, much_later))
        batch = self.claim_out_of(stretches, limit, much_later)
        found = len(batch.tasks) if batch else 0
        bounds.claimed(batch.reached if batch else {}, found < limit)
        assert not (missed and found < limit) or bounds.sweep_is_due(self.now + 3600), "nothing will look for these"
        self.missed |= missed
        self.met["bounded claim"] += bool(found)
        self.met["bounded claim past tasks before its bounds"] += bool(found and missed)

    @precondition(lambda self: self.in_state(*READY_STATES))
    @rule(limit=st.integers(1, 5), scheduler=st.integers(0, 1), much_later=st.booleans())
    @step
    def sweep(self, limit: int, scheduler: int, much_later: bool) -> None:
        """A claim from the front misses nothing, whatever the bounds have come to be."""
        bounds = self.bounds[scheduler]
        self.now += 1
        bounds.sweep_begins(self.now)
        bounds.set_levels(self.read_levels(), self.now)
        stretches = bounds.from_front()
        assert self.due_in(stretches, much_later) == self.due_in(EVERYTHING, much_later)
        batch = self.claim_out_of(stretches, limit, much_later)
        found = {task.id for task in batch.tasks} if batch else set()
        bounds.swept(batch.reached if batch else {}, len(found) < limit, self.now)
        self.met["sweep that found them"] += bool(found & self.missed)
        self.missed -= found

    @precondition(lambda self: self.in_state(*READY_STATES))
    @rule(limit=st.integers(1, 5), scheduler=st.integers(0, 1), much_later=st.booleans())
    @step
    def sweep_after_a_bounded_claim(self, limit: int, scheduler: int, much_later: bool) -> None:
        """Before another step takes away what the bounded claim has missed."""
        self.claim_behind_the_bounds(limit=limit, scheduler=scheduler, much_later=much_later)
        if self.in_state(*READY_STATES):
            self.sweep(limit=5, scheduler=scheduler, much_later=much_later)

    @rule(scheduler=st.integers(0, 1))
    @step
    def sweep_for_a_task_that_came_back(self, scheduler: int) -> None:
        """Another life that chance alone would rarely lead."""
        for _ in range(2):
            self.enqueue(batch=[NewTask("a")])
            self.claim_behind_the_bounds(limit=5, scheduler=scheduler, much_later=False)
            self.the_database_agrees_with_the_model()
            self.release_unsent()
            self.the_database_agrees_with_the_model()
        self.sweep(limit=5, scheduler=scheduler, much_later=False)

    def read_levels(self) -> list[int]:
        async def work() -> list[int]:
            async with self.store.session() as session:
                return await claims.read_priorities(session, LEVELS)

        levels = self.run(work())
        found = {self.tasks[i].priority for i in self.in_state(*READY_STATES) if i not in self.turned}
        assert levels == sorted(found, reverse=True)
        return levels

    def positions(self) -> dict[int, Position]:
        return {row["id"]: Position(row["run_at"], row["id"]) for row in self.fetch("read_tasks", list(self.tasks))}

    def due_in(self, stretches: Sequence[Stretch], much_later: bool) -> list[int]:
        """What the tasks that are due in these stretches ought to be, in the order of the claim."""
        at = self.positions()
        due = [
            i
            for i, task in self.tasks.items()
            if task.state in READY_STATES and ((task.due and not much_later) or (much_later and not task.expires))
        ]
        found = self.turned & set(due)  # those are found wherever the bounds are
        for low, high, after in stretches:
            found |= {i for i in due if low <= self.tasks[i].priority <= high and (low < high or at[i] > after)}
        return sorted(found, key=lambda i: (-self.tasks[i].priority, at[i]))

    def claim_out_of(self, stretches: Sequence[Stretch], limit: int, much_later: bool) -> ClaimBatch | None:
        self.promote_overdue()
        at = self.positions()
        expected = self.due_in(stretches, much_later)[:limit]

        async def work() -> ClaimBatch | None:
            async with self.store.session() as session:
                return await claims.claim(session, limit, stretches=stretches, now=in_a_day() if much_later else None)

        batch = self.run(work())
        if batch is None:
            assert expected == []
            return None
        assert [task.id for task in batch.tasks] == expected
        for claimed in batch.tasks:
            task = self.tasks[claimed.id]
            assert claimed.claim == batch.id > task.claim
            assert (claimed.action, claimed.payload) == (task.new.action, task.payload)
            assert claimed.suspect == task.suspect
            self.met["suspect sent again"] += claimed.suspect
            task.state, task.attempts = State.ACQUIRED, task.attempts + 1
            task.claims.append(claimed.claim)
        took = self.turned & set(expected)
        self.turned -= took
        self.met["claim of a turn"] += bool(took)
        self.met["turn left"] += bool(took and self.turned)
        assert batch.reached == {self.tasks[i].priority: at[i] for i in expected}  # the last of each stays
        self.batches[batch.id] = [(task.id, task.claim) for task in batch.tasks]
        self.handed_out += self.batches[batch.id]
        self.met["claim"] += 1
        return batch

    @precondition(lambda self: self.in_state(*READY_STATES))
    @rule(limit=st.integers(1, 5))
    @step
    def claim_release_and_claim_again(self, limit: int) -> None:
        """So that there are old claims of tasks that are held by a newer one."""
        self.claim_out_of(EVERYTHING, limit, much_later=True)
        self.release_unsent()
        self.claim_out_of(EVERYTHING, limit, much_later=True)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    @step
    def confirm_a_dispatch_some_of_which_could_not_be_sent(self, data: st.DataObject) -> None:
        batch_id = data.draw(st.sampled_from(list(self.batches)))
        pairs = self.batches.pop(batch_id)
        unsent = data.draw(st.just([]) | st.lists(st.sampled_from(pairs), unique=True))

        async def work() -> int:
            async with self.store.session() as session:
                released = await claims.release(session, unsent)
                await claims.confirm(session, batch_id)
                return released

        released = self.run(work())
        assert released == self.release_model(self.unreported(unsent))
        self.met["send failure"] += bool(released)

    @precondition(lambda self: self.batches)
    @rule(reports=st.booleans())
    @step
    def release_what_a_dead_scheduler_left(self, reports: bool) -> None:
        """reports: one that it sent without confirming it runs already."""
        sent = [pair for pairs in self.batches.values() for pair in pairs if self.holds(*pair)]
        if reports and sent:
            self.report([(sent[0], "alive")])
        self.release_unsent()

    def release_unsent(self) -> None:
        async def work() -> int:
            async with self.store.session() as session:
                assert await session.fetch("release_unsent", 60, 100, None) == [], "too early"
                return len(await session.fetch("release_unsent", 60, 100, in_a_day()))

        pairs = [pair for pairs in self.batches.values() for pair in pairs if self.holds(*pair)]
        silent = self.unreported(pairs)
        expected = self.release_model(silent)
        self.batches.clear()
        assert self.run(work()) == expected
        self.met["unsent release"] += bool(expected)
        self.met["unsent claim with a heartbeat"] += len(silent) < len(pairs)

    @precondition(lambda self: self.in_state(State.ACQUIRED))
    @rule(data=st.data())
    @step
    def report_claims_that_hold(self, data: st.DataObject) -> None:
        held = [(task_id, self.tasks[task_id].claim) for task_id in self.in_state(State.ACQUIRED)]
        self.report(data.draw(st.lists(st.tuples(st.sampled_from(held), kinds), min_size=1, max_size=5)))

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data())
    @step
    def report_any_claims(self, data: st.DataObject) -> None:
        """Of the newest, late ones, of tasks long gone, several of one task in one body."""
        pairs = st.sampled_from(self.handed_out)
        self.report(data.draw(st.lists(st.tuples(pairs, kinds), min_size=1, max_size=5)))

    def report(self, drawn: list[tuple[Pair, str]]) -> None:
        # Two tokens of one claim at once are for tests/integration/test_waits.py.
        tokens_of: dict[Pair, str] = {}
        drawn = [(pair, kind) for pair, kind in drawn if kind[:4] != "wait" or tokens_of.setdefault(pair, kind) == kind]
        entries = [self.entry(pair, kind) for pair, kind in drawn]

        async def work() -> ApplySummary:
            async with self.store.transaction() as session:
                return await apply_reports(
                    session, decode_reports(join_batch(entries), batch_limit=100, bare_ids=True), self.settings
                )

        newest: dict[int, tuple[int, str]] = {}
        stale = 0
        for (task_id, claim), kind in drawn:
            if kind == "alive":
                continue
            if kind == "success_by_attempt":
                # Without a claim, the attempt's number has to match: it says no more than that.
                task = self.tasks.get(task_id)
                if task is None or task.state is not State.ACQUIRED or task.attempts != 1:
                    stale += 1
                    continue
                claim = task.claim
            if task_id in newest:
                stale += 1
            if task_id not in newest or newest[task_id][0] < claim:
                newest[task_id] = claim, kind
        applied = self.run(work())
        succeeded = failed = waiting = 0
        held: dict[int, str] = {}
        for task_id, (claim, kind) in newest.items():  # waits first, each before what settles any
            mine = task_id in self.tasks and self.tasks[task_id].awaits_event and self.tasks[task_id].claim == claim
            if self.holds(task_id, claim) or (mine and kind.startswith("wait")):
                became = self.begin_wait((task_id, claim), kind[5:]) if kind.startswith("wait") else kind
                held[task_id] = became
        stale += len(newest) - len(held)
        for task_id, kind in held.items():
            if kind in ("waits", "stale"):
                waiting += kind == "waits"
                stale += kind == "stale"
                continue
            succeeded += kind in ("success", "success_by_attempt", "complete")
            failed += kind.startswith("fail")
            self.settle_by(task_id, kind)
        assert (applied.succeeded, applied.failed, applied.stale) == (succeeded, failed, stale)
        assert applied.waiting == waiting
        assert applied.unreadable == []
        for (task_id, claim), kind in drawn:
            if kind == "alive" and self.holds(task_id, claim):
                self.tasks[task_id].beat = claim
        for pair, kind in drawn:
            if kind in ("success", "fail", "fail_now", "fail_for_good"):
                was_live = pair[0] in self.tasks and self.tasks[pair[0]].claim > pair[1]
                self.met["late result"] += was_live
                self.met["duplicate result"] += not was_live and pair in self.reported
                self.reported.add(pair)
        self.met["result"] += bool(succeeded)
        self.met["failure"] += bool(failed)

    @staticmethod
    def entry(pair: Pair, kind: str) -> str:
        claim_id = f"{pair[0]}:{pair[1]}"
        if kind == "alive":
            return encode_progress(claim_id, 40)
        if kind == "success":
            return encode_result(claim_id, json.dumps({"claim": pair[1]}))
        if kind.startswith("wait"):
            return encode_notification("wait", id=claim_id, token=kind[5:], timeout=LATER_SECONDS)
        if kind == "success_by_attempt":
            return encode_result(str(pair[0]), '{"claim":0,"attempt":"1"}')
        hints: dict[str, dict[str, Any]] = {
            "fail": {},
            "fail_now": {"retry_after": 0},
            "fail_for_good": {"final": True},
        }
        return encode_error(claim_id, -32000, "boom", hints[kind])

    @precondition(lambda self: self.in_state(State.ACQUIRED, *READY_STATES))
    @rule(
        data=st.data(),
        token=tokens,
        kind=st.sampled_from(sorted(EVENTS)),
        end=st.sampled_from(
            [
                "none yet",
                "time",
                "early event",
                "early event",
                "event",
                "late event",
                "next event",
                "second token",
                "cancel",
            ]
        ),
    )
    @step
    def wait(self, data: st.DataObject, token: str, kind: str, end: str) -> None:
        """Whole lives of waits, which chance alone would rarely lead."""
        if not self.in_state(State.ACQUIRED):
            self.claim_out_of(EVERYTHING, 3, much_later=True)
            self.the_database_agrees_with_the_model()
        held = self.in_state(State.ACQUIRED)
        if not held:
            return  # those that are ready expire before that
        task_id = data.draw(st.sampled_from(held))
        task = self.tasks[task_id]
        if end == "early event":
            self.bring(kind, token)
        self.report([((task_id, task.claim), f"wait {token}")])
        self.the_database_agrees_with_the_model()
        if not task.awaits_event or end == "none yet":
            return
        if end == "second token":  # its message was delivered twice
            self.report([((task_id, task.claim), f"wait {'t2' if token == 't1' else 't1'}")])
        elif end == "cancel":
            self.cancel_these([task_id])
        elif end == "time":
            self.time_out()
        else:
            first = {"late event": "complete", "next event": "fail"}.get(end, kind)
            self.bring(first, token)
            self.the_database_agrees_with_the_model()
            self.bring(first, token)
            self.bring("fail_for_good" if end == "late event" else kind, token)

    def bring(self, kind: str, token: str) -> None:
        method, params = EVENTS[kind]
        command = read_command(method, json.dumps({"token": token, **params}).encode(), self.settings)
        assert isinstance(command, AnswerWait)

        async def work() -> Answered | RpcError:
            async with self.store.transaction() as session:
                try:
                    return await answer_wait(session, command, self.settings)
                except RpcError as exc:
                    return exc  # what was done until then is committed, as by the submitter

        got = self.run(work())
        known = self.tokens.get(token)
        if known is None:
            self.tokens[token] = Token(is_kept=True, answer=kind)
            assert got == Answered(id=None, state=None, kept=True, duplicate=False)
            self.met["event kept"] += 1
        elif known.is_active:
            assert known.pair is not None
            task_id = known.pair[0]
            assert self.tasks[task_id].awaits_event
            assert self.tasks[task_id].claim == known.pair[1]
            self.end_tokens_of(task_id)
            self.tokens[token] = Token(known.pair, answer=kind)
            self.settle_by(task_id, kind)
            assert got == Answered(id=task_id, state=self.tasks[task_id].state, kept=False, duplicate=False)
            self.met["event"] += 1
        elif known.is_kept:
            if known.answer == kind:
                assert got == Answered(id=None, state=None, kept=True, duplicate=True)
                self.met["event again"] += 1
            else:
                assert isinstance(got, AnsweredAlready)
        else:
            assert known.pair is not None
            task_id = known.pair[0]
            state = self.tasks[task_id].state if task_id in self.tasks else None
            if known.answer == kind:
                assert got == Answered(id=task_id, state=state, kept=False, duplicate=True)
                self.met["event again"] += 1
            elif state is None:
                assert isinstance(got, TaskNotFound)
            elif state.final:
                assert isinstance(got, StateConflict)
                self.met["late event refused"] += 1
            else:
                assert got == Answered(id=None, state=None, kept=True, duplicate=False)
                self.tokens[token] = Token(is_kept=True, answer=kind)
                self.met["next event kept"] += 1

    def time_out(self) -> None:
        async def work() -> int:
            async with self.store.transaction() as session:
                assert await give_up_overdue(session, 100, self.settings) == 0, "too early"
                return await give_up_overdue(session, 100, self.settings, now=in_a_day())

        active = [token for token in self.tokens.values() if token.is_active]
        assert self.run(work()) == len(active)
        for task_id in {token.pair[0] for token in active if token.pair is not None}:
            self.end_tokens_of(task_id)
            self.fail_model(task_id, at_once=False, for_good=False)
            self.met["wait timed out"] += 1

    def draw_claims(self, data: st.DataObject) -> list[Pair]:
        """Claims of distinct tasks: newest and older ones of tasks that are held, and any that ever were."""
        of_held = [
            (task_id, claim) for task_id in self.in_state(State.ACQUIRED) for claim in self.tasks[task_id].claims
        ]
        any_claim = st.sampled_from(of_held or self.handed_out) | st.sampled_from(self.handed_out)
        return data.draw(st.lists(any_claim, min_size=1, max_size=4, unique_by=lambda pair: pair[0]))

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data(), lost=st.booleans())
    @step
    def release_claims_that_may_have_been_lost_meanwhile(self, data: st.DataObject, lost: bool) -> None:
        """lost: their attempts, so that they are spared."""
        pairs = self.draw_claims(data)

        async def work() -> int:
            async with self.store.session() as session:
                if not lost:
                    return await claims.release(session, pairs)
                return len(
                    await settling.refund(
                        session, [Failure(*pair, '{"code":1,"message":"lost"}', None) for pair in pairs]
                    )
                )

        assert self.run(work()) == self.release_model(pairs if lost else self.unreported(pairs), lost=lost)

    @precondition(lambda self: self.handed_out)
    @rule(data=st.data())
    @step
    def fail_claims_that_may_have_been_lost_meanwhile(self, data: st.DataObject) -> None:
        """The statements alone hold the fence: the one that decided on a failure may have looked a moment too early."""
        self.fail(self.draw_claims(data), for_good=data.draw(st.booleans()), hold=data.draw(st.booleans()))

    def fail(self, pairs: list[Pair], *, for_good: bool, hold: bool) -> None:
        failures = []
        for task_id, claim in pairs:
            task = self.tasks.get(task_id)
            last = for_good or (task is not None and task.attempts >= task.new.max_attempts)
            failures.append(Failure(task_id, claim, '{"code":1,"message":"boom"}', None if last else RETRY_SECONDS))

        async def work() -> set[int]:
            async with self.store.transaction() as session:
                return await settling.fail(session, failures, hold_keys=hold)

        expected = {task_id for task_id, claim in pairs if self.holds(task_id, claim)}
        assert self.run(work()) == expected
        for task_id in expected:
            self.fail_model(task_id, at_once=False, for_good=for_good, hold=hold)

    @precondition(lambda self: self.in_state(State.ACQUIRED))
    @rule(page=st.integers(1, 3))
    @step
    def repair(self, page: int) -> None:
        async def work() -> list[int]:
            now = in_a_day()
            async with self.store.session() as session:
                assert await session.fetch("find_stale", STALE_AFTER_SECONDS, 100, None, None, None) == [], "too early"
            found: list[int] = []
            after: tuple[datetime | None, int | None] = None, None
            while True:
                async with self.store.transaction() as session:
                    stale = await session.fetch("find_stale", STALE_AFTER_SECONDS, page, now, *after)
                    await settling.fail(session, [self.failure(task) for task in stale])
                found += [task["id"] for task in stale]
                if len(stale) < page:
                    return found
                after = stale[-1]["claimed_at"], stale[-1]["id"]

        acquired = sorted(self.in_state(State.ACQUIRED))
        assert sorted(self.run(work())) == acquired
        for task_id in acquired:
            self.fail_model(task_id, at_once=False, for_good=False, suspect=True)
        self.met["repair"] += 1

    def failure(self, stale: Any) -> Failure:
        delay = delay_after(stale["attempts"], stale["max_attempts"], NO_HINTS, self.settings.backoff)
        return Failure(stale["id"], stale["claim"], '{"code":-32000,"message":"silent"}', delay, suspect=True)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    @step
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_these(data.draw(st.lists(st.sampled_from(list(self.tasks)), min_size=1, max_size=3, unique=True)))

    def cancel_these(self, ids: list[int]) -> None:
        async def work() -> set[int]:
            async with self.store.transaction() as session:
                return await settling.cancel(session, ids, "because")

        live = {task_id for task_id in ids if self.tasks[task_id].state not in FINAL_STATES}
        claimed = set(self.in_state(State.ACQUIRED)) & live
        assert self.run(work()) == live
        for task_id in live:
            self.met["cancel of a waiting task"] += self.tasks[task_id].awaits_event
            self.end_tokens_of(task_id)
            self.tasks[task_id].reason = "because"
        self.settle(live, State.CANCELLED)
        self.met["cancel"] += bool(live)
        self.met["cancel of a claimed task"] += bool(claimed)

    @rule(limit=st.integers(1, 5))
    @step
    def expire(self, limit: int) -> None:
        async def work() -> int:
            async with self.store.transaction() as session:
                assert await expire_some(session, limit) == 0, "too early"
                return await expire_some(session, limit, now=in_a_day())

        expired = {
            i
            for i in self.in_state(State.WAITING, *READY_STATES)
            if self.tasks[i].expires and not self.tasks[i].awaits_event
        }
        count = self.run(work())
        assert count == min(limit, len(expired))
        gone = {row["id"] for row in self.fetch("read_states", list(expired)) if row["state"] == State.CANCELLED}
        assert len(gone) == count
        for task_id in gone:
            self.tasks[task_id].reason = EXPIRED
        self.settle(gone, State.CANCELLED)
        self.met["expiry"] += bool(gone)

    @precondition(lambda self: self.tasks)
    @rule(
        data=st.data(), delay=st.sampled_from([None, 0.0, 0.0, LATER_SECONDS]), priority=st.none() | st.integers(-1, 1)
    )
    @step
    def reschedule(self, data: st.DataObject, delay: float | None, priority: int | None) -> None:
        ids = data.draw(st.lists(st.sampled_from(list(self.tasks)), min_size=1, max_size=3, unique=True))
        self.reschedule_these(ids, delay, priority)

    def reschedule_these(self, ids: list[int], delay: float | None, priority: int | None) -> None:
        async def work() -> dict[int, State]:
            async with self.store.session() as session:
                rows = await session.fetch("reschedule_tasks", ids, None, delay, priority)
                return {row["id"]: State(row["state"]) for row in rows}

        waiting = self.in_state(State.WAITING, *READY_STATES)
        moved = {task_id for task_id in set(ids) & set(waiting) if not self.tasks[task_id].awaits_event}
        assert self.run(work()) == {i: self.told_state(i) for i in moved}
        for task_id in moved:
            task = self.tasks[task_id]
            if delay is not None:
                self.met["reschedule to now"] += not task.due and delay == 0
                task.due = delay == 0
            task.priority = task.priority if priority is None else priority

    @precondition(lambda self: any(self.tasks[head].state in READY_STATES for head in self.heads.values()))
    @rule(end=st.sampled_from(["none yet", "by hand", "by a retry", "by cleaning"]))
    @step
    def hold_an_ordering_key_and_end_that(self, end: str) -> None:
        """A life that chance alone would rarely lead."""
        self.claim_out_of(EVERYTHING, 100, much_later=True)
        self.the_database_agrees_with_the_model()
        heads = [(key, head) for key, head in self.heads.items() if self.tasks[head].state is State.ACQUIRED]
        if not heads:
            return  # all expired by then
        key, head = heads[0]
        self.fail([(head, self.tasks[head].claim)], for_good=True, hold=True)
        assert key in self.held
        self.the_database_agrees_with_the_model()
        if end == "by hand":
            self.let_go([key])
        elif end == "by a retry":
            self.restart_these([head])
        elif end == "by cleaning":
            self.clean_all(State.CRITICAL_ERROR)

    @precondition(lambda self: not self.held)
    @rule(end=st.sampled_from(["one by one", "cancel", "move"]))
    @step
    def let_two_keys_have_their_turn(self, end: str) -> None:
        """Another such life."""
        self.enqueue(batch=[NewTask("a", ordering_key=key) for key in ("o1", "o2", "o1", "o2")])
        self.claim_out_of(EVERYTHING, 100, much_later=True)
        self.the_database_agrees_with_the_model()
        running = [i for i in self.heads.values() if self.tasks[i].state is State.ACQUIRED]
        results = {(i, self.tasks[i].claim): json.dumps({"claim": self.tasks[i].claim}) for i in running}

        async def work() -> int:
            async with self.store.transaction() as session:
                return await settling.finish(session, results)

        assert self.run(work()) == len(running)
        for task_id in running:
            self.tasks[task_id].result = self.tasks[task_id].claim
        self.settle(running, State.SUCCESS)
        self.the_database_agrees_with_the_model()
        if end == "one by one" or not self.turned:
            self.claim_out_of(EVERYTHING, 1, much_later=False)
        elif end == "cancel":
            self.cancel_these([min(self.turned)])
        else:
            self.reschedule_these([min(self.turned)], LATER_SECONDS, None)

    @precondition(lambda self: self.heads)
    @rule(keys=st.lists(st.sampled_from(["o1", "o2"]), min_size=1, unique=True))
    @step
    def let_held_keys_go(self, keys: list[str]) -> None:
        self.let_go(keys)

    def let_go(self, keys: list[str]) -> None:
        async def work() -> dict[str, int | None]:
            async with self.store.transaction() as session:
                assert [held.key for held in await ordering.list_held_keys(session, 10)] == sorted(self.held)
                return await ordering.release_keys(session, keys)

        freed = self.held & set(keys)
        released = self.run(work())
        self.held -= freed
        self.promote()
        assert released == {key: self.heads.get(key) for key in freed}
        self.met["hold ended by hand"] += bool(freed)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    @step
    def restart(self, data: st.DataObject) -> None:
        restartable = self.in_state(*FINAL_STATES - {State.SUCCESS})
        any_task = st.sampled_from(list(self.tasks))
        choice = st.sampled_from(restartable) | any_task if restartable else any_task
        self.restart_these(data.draw(st.lists(choice, min_size=1, max_size=3, unique=True)))

    def keyed_to_restart(self) -> list[int]:
        return [i for i in self.in_state(*FINAL_STATES - {State.SUCCESS}) if self.key_of(i) is not None]

    @precondition(lambda self: self.keyed_to_restart())
    @rule(data=st.data())
    @step
    def restart_one_whose_unique_key_another_has(self, data: st.DataObject) -> None:
        """What rarely happens by chance."""
        task_id = data.draw(st.sampled_from(self.keyed_to_restart()))
        action, key = self.key_of(task_id) or ("", "")
        if self.unique.get((action, key), task_id) == task_id:
            self.enqueue(batch=[NewTask(action, unique_key=key, unique="live")])
        self.restart_these([task_id])

    def restart_these(self, ids: list[int]) -> None:
        restartable = self.in_state(*FINAL_STATES - {State.SUCCESS})

        async def work() -> dict[int, State]:
            async with self.store.transaction() as session:
                return await rescheduling.restart(session, ids)

        answer = self.run(work())
        expected = []
        for task_id in sorted(set(ids) & set(restartable)):
            task = self.tasks[task_id]
            if task.new.unique_key is not None:
                # Its record is kept, so the key is its own, another task's, or free since that one was cleaned.
                key = task.new.action, task.new.unique_key
                wanting = [i for i in ids if i in restartable and self.key_of(i) == key]
                holder = self.unique.get(key) or min(wanting)
                if holder != task_id:
                    self.met["retry refused for its key"] += 1
                    continue
                self.unique[key] = task_id
            expected.append(task_id)
        for task_id in expected:
            task = self.tasks[task_id]
            key_of_order = task.new.ordering_key
            if key_of_order in self.held and self.heads[key_of_order] == task_id:
                self.held.remove(key_of_order)
                self.met["hold ended by a retry"] += 1
        for task_id in expected:
            task = self.tasks[task_id]
            task.reason = None
            task.attempts, task.due, task.suspect = 0, True, False
            self.begin(task_id, task)
        assert answer == {task_id: self.tasks[task_id].state for task_id in expected}
        self.met["retry"] += bool(expected)

    def key_of(self, task_id: int) -> tuple[str, str] | None:
        new = self.tasks[task_id].new
        return None if new.unique_key is None else (new.action, new.unique_key)

    @precondition(lambda self: self.in_state(*FINAL_STATES))
    @rule(data=st.data())
    @step
    def clean(self, data: st.DataObject) -> None:
        self.clean_all(self.tasks[data.draw(st.sampled_from(self.in_state(*FINAL_STATES)))].state)

    def clean_all(self, state: State) -> None:
        partition = f"task_{state.lower()}"

        async def work() -> int:
            async with self.store.session() as session:
                early = await session.value("delete_expired", state.value, 60.0, 100, None, partition=partition)
                assert early == 0, "too early"
                removed: int = await session.value(
                    "delete_expired", state.value, 60.0, 100, in_a_day(), partition=partition
                )
                return removed

        gone = self.in_state(state)
        assert self.run(work()) == len(gone)
        self.met["cleaning"] += 1
        for task_id in gone:
            del self.tasks[task_id], self.seen[task_id]
        self.unique = {key: task_id for key, task_id in self.unique.items() if task_id in self.tasks}
        orphaned = {key for key in self.held if self.heads[key] not in self.tasks}

        async def release() -> int:
            async with self.store.transaction() as session:
                released, _ = await ordering.release_orphaned_keys(session, 100)
                return released

        assert self.run(release()) == len(orphaned)
        self.held -= orphaned
        self.promote()
        self.met["hold ended by cleaning"] += bool(orphaned)

    @precondition(lambda self: self.in_state(*FINAL_STATES))
    @rule()
    @step
    def fold_the_tally(self) -> None:
        self.fetch("compact_tally", 0.0, 0.0, 1000, 500, "other")

    # What holds after every step

    @invariant()
    def the_database_agrees_with_the_model(self) -> None:
        self.promote_overdue()
        live, settled, unique, heads, held, batches, counts, found_tokens = self.run(self.look())
        for task_id in self.turned:
            assert live[task_id]["state"] == State.WAITING
            live[task_id] = dict(live[task_id]) | {"state": State.SCHEDULED.value}
            counts[live[task_id]["action"], State.WAITING.value] -= 1
            counts[live[task_id]["action"], State.SCHEDULED.value] += 1
        rows = live | settled
        assert not live.keys() & settled.keys(), "a task stands in both tables"
        assert rows.keys() == self.tasks.keys()
        for task_id, row in rows.items():
            self.check_row(row, self.tasks[task_id], is_live=task_id in live)
        self.seen = {task_id: State(row["state"]) for task_id, row in rows.items()}
        assert unique == self.unique
        assert heads.keys() == self.heads.keys()
        assert held == {key: self.heads[key] for key in self.held}
        assert batches == self.batches.keys()
        assert found_tokens == {
            name: (token.pair, token.is_active, token.is_kept, token.answer is not None)
            for name, token in self.tokens.items()
        }
        waiting_for = {token.pair for token in self.tokens.values() if token.is_active}
        assert waiting_for == {(i, task.claim) for i, task in self.tasks.items() if task.awaits_event}
        expected = Counter((task.new.action, task.state.value) for task in self.tasks.values())
        assert +counts == expected
        self.check_order(rows.values())

    async def look(self) -> tuple[Any, ...]:
        async with self.store.transaction() as session:
            ask = session._connection.fetch
            columns = (
                "id, state::text, action, payload::text, attempts, max_attempts, claim, failures::text, ordering_key, "
                "priority, labels::text, expires_at, limit_key"
            )
            live = await ask(f"select {columns}, suspect, null as result, null as reason from penstock.task")
            settled = await ask(f"select {columns}, null as suspect, result::text, reason from penstock.task_history")
            assert len({row["id"] for row in settled}) == len(settled), "a task is settled twice"
            unique = await ask("select action, key, task_id from penstock.unique_key")
            heads = await ask("select key, task_id, held from penstock.ordering_head")
            batches = await ask("select id from penstock.dispatch")
            counts = await count_all(session)
            waits = await ask(
                "select token, task_id, claim, deadline is not null as active, answer is not null as kept, "
                "digest is not null as answered from penstock.wait"
            )
        return (
            {row["id"]: row for row in live},
            {row["id"]: row for row in settled},
            {(row["action"], row["key"]): row["task_id"] for row in unique},
            {row["key"]: row["task_id"] for row in heads},
            {row["key"]: row["task_id"] for row in heads if row["held"]},
            {row["id"] for row in batches},
            counts,
            {
                row["token"]: (
                    None if row["task_id"] is None else (row["task_id"], row["claim"]),
                    row["active"], row["kept"], row["answered"],
                )
                for row in waits
            },
        )  # fmt: skip

    def check_row(self, row: Any, task: Model, *, is_live: bool) -> None:
        state = State(row["state"])
        before = self.seen.get(row["id"], state)
        assert before is state or (before, state) in TRANSITIONS, f"{before} became {state}"
        assert is_live != state.final
        assert row["attempts"] <= row["max_attempts"]
        assert (state, row["attempts"], row["claim"]) == (task.state, task.attempts, task.claim)
        assert (row["action"], row["payload"], row["priority"]) == (task.new.action, task.payload, task.priority)
        assert (row["labels"], row["limit_key"]) == (task.new.labels, task.new.limit_key)
        assert (row["expires_at"] is not None, row["reason"]) == (task.expires, task.reason)
        assert len(json.loads(row["failures"] or "[]")) == task.failures
        assert row["suspect"] == (task.suspect if is_live else None)
        if state is State.SUCCESS:
            claim = json.loads(row["result"])["claim"]
            assert claim == task.result
            assert claim in (0, task.claims[-1]), "a result of another claim than the newest"
        else:
            assert row["result"] is None

    def check_order(self, rows: Iterable[Any]) -> None:
        """One task of a key may run, all others wait; without a restart it is the oldest."""
        runnable = Counter(
            row["ordering_key"]
            for row in rows
            if row["ordering_key"] is not None
            and (
                State(row["state"]) in {*READY_STATES, State.ACQUIRED}
                or (row["state"] == "WAITING" and row["attempts"])
            )
        )
        assert all(count == 1 for count in runnable.values())
        assert runnable.keys() == self.heads.keys() - self.held


async def count_all(session: Session) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for name, *args in (("count_live",), ("count_settled", "other")):
        for row in await session.fetch(name, *args):
            counts[row["action"], row["state"]] += row["count"]
    return counts


def test_any_interleaving_of_what_can_happen_to_tasks_agrees_with_the_model(database_url: str) -> None:
    usual = settling.PROMOTIONS_FROM
    with asyncio.Runner() as runner:
        store = Store(database_url, application_name="penstock-test")

        class OfThisTest(Lives):
            pass

        OfThisTest.store, OfThisTest.loop = store, runner.get_loop()
        OfThisTest.steps, OfThisTest.met = Counter(), Counter()
        OfThisTest.settings = load_settings(
            retry_base_seconds=RETRY_SECONDS, retry_factor=1, retry_cap_seconds=RETRY_SECONDS, retry_jitter=0
        )

        def is_enough() -> bool:
            is_long = OfThisTest.steps.total() >= FEWEST_STEPS and OfThisTest.steps.keys() == STEPS
            return is_long and {name for name in MET if OfThisTest.met[name]} == MET

        try:
            run_rounds(OfThisTest, is_enough, examples=20, steps=60)
        finally:
            settling.PROMOTIONS_FROM = usual
            runner.run(store.close())
    print(f"{OfThisTest.steps.total()} steps: {dict(OfThisTest.steps)}; met: {dict(OfThisTest.met)}")
    assert OfThisTest.steps.total() >= FEWEST_STEPS
    assert OfThisTest.steps.keys() == STEPS
    assert {name for name, count in OfThisTest.met.items() if count} == MET


BOOM = '{"code":1,"message":"boom"}'


async def _beat(session: Session, pair: Pair) -> int:
    return await settling.note_heartbeats(session, {pair: ALIVE})


async def _finish(session: Session, pair: Pair) -> int:
    return await settling.finish(session, {pair: "1"})


async def _delay(session: Session, pair: Pair) -> int:
    return len(await settling.fail(session, [Failure(*pair, BOOM, 1.0)]))


async def _bury(session: Session, pair: Pair) -> int:
    return len(await settling.fail(session, [Failure(*pair, BOOM, None)]))


async def _release(session: Session, pair: Pair) -> int:
    return await claims.release(session, [pair])


async def _spare(session: Session, pair: Pair) -> int:
    return len(await settling.refund(session, [Failure(*pair, BOOM, None)]))


async def _postpone(session: Session, pair: Pair) -> int:
    return len(await session.fetch("postpone_tasks", [pair[0]], [pair[1]], [1.0], ["{}"], ["snooze"]))


@pytest.mark.parametrize("change", [_beat, _finish, _delay, _bury, _release, _spare, _postpone])
async def test_no_statement_touches_a_task_by_an_older_claim(
    store: Store, change: Callable[[Session, Pair], Awaitable[int]]
) -> None:
    async with store.transaction() as session:
        await enqueuing.enqueue(session, [NewTask("a")])
    pairs: list[Pair] = []
    for _ in range(2):
        async with store.session() as session:
            if pairs:
                await claims.release(session, pairs)
            batch = await claims.claim(session, 1)
        assert batch is not None
        pairs += [(task.id, task.claim) for task in batch.tasks]
    old, new = pairs
    async with store.transaction() as session:
        before = await session.fetch("read_tasks", [old[0]])
        assert await change(session, old) == 0
        assert await session.fetch("read_tasks", [old[0]]) == before
        assert await change(session, new) == 1
