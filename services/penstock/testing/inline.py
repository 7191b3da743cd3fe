"""Tasks without infrastructure: recorded in memory, and run by the real worker over queues in memory."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace as changed

from penstock.methods.inbound import refusal_of
from penstock.methods.table import read_command
from penstock.protocol import answers, errors, reports
from penstock.protocol.answers import Answered
from penstock.protocol.checks import read_instant
from penstock.protocol.journal import Entry, StepKey, journal_text
from penstock.protocol.output import OutputEntry, decode_entries
from penstock.protocol.record import view_of
from penstock.protocol.requests import Invalid, Request, decode_body
from penstock.protocol.task import Claimed, NewTask, State
from penstock.protocol.tenant import stored_key
from penstock.protocol.views import raw, timestamp
from penstock.results.apply import bad_children, delay_after, hold_of, interrupted, postponement
from penstock.results.methods import KEPT, AnswerWait, answer_again
from penstock.results.spawn import read_spawner
from penstock.results.waits import Ended, read_answer, timed_out, token_taken
from penstock.scheduler.sending import message_of
from penstock.settings.model import load_settings
from penstock.tasks import params, views
from penstock.tasks.settle import PutOff
from penstock.testing.clock import Clock
from penstock.testing.faults import ALONE, ONE_AT_A_TIME, Faults, matches, run_worker
from penstock.testing.queue import MemoryQueue
from penstock.worker.handlers.actions import REGISTRY, Registry


class _Step(NamedTuple):
    """A finished durable step. claim: whose attempt ran it."""

    entry: Entry
    claim: int
    recorded_at: datetime


@dataclass(eq=False)
class InlineTask:
    """A task that was enqueued. new: as it was asked for, checked. due_at: of the next attempt.

    claimed_at: when the last attempt began. failures: its failed attempts. result_text: JSON. token: what it waits for,
    until ``wait_until``. steps: its finished durable steps. has_journal: it has some, or its worker died before one.
    is_suspect: its worker died again. snoozes: how often its handler put it off. output: what its handler logged and
    emitted, in all attempts.
    """

    id: int
    new: NewTask
    created_at: datetime
    due_at: datetime
    state: State = State.SCHEDULED
    attempts: int = 0
    claim: int = 0
    claimed_at: datetime | None = None
    failures: list[answers.Failure] = field(default_factory=list)
    result_text: str = "null"
    progress: Any = None
    reason: str | None = None
    token: str | None = None
    wait_until: datetime | None = None
    policy: reports.WaitPolicy = field(default_factory=reports.WaitPolicy)
    steps: dict[StepKey, _Step] = field(default_factory=dict)
    has_journal: bool = False
    is_suspect: bool = False
    snoozes: int = 0
    output: list[OutputEntry] = field(default_factory=list)

    @property
    def action(self) -> str:
        return self.new.action

    @property
    def payload(self) -> Any:
        return json.loads(self.new.payload)

    @property
    def result(self) -> Any:
        return json.loads(self.result_text)

    @property
    def errors(self) -> list[Any]:
        """The error objects of its failed attempts."""
        return [failure.error for failure in self.failures]

    @property
    def error(self) -> Any:
        """The error object of the last failed attempt; None after a success."""
        return self.errors[-1] if self.errors and self.state is not State.SUCCESS else None

    @property
    def logs(self) -> list[str]:
        """The lines that its handler logged, and printed if the action has ``output="prints"``."""
        return [entry.text for entry in self.output if entry.text is not None]

    @property
    def chunks(self) -> list[Any]:
        """What its handler gave to `ctx.emit`."""
        return [json.loads(bytes(entry.chunk)) for entry in self.output if entry.is_chunk]

    @property
    def is_pending(self) -> bool:
        """Whether it is neither running, nor waiting for an event, nor settled."""
        return self.state in (State.SCHEDULED, State.ERROR) or self.is_behind

    @property
    def is_behind(self) -> bool:
        """Whether it waits behind another task of its ordering key."""
        return self.state is State.WAITING and self.token is None

    def give_back(self, due_at: datetime) -> None:
        """Back to the state that the claim came from, without spending the attempt."""
        self.attempts -= 1
        self.state, self.due_at = State.ERROR if self.attempts else State.SCHEDULED, due_at


@dataclass(slots=True)
class _Token:
    """task: that waits for it, or waited last. early: an answer that is kept until one waits. digest: of its answer."""

    task: InlineTask | None = None
    early: AnswerWait | None = None
    digest: bytes | None = None


class Inline:
    """What the fixture `penstock_inline` gives: the tasks, the clock, and failures to plan. registry: the handlers."""

    def __init__(self, registry: Registry = REGISTRY) -> None:
        self.clock = Clock()
        self.faults = Faults()
        self.fail = self.faults.fail
        self.crash = self.faults.crash
        self._registry = registry
        self._settings = load_settings(**ALONE)
        self._tasks: dict[int, InlineTask] = {}
        self._tokens: dict[str, _Token] = {}
        self._heads: dict[str, int] = {}  # by ordering key, the task whose turn it is
        self._outbound = MemoryQueue("outbound", self.clock.seconds, limits=ONE_AT_A_TIME)
        self._results = MemoryQueue("results", self.clock.seconds)
        self._held: dict[tuple[str, str | None], datetime] = {}  # by action and limit key, until when
        self._lock = threading.RLock()

    @property
    def tasks(self) -> list[InlineTask]:
        """All tasks, oldest first."""
        return list(self._tasks.values())

    def enqueued(self, action: str | None = None, payload: Any = None) -> list[InlineTask]:
        """Tasks that were enqueued, of this action and payload. payload: an object matches by the given members."""
        return [one for one in self.tasks if action in (None, one.action) and matches(one.payload, payload)]

    # Running

    async def drain(self, *, retries: bool = True) -> list[InlineTask]:
        """Run tasks until none is due; returns those that ran.

        retries: the clock moves on to the next attempt of a failed task, as often as it has attempts left. Delays and
        waits end by `clock.advance` alone. Raises LookupError for an action without a handler.
        """
        ran: dict[int, InlineTask] = {}
        while True:
            with self._changing():
                self._end_overdue()
            with self._lock:
                claimed = self._claim()
            ran |= {task.id: task for task in claimed}
            if claimed or self._outbound.messages:
                await run_worker(self._outbound, self._results, self._settings, self._registry, self.faults)
                with self._changing():
                    self._record()
                continue
            failed = [one for one in self.tasks if one.state is State.ERROR and one.failures[-1].claim == one.claim]
            again = [max(one.due_at, self._held_until(one)) for one in failed]  # not those that sleep or were put off
            later = [instant for instant in again if instant > self.clock.now()]  # else it waits for something else
            if not (later and retries):
                return list(ran.values())
            self.clock.advance_to(min(later))

    def drain_sync(self, *, retries: bool = True) -> list[InlineTask]:
        """As `drain`, in a test that is no coroutine."""
        return asyncio.run(self.drain(retries=retries))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """While tasks change; those whose turn it is then are promoted, the oldest of each ordering key."""
        with self._lock:
            yield
            for key, task_id in list(self._heads.items()):
                state, holds = self._tasks[task_id].state, self._settings.holds_ordering_keys
                if state.final and not (holds and state is State.CRITICAL_ERROR):
                    del self._heads[key]
            for task in self.tasks:
                if task.is_behind:
                    task.state = self._turn(task)

    def _turn(self, task: InlineTask) -> State:
        """SCHEDULED, or WAITING behind a task of its ordering key."""
        if task.new.ordering_key is None:
            return State.SCHEDULED
        head = self._heads.setdefault(stored_key(task.new.tenant, task.new.ordering_key), task.id)
        return State.SCHEDULED if head == task.id else State.WAITING

    def _claim(self) -> list[InlineTask]:
        """Send what is due, by priority."""
        now = self.clock.now()
        ready = [task for task in self.tasks if task.is_pending and not task.is_behind]
        due = [task for task in ready if max(task.due_at, self._held_until(task)) <= now]
        for task in due:
            if task.action not in self._registry:
                raise LookupError(f"no handler of action {task.action!r} is registered: import its module in the test")
        calls: dict[Any, list[InlineTask]] = {}  # tasks of one message: those that a batched handler takes together
        for task in sorted(due, key=lambda task: (-task.new.priority, task.due_at, task.id)):
            handler = self._registry[task.action]
            task.state, task.attempts, task.claim = State.ACQUIRED, task.attempts + 1, task.claim + 1
            task.claimed_at = now
            calls.setdefault((task.action, task.new.timeout_seconds) if handler.batch else task.id, []).append(task)
        for tasks in calls.values():
            self._outbound.put(message_of([_claimed(task) for task in tasks]).message)
        return due

    def _held_until(self, task: InlineTask) -> datetime:
        """Until when a RateLimited holds its action or limit key."""
        return max(self._held.get((task.action, one), task.due_at) for one in (None, task.new.limit_key))

    def _record(self) -> None:
        """Apply what the worker reported, and fail what workers do not survive."""
        for stored in self._results.take(list(self._results.messages), 0):
            for report in reports.decode_reports(stored.body, batch_limit=len(stored.body)):
                if isinstance(report, reports.Stepped):
                    self._note_steps(report.task_id, report.claim, (report.entry,))
                elif isinstance(report, reports.Output):
                    self._tasks[report.task_id].output += decode_entries(report.entries)
                elif isinstance(report, reports.SharedResult):
                    for one in report.each():
                        self._apply(one)
                elif not isinstance(report, reports.RunTimes | reports.Announced | reports.Unreadable):
                    self._apply(report)
        self._results.messages.clear()
        for dead in self._outbound.dead:
            for entry in decode_body(dead.sent.body, batch_limit=len(dead.sent.body)).entries:
                assert isinstance(entry, Request)
                task_id, claim = map(int, json.loads(bytes(entry.id)).split(":"))
                error = reports.error_text(errors.HANDLER_ERROR, "its worker died each time it ran", type="StaleTask")
                self._apply(reports.Failed(task_id, claim, None, error, reports.NO_HINTS))
        self._outbound.dead.clear()

    def _note_steps(self, task_id: int, claim: int, entries: Sequence[Entry]) -> None:
        """Keep what has finished; of a step that ran twice, that of the newest claim."""
        task = self._tasks[task_id]
        task.has_journal |= bool(entries)
        for entry in entries:
            if entry.key not in task.steps or task.steps[entry.key].claim < claim:
                task.steps[entry.key] = _Step(entry, claim, self.clock.now())

    def _apply(self, report: reports.Outcome | reports.Progress) -> None:
        task = self._tasks[report.task_id]
        if not isinstance(report, reports.Progress):
            self._note_steps(task.id, report.claim or 0, report.steps)
        if report.claim != task.claim or task.state is not State.ACQUIRED:
            return  # of an attempt that is over
        if isinstance(report, reports.Progress):
            task.progress = json.loads(report.detail or "null")
        elif isinstance(report, reports.Waiting):
            self._wait(task, report)
        elif isinstance(report, reports.Failed):
            self._fail(task, report)
        elif isinstance(report, reports.Suspended):
            self._suspend(task, report)
        else:
            try:
                spawner = read_spawner(report.spawn or "[]", self._settings)
            except errors.RpcError as exc:
                self._fail(task, bad_children(report, exc))
                return
            for new in spawner.tasks_of(task.new.tenant):
                self._insert(new)
            task.state, task.result_text = State.SUCCESS, report.result

    def _suspend(self, task: InlineTask, report: reports.Suspended) -> None:
        """As of production, but the next attempt need not wait: what the dead worker reported is recorded."""
        if report.is_redelivered and not any(step.claim == task.claim for step in task.steps.values()):
            if task.is_suspect:
                self._fail(task, interrupted(report, self._settings.visibility_timeout_seconds))
                return
            task.is_suspect = task.has_journal
        task.has_journal |= report.is_redelivered
        task.give_back(report.until or self.clock.now() + timedelta(seconds=report.seconds))

    def _fail(self, task: InlineTask, report: reports.Failed) -> None:
        error, hints = report.error, report.hints
        hold = hold_of(report)
        if hold is not None:
            key = None if hold.whole else hold.key or task.new.limit_key
            if hold.whole or key is not None:
                until = self.clock.now() + timedelta(seconds=hold.seconds)
                self._held[task.action, key] = max(until, self._held.get((task.action, key), until))
        if hints.spends_none:
            put_off = postponement(hints, PutOff(task.snoozes), self._settings)
            if not isinstance(put_off, str):
                task.snoozes += hints.snooze
                task.give_back(self.clock.now() + timedelta(seconds=put_off[0]))
                return
            error = reports.error_text(errors.HANDLER_ERROR, put_off, type="PutOffTooOften")
            hints = reports.Hints(final=True)
        at = timestamp(self.clock.now())
        task.failures.append(
            answers.Failure(attempt=task.attempts, claim=task.claim, at=at, error=json.loads(error), worker=None)
        )
        delay = delay_after(task.attempts, task.new.max_attempts, hints, self._settings.backoff)
        if delay is None:
            task.state = State.CRITICAL_ERROR
        else:
            task.state, task.due_at = State.ERROR, self.clock.now() + timedelta(seconds=delay)

    def _wait(self, task: InlineTask, wait: reports.Waiting) -> None:
        name = reports.stored_token(wait.token, task.new.tenant)
        token = self._tokens.setdefault(name, _Token())
        if token.task is not None and token.task.token == name:
            self._fail(task, token_taken((task.id, task.claim), wait.policy, token.task.id))
            return
        seconds = self._settings.wait_timeout_seconds if wait.timeout is None else wait.timeout
        task.state, task.token, task.policy = State.WAITING, name, wait.policy
        task.wait_until = self.clock.now() + timedelta(seconds=seconds)
        early, token.task, token.early, token.digest = token.early, task, None, None
        if early is not None:
            self._resume(task, token, early)

    def _resume(self, task: InlineTask, token: _Token, answer: AnswerWait) -> None:
        token.digest = answer.digest
        self._end_wait(task, read_answer(answer.answer, (task.id, task.claim), task.policy))

    def _end_wait(self, task: InlineTask, outcome: Ended) -> None:
        task.state, task.token = State.ACQUIRED, None
        self._apply(outcome)

    def _end_overdue(self) -> None:
        """Waits that have timed out, and tasks that have expired."""
        now = self.clock.now()
        for task in self.tasks:
            if task.token is not None and task.wait_until is not None and task.wait_until <= now:
                self._end_wait(task, timed_out((task.id, task.claim), task.policy))
            expires = task.new.expires_at
            if expires is not None and expires <= now and task.is_pending and not task.steps:
                task.state, task.reason = State.CANCELLED, "expired"

    # Enqueueing

    def _insert(self, new: NewTask) -> answers.Accepted:
        now = self.clock.now()
        if new.expires_in_seconds is not None:
            new = changed(new, expires_at=now + timedelta(seconds=new.expires_in_seconds))
        due_at = new.run_at or now + timedelta(seconds=new.delay_seconds or 0)
        holder = self._holder(new, now)
        replaces = new.on_duplicate == "replace"
        if holder is None:
            task = self._tasks[len(self._tasks) + 1] = InlineTask(len(self._tasks) + 1, new, now, due_at)
            task.state = self._turn(task)
            return view_of(answers.Accepted, vars(task), duplicate=False, replaced=False if replaces else None)
        if not replaces:
            return answers.Accepted(id=holder.id, state=holder.state, duplicate=True)
        takes = holder.is_pending and not holder.has_journal  # finished steps belong to the payload that they ran with
        if takes:
            expiry = holder.new.expires_at
            kept = expiry if expiry is not None and expiry > now else None
            holder.new = changed(holder.new, payload=new.payload, expires_at=new.expires_at or kept)
            if new.replaces_priority:
                holder.new = changed(holder.new, priority=new.priority)
            if new.run_at is not None or new.delay_seconds is not None:
                holder.due_at = due_at
        return answers.Accepted(id=holder.id, state=holder.state, duplicate=True, replaced=takes)

    def _holder(self, new: NewTask, now: datetime) -> InlineTask | None:
        """The task that keeps its unique key from a new one."""
        task = self._last_with_key(new)
        if task is None or new.unique == "retained" or (new.unique == "live" and not task.state.final):
            return task
        age = (now - task.created_at).total_seconds()
        return task if isinstance(new.unique, float | int) and age < new.unique else None

    def _last_with_key(self, new: NewTask) -> InlineTask | None:
        """The task that took its unique key last."""
        if new.unique_key is None:
            return None
        key, others = (new.tenant, new.action, new.unique_key), reversed(self.tasks)
        return next((one for one in others if (one.new.tenant, one.action, one.new.unique_key) == key), None)

    # In the place of the api, the database's function and the inbound queue

    def answer(self, body: str) -> Any:
        asked = decode_body(body, batch_limit=len(body))
        answers = [self._respond(entry) for entry in asked.entries]
        return answers if asked.is_batch else answers[0]

    def ask(self, verb: str, arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._changing():
            if verb == "settle":
                return [(self._settle(*arguments[:2]),)]
            rows = []
            for entry in msgspec.json.decode(arguments[0], type=list[dict[str, msgspec.Raw]]):
                asked = {name: one for name, one in entry.items() if name not in ("traceparent", "tracestate")}
                told = self._insert(read_command("enqueue", msgspec.json.encode(asked), self._settings))
                rows.append((told.id, str(told.state), told.duplicate, told.replaced))
            return rows

    def _settle(self, claim_id: str, result: str) -> bool:
        report = reports.decode_report(reports.encode_result(claim_id, result))
        assert isinstance(report, reports.Succeeded)
        task = self._tasks[report.task_id]
        holds = task.claim == report.claim and task.state is State.ACQUIRED
        if holds:
            self._apply(report)
        return holds

    def send(self, bodies: Sequence[str]) -> None:
        for body in bodies:
            answers = self.answer(body)
            for answer in answers if isinstance(answers, list) else [answers]:
                if "error" in answer:
                    raise ValueError(f"the submitter would reject this request: {answer['error']['message']}")

    def _respond(self, entry: Request | Invalid) -> dict[str, Any]:
        try:
            if isinstance(entry, Invalid):
                raise entry.error
            with self._changing():
                result = self._carry_out(entry)
            member = {"result": msgspec.json.decode(msgspec.json.encode(result))}
        except errors.RpcError as exc:
            member = {"error": {"code": exc.code, "message": exc.message, "data": exc.data}}
        return {"jsonrpc": "2.0", "id": json.loads(bytes(entry.id) or b"null"), **member}

    def _carry_out(self, request: Request) -> Any:
        """Raises RpcError."""
        command = read_command(request.method, request.params, self._settings)
        carry_out: dict[type, Callable[[Any], Any]] = {
            NewTask: self._enqueue, params.StatusParams: self._show, params.ResultParams: self._await,
            AnswerWait: self._answer_wait, params.CancelParams: self._cancel, params.RetryParams: self._retry,
            params.RescheduleParams: self._reschedule,
        }  # fmt: skip
        if type(command) not in carry_out:
            raise errors.MethodNotFound(f"penstock_inline has no {request.method}: use the fixture penstock_pipeline")
        return carry_out[type(command)](command)

    def _enqueue(self, new: NewTask) -> answers.Accepted:
        enqueued = self._insert(new)
        if (refusal := refusal_of(new, enqueued)) is not None:
            raise refusal
        return enqueued

    def _find(self, task_id: int) -> InlineTask:
        if task_id not in self._tasks:
            raise errors.TaskNotFound(task_id)
        return self._tasks[task_id]

    def _show(self, command: params.StatusParams) -> Any:
        shown = views.task_detail if command.detail else views.task
        if command.ids is None:
            return shown(_row(self._find(command.task_ids[0])))
        return [None if task is None else shown(_row(task)) for task in map(self._tasks.get, command.task_ids)]

    def _await(self, command: params.ResultParams) -> Any:
        found = [self._find(one) for one in command.task_ids]
        pending = [task for task in found if not task.state.final]
        if pending and not (command.wait == "any" and len(pending) < len(found)):
            # A test that waited here would wait for ever.
            raise AssertionError(f"task {pending[0].id} is {pending[0].state}, not settled: drain() first")
        told = [views.outcome(_row(task)) for task in found if task.state.final]
        return told[0] if command.ids is None else told

    def _answer_wait(self, command: AnswerWait) -> Answered:
        name, made_for = reports.stored_token(command.token, command.tenant), reports.claim_of_token(command.token)
        token = self._tokens.get(name) or _Token()
        task = token.task
        if task is not None and task.token == name:
            self._resume(task, token, command)
            return Answered(id=task.id, state=task.state, kept=False, duplicate=False)
        if name in self._tokens:
            waited = None if task is None else (task.id, task.state)
            told = answer_again(command, token.digest, waited)
            if told.duplicate:
                return told
        elif made_for is not None:
            task = self._find(made_for.task_id)
            if (task.claim, task.state) != (made_for.claim, State.ACQUIRED):
                raise errors.StateConflict(task.id, task.state, "answered by a token of that attempt")
        self._tokens[name] = _Token(None, command, command.digest)
        return KEPT

    def _cancel(self, command: params.CancelParams) -> answers.Changed:
        task = self._find(int(command.id))
        if task.state.final:
            raise errors.StateConflict(task.id, task.state, "cancelled")
        task.state, task.reason, task.token = State.CANCELLED, command.reason, None
        return answers.Changed(id=task.id, state=task.state)

    def _retry(self, command: params.RetryParams) -> answers.Changed:
        task = self._find(int(command.id))
        if task.state not in (State.CRITICAL_ERROR, State.CANCELLED):
            raise errors.StateConflict(task.id, task.state, "retried")
        if (holder := self._last_with_key(task.new) or task) is not task:
            reason = f", as task {holder.id} now has its unique key"
            raise errors.StateConflict(task.id, task.state, "retried", reason, holder=holder.id)
        first = next((one.entry.position for one in task.steps.values() if one.entry.label == command.from_step), None)
        if command.from_step is not None and first is None:
            raise errors.InvalidParams("from_step", f"names no durable step of task {task.id}")
        task.state, task.attempts, task.due_at, task.reason = self._turn(task), 0, self.clock.now(), None
        task.snoozes, task.is_suspect = 0, False
        if task.new.expires_at is not None and task.new.expires_at <= self.clock.now():
            task.new = changed(task.new, expires_at=None)
        task.steps = {
            key: step
            for key, step in task.steps.items()
            if not step.entry.has_failed and (first is None or step.entry.position < first)
        }
        task.has_journal = bool(task.steps) or first is not None
        return answers.Changed(id=task.id, state=task.state)

    def _reschedule(self, command: params.RescheduleParams) -> answers.Changed:
        task = self._find(int(command.id))
        if not task.is_pending:
            raise errors.StateConflict(task.id, task.state, "rescheduled")
        if command.run_at is not None or command.delay is not None:
            task.due_at = read_instant(command.run_at) or self.clock.now() + timedelta(seconds=command.delay or 0)
        if command.priority is not None:
            task.new = changed(task.new, priority=command.priority)
        return answers.Changed(id=task.id, state=task.state)


def _claimed(task: InlineTask) -> Claimed:
    name, new = (task.id, task.claim, task.action), task.new
    steps = journal_text(step.entry for step in task.steps.values())
    return Claimed(*name, new.payload, new.timeout_seconds, 0.0, task.is_suspect, tenant=new.tenant, journal=steps)


def _row(task: InlineTask) -> dict[str, Any]:
    """As of the statement ``show_tasks``."""
    steps = sorted(task.steps.values(), key=lambda step: (step.entry.position, step.entry.key))
    return {
        **msgspec.structs.asdict(task.new), **vars(task), "run_at": task.due_at, "updated_at": task.created_at,
        "worker": None, "result": task.result_text, "error": json.dumps(task.error),
        "labels": task.new.labels or "{}", "timeout": task.new.timeout_seconds,
        "progress": json.dumps(task.progress), "failures": msgspec.json.encode(task.failures).decode(),
        "token": None if task.wait_until is None else task.token, "deadline": task.wait_until,
        "steps": [*map(_shown_step, steps)] or None, "is_cut": False, "result_gone": False, "payload_gone": False,
    }  # fmt: skip


def _shown_step(step: _Step) -> answers.FinishedStep:
    entry, text = step.entry, raw(step.entry.value)
    began_at = None if entry.at is None else datetime.fromtimestamp(entry.at, UTC)
    row = {**msgspec.structs.asdict(entry), **step._asdict(), "began_at": began_at, "worker": None, "unread": None}
    result, error = (None, text) if entry.has_failed else (text, None)
    return view_of(answers.FinishedStep, row, result=result, error=error)
