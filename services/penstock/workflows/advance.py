"""Advances workflows: applies the events of settled steps, starts successors, carries out failure policies.

Settling a task only adds an event. All effects of a workflow's events happen in one transaction, with its row locked,
so a kill at any point loses and repeats nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.db.session import Session, columns_of
from penstock.payloads.codec import aad_of, payload_aad
from penstock.protocol import trace_context
from penstock.protocol.answers import StepKind, WorkflowState
from penstock.protocol.errors import PayloadLost, RpcError
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.protocol.task import NewTask, State
from penstock.runtime import metrics
from penstock.runtime.logs import log
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import settle
from penstock.tasks.enqueue import reference_objects
from penstock.workflows import model
from penstock.workflows.definition import fallback_of, policy_of, read_children, step_task
from penstock.workflows.model import ChildParams, NewStep, StepOptions
from penstock.workflows.step_inputs import StepInputs, compensation_payload, list_result, read_inputs, s3_in_transaction

EVENTS_AT_ONCE = 5000
CHILDREN_CHARS_AT_ONCE = 2**20  # of the children that they ask for, as JSON
NO_TASK = 0  # in an event: a step of the workflow waits to run again, and is cancelled if the workflow fails
_INPUTS_AT_ONCE = 100
_STEPS_AT_ONCE = 2000  # that are made, or stored by one statement: a process does other work in between
_INPUT_BYTES_AT_ONCE = 128 * 1024 * 1024  # at most, of payloads with the results of predecessors
_REASON_CHARS = 500
_WITHOUT_TASK = NewTask("", max_attempts=1)
_LIMIT_NAMED = "PENSTOCK_PAYLOAD_LIMIT_BYTES, or with a bucket PENSTOCK_PAYLOAD_MAX_BYTES"

StepRow = tuple[int, int, int | None, NewStep]
"""Workflow, number, number of the parent, step."""

_decode_options = msgspec.json.Decoder(StepOptions).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(slots=True)
class HeldWorkflow:
    """A locked workflow. undo: see ``fallback_of``. added: steps added in this run."""

    id: int
    tenant: str | None
    state: WorkflowState
    steps: int
    open: int
    undo: str | None
    compensated: bool
    reason: str | None
    added: int = 0
    to_stop: bool = False

    def add(self, steps: int) -> int:
        """Count new steps; returns the number of the first."""
        first = self.steps + self.added
        self.added += steps
        self.open += steps
        return first


@dataclass(slots=True)
class AdvanceSummary:
    """events: applied. started: tasks that may run now. delayed: or later. ended: workflows by final state."""

    events: int = 0
    started: int = 0
    delayed: bool = False
    ended: Counter[str] = field(default_factory=Counter)


class WorkflowRun:
    """Advances workflows inside one transaction; the caller has locked their rows."""

    def __init__(self, session: Session, rows: Iterable[Any], settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self.held = {row["id"]: HeldWorkflow(**dict(row) | {"state": WorkflowState(row["state"])}) for row in rows}
        self._tenants = {workflow.id: workflow.tenant for workflow in self.held.values()}
        self.summary = AdvanceSummary()
        self._refused = False
        self.starts = True  # False before all is cancelled: what steps would be given is not read

    async def advance(self) -> AdvanceSummary:
        """Apply all events and their effects."""
        ids = list(self.held)
        while True:
            events = await self._session.fetch("take_events", ids, EVENTS_AT_ONCE, CHILDREN_CHARS_AT_ONCE)
            if events:
                self.summary.events += len(events)
                await self._take(events)
            stopped = False
            for workflow in self.held.values():
                if workflow.to_stop:
                    workflow.to_stop = False
                    stopped |= await self._stop(workflow)
            refused, self._refused = self._refused, False
            asked = sum(len(event["children"] or "") for event in events)
            are_all = len(events) < EVENTS_AT_ONCE and asked < CHILDREN_CHARS_AT_ONCE
            if are_all and not (stopped or refused or await self._compensate()):
                break
        for workflow in self.held.values():
            if not workflow.open and not workflow.state.final:
                is_well = workflow.state == WorkflowState.RUNNING
                workflow.state = WorkflowState.SUCCESS if is_well else WorkflowState.FAILED
                self.summary.ended[workflow.state] += 1
        await self.write()
        return self.summary

    async def _take(self, events: Sequence[Any]) -> None:
        await self._session.plan_for(len(events))
        for event in events:
            if event["task_id"] == NO_TASK:
                workflow = self.held[event["workflow_id"]]
                workflow.to_stop |= workflow.state == WorkflowState.FAILING
        events = [event for event in events if event["task_id"] != NO_TASK]
        asking = [event for event in events if event["children"] is not None]
        reasons = await self._spawn(asking) if asking else {}
        states = {e["task_id"]: State.CRITICAL_ERROR if e["task_id"] in reasons else e["state"] for e in events}
        ids = {event["task_id"]: event["id"] for event in events}
        if cancelled := [task_id for task_id, state in states.items() if state == State.CANCELLED]:
            found = await self._session.fetch("read_results", cancelled)
            reasons |= {row["id"]: row["reason"] for row in found if row["reason"] is not None}
        settled = await self._session.fetch(
            "settle_steps", list(states), list(states.values()), list(ids.values()), [*map(reasons.get, states)]
        )
        await self._ended(settled)

    async def spawn_again(self, steps: Sequence[Any]) -> None:
        """Create the rejected children of restarting steps, whose tasks have succeeded and are not run again."""
        reasons = await self._make_children(steps, {step["task_id"]: step["refused"] for step in steps})
        ended = []
        for step in steps:
            reason = reasons.get(step["task_id"])
            ended.append((step, State.SUCCESS if reason is None else State.CRITICAL_ERROR, reason))
        await self._ended(await self._settle_nodes(ended))

    async def start(self, ready: Sequence[Any]) -> None:
        await self._ended(await self._start(ready))

    # Effects of ended steps

    async def _ended(self, steps: Sequence[Any]) -> None:
        while steps:
            await self._note_failures(steps)
            done = [step for step in steps if step["done"]]
            for step in done:
                self.held[step["workflow_id"]].open -= 1
            running = {workflow.id for workflow in self.held.values() if workflow.state == WorkflowState.RUNNING}
            on = [step for step in done if step["workflow_id"] in running or step["kind"] == StepKind.COMPENSATION]
            passed = [step for step in on if step["passed"]]
            ready = await self._session.fetch("release_successors", *_columns(passed)) if passed else []
            children = Counter(
                (step["workflow_id"], step["parent"])
                for step in done
                if step["parent"] is not None and step["kind"] != StepKind.COMPENSATION
            )
            parents: list[Any] = []
            if children:
                counted = [(*parent, count) for parent, count in children.items()]
                parents = await self._session.fetch("release_parents", *map(list, zip(*counted, strict=True)))
            steps = parents + await self._start(ready)

    async def _note_failures(self, steps: Sequence[Any]) -> None:
        has_begun = False
        for step in steps:
            workflow = self.held[step["workflow_id"]]
            policy: str = step["on_failure"]
            has_failed = step["state"] != State.SUCCESS and step["kind"] != StepKind.COMPENSATION
            if not has_failed or policy == "continue" or workflow.state.final:
                continue
            is_first = workflow.state == WorkflowState.RUNNING
            if is_first:
                workflow.state = WorkflowState.FAILING
                workflow.reason = f"step {step['name']} is {step['state']}"[:_REASON_CHARS]
                workflow.to_stop = has_begun = True
            # A step that was cancelled because the workflow failed is not a failure of its own.
            if workflow.undo is None and (is_first or step["state"] == State.CRITICAL_ERROR):
                workflow.undo = fallback_of(policy)
        if has_begun:
            await self.write()

    # Starting

    def _options(self, step: Any) -> StepOptions:
        """Raises PayloadUnavailable, PayloadLost."""
        text = step["options"]
        if text is None:
            return StepOptions()
        aad = aad_of("options", step["workflow_id"], step["number"])
        return _decode_options(self._session.codec.decode_inline(text, aad))

    async def _start(self, ready: Sequence[Any]) -> list[Any]:
        """Start steps by kind; returns those that end immediately."""
        if not self.starts:
            ready = [step for step in ready if step["kind"] == StepKind.JOIN]
        kinds = {kind: [step for step in ready if step["kind"] == kind] for kind in StepKind}
        tasks = kinds[StepKind.TASK]
        plain = [step for step in tasks if step["results_as"] is None and step["errors_as"] is None]
        await self._start_tasks({step["task_id"]: (step, None) for step in plain})
        taking = [step for step in tasks if step["results_as"] is not None or step["errors_as"] is not None]
        at_once = max(1, min(_INPUTS_AT_ONCE, _INPUT_BYTES_AT_ONCE // self._settings.largest_payload_bytes))
        for start in range(0, len(taking), at_once):
            await self._start_with_inputs(taking[start : start + at_once])
        for step in kinds[StepKind.COMPENSATION]:
            undone = await compensation_payload(self._session, step)
            await self._start_if_fit([(step, *undone)], "the payload and the result to be undone are")
        ended = [await self._expand(step) for step in kinds[StepKind.MAP]]
        ended += [(step, State.SUCCESS, None) for step in kinds[StepKind.JOIN]]
        return await self._settle_nodes(ended)

    async def _settle_nodes(self, ended: Sequence[tuple[Any, State, str | None]]) -> list[Any]:
        if not ended:
            return []
        steps, states, reasons = zip(*ended, strict=True)
        return await self._session.fetch("settle_nodes", *_columns(steps), list(states), list(reasons))

    async def _start_tasks(self, steps: dict[int, tuple[Any, str | None]]) -> None:
        """steps: by task, the step and its changed payload, if any."""
        if not steps:
            return
        if self._session.codec.is_on:
            large = [task_id for task_id, (_, text) in steps.items() if text and self._session.codec.is_large(text)]
            found = await self._session.fetch("find_queues", large) if large else []
            queues = {row["id"]: row["queue"] for row in found}  # without those of the outbound queue
            for task_id, (step, text) in steps.items():
                if text is not None:
                    aad = payload_aad(step["action"], self._tenants[step["workflow_id"]])
                    # PayloadUnavailable is raised through: the transaction is repeated later.
                    async with s3_in_transaction():
                        kept = await self._session.codec.store(text, aad, queue=queues.get(task_id))
                    await reference_objects(self._session, [(kept, task_id)])
                    steps[task_id] = (step, kept)
        options = [self._options(step) for step, _ in steps.values()]
        given = columns_of(options, "ordering_key", "delay", "expires_in")
        rows = await self._session.fetch("start_steps", list(steps), *given, [payload for _, payload in steps.values()])
        self.summary.started += len(rows)
        self.summary.delayed |= any(one.delay for one in options)
        for action, count in Counter(row["action"] for row in rows if row["state"] == State.SCHEDULED).items():
            metrics.TRANSITIONS.labels(action, State.SCHEDULED).inc(count)

    async def _start_with_inputs(self, steps: Sequence[Any]) -> None:
        """Start tasks with the results of their predecessors, or cancel them with the reason."""
        limit = self._settings.largest_payload_bytes
        inputs = await read_inputs(self._session, steps, limit_bytes=limit)
        found = await self._session.fetch("read_payloads", [step["task_id"] for step in steps])
        actions = {step["task_id"]: step["action"] for step in steps}
        payloads: dict[int, str] = {}
        lost: dict[int, str] = {}
        async with s3_in_transaction():
            for row in found:
                try:
                    aad = payload_aad(actions[row["id"]], row["tenant"])
                    payloads[row["id"]] = await self._session.codec.load(row["payload"], aad)
                except PayloadLost as exc:
                    payloads[row["id"]], lost[row["id"]] = "{}", f"its payload cannot be had: {exc}"
        merged: list[tuple[Any, str | None, str | None]] = []
        for step, given in zip(steps, inputs, strict=True):
            task_id: int = step["task_id"]
            if task_id in payloads:  # or it was just cancelled
                problem = given.problem or lost.get(task_id)
                merged.append((step, None if problem else _merged(payloads[task_id], step, given), problem))
        await self._start_if_fit(merged, "its payload with the results of its predecessors is")

    async def _start_if_fit(self, given: Iterable[tuple[Any, str | None, str | None]], what: str) -> None:
        """Start tasks with changed payloads, or cancel them with the reason. what: is too large."""
        startable: dict[int, tuple[Any, str | None]] = {}
        for step, payload, problem in given:
            size, limit = utf8_size(payload or ""), self._settings.largest_payload_bytes
            if size > limit:
                problem = f"{what} {size} bytes; the limit is {limit} ({_LIMIT_NAMED})"
            if problem is None:
                startable[step["task_id"]] = (step, payload)
                continue
            self._refused = True
            log.warning("step_refused", workflow=step["workflow_id"], step=step["name"], reason=problem)
            await settle.cancel(self._session, [step["task_id"]], problem[:_REASON_CHARS])
        await self._start_tasks(startable)

    # Children

    async def _expand(self, step: Any) -> tuple[Any, State, str | None]:
        """Create a child for each item of a list; returns the step, its final state and the reason."""
        try:
            options = self._options(step)
        except PayloadLost as exc:
            return step, State.CRITICAL_ERROR, f"what it keeps for its children cannot be had: {exc}"[:_REASON_CHARS]
        template, items, problem = options.template, options.items, None
        assert template is not None
        if items is None:
            limit = self._settings.largest_result_bytes
            items, problem = await list_result(self._session, step, options.over or 0, limit_bytes=limit)
        if items is None:
            return step, State.CRITICAL_ERROR, problem
        if problem := model.children_problem(template.payload, items):
            return step, State.CRITICAL_ERROR, f"the list {problem}"
        try:
            members, name = _decode_members(bytes(template.payload)), options.item_as or "item"
            made = []
            for place, item in enumerate(items):
                if not place % _STEPS_AT_ONCE:
                    await asyncio.sleep(0)
                payload = msgspec.Raw(msgspec.json.encode(members | {name: item}))
                child = msgspec.structs.replace(template, payload=payload)
                made.append((child, step_task(child, self._settings)))
        except RpcError as exc:
            return step, State.CRITICAL_ERROR, exc.message[:_REASON_CHARS]
        await self._add_children([(step, made)], as_step=True)
        return step, State.SUCCESS, None

    async def _spawn(self, events: Sequence[Any]) -> dict[int, str]:
        """Create the children that accepted results request; returns the reasons for those that are rejected, by task.

        They were checked when the result was accepted, so a rejection means that two processes have different settings.
        Rejected requests are stored with the step, for a retry of its workflow.
        """
        asked = {event["task_id"]: event["children"] for event in events}
        reasons = await self._make_children(await self._session.fetch("find_steps", list(asked)), asked)
        for task_id in reasons:
            kept = msgspec.json.encode(StepOptions(refused=asked[task_id])).decode()
            await self._session.fetch("keep_refused_children", task_id, kept)
        return reasons

    async def _make_children(self, steps: Sequence[Any], asked: Mapping[int, str | None]) -> dict[int, str]:
        made = []
        reasons: dict[int, str] = {}
        for step in steps:
            task_id: int = step["task_id"]
            try:
                text = self._session.codec.decode_inline(asked[task_id] or "[]", aad_of("spawn", task_id))
                made.append((step, read_children(text, self._settings)))
            except (RpcError, PayloadLost) as exc:
                reasons[task_id] = f"its children were refused: {exc}"[:_REASON_CHARS]
                log.error("children_refused", workflow=step["workflow_id"], step=step["name"], reason=str(exc))
        await self._add_children(made, as_step=False)
        return reasons

    async def _add_children(
        self, made: Sequence[tuple[Any, Sequence[tuple[ChildParams, NewTask]]]], *, as_step: bool
    ) -> None:
        """Add children and start them. as_step: with the failure policy of their parent; otherwise each has its own."""
        rows: list[StepRow] = []
        parents: list[tuple[int, int, int]] = []
        for parent, children in made:
            if not children:
                continue
            workflow = self.held[parent["workflow_id"]]
            first = workflow.add(len(children))
            for place, (child, task) in enumerate(children):
                if not place % _STEPS_AT_ONCE:
                    await asyncio.sleep(0)
                name = f"{parent['name']}/{place if child.name is None else child.name}"
                policy, undo = (parent["on_failure"], parent["undo"]) if as_step else policy_of(child)
                options = StepOptions(task.ordering_key, task.delay_seconds, task.expires_in_seconds)
                step = NewStep(name, StepKind.TASK, task.action, task, (), policy, undo, options=options)
                rows.append((workflow.id, first + place, parent["number"], step))
            workflow.to_stop |= workflow.state != WorkflowState.RUNNING  # which cancels them at once
            parents.append((workflow.id, parent["number"], len(children)))
        if rows:
            await self._session.fetch("add_children", *map(list, zip(*parents, strict=True)))
            running = {workflow.id for workflow in self.held.values() if workflow.state == WorkflowState.RUNNING}
            self.summary.started += await insert_steps(self._session, rows, tenants=self._tenants, start=running)
            for workflow_id in running & {row[0] for row in rows}:
                first = min(number for workflow, number, _, _ in rows if workflow == workflow_id)
                await self._start(await self._session.fetch("find_ready", workflow_id, first))

    # Failing

    async def _stop(self, workflow: HeldWorkflow) -> bool:
        """Cancel unstarted steps, or all of a cancelled workflow; returns whether there were any."""
        everything = workflow.state == WorkflowState.CANCELLED
        await self._session.plan_for(workflow.open)
        ids = [row["id"] for row in await self._session.fetch("hold_unstarted_steps", workflow.id, everything)]
        why = workflow.reason if everything else f"workflow {workflow.id} has failed: {workflow.reason}"
        reason = (why or f"workflow {workflow.id} was cancelled")[:_REASON_CHARS]
        if ids:
            await settle.cancel(self._session, ids, reason)
        nodes = await self._session.fetch("cancel_nodes", workflow.id, reason)
        await self._ended(nodes)
        return bool(ids or nodes)

    async def _compensate(self) -> bool:
        """Add compensations to failing workflows whose steps have ended; returns whether there were any."""
        begun = False
        for workflow in self.held.values():
            is_over = workflow.state == WorkflowState.FAILING and not workflow.open
            if not is_over or workflow.undo is None or workflow.compensated:
                continue
            found = await self._session.fetch("find_undoable", workflow.id, workflow.undo)
            if not found:
                continue
            workflow.compensated = True
            first = workflow.add(len(found))
            rows: list[StepRow] = []
            for place, row in enumerate(found):
                task = NewTask(row["undo"], max_attempts=self._settings.max_attempts)
                after = [first + place - 1] if place else []
                step = NewStep(f"{row['name']}/undo", StepKind.COMPENSATION, task.action, task, after, "continue")
                rows.append((workflow.id, first + place, row["number"], step))
            await self._session.plan_for(len(rows))
            await insert_steps(self._session, rows, tenants=self._tenants, start=())
            await self._start(await self._session.fetch("find_ready", workflow.id, first))
            begun = True
            log.info("workflow_compensates", workflow=workflow.id, steps=len(rows))
        return begun

    # The workflows themselves

    async def write(self) -> None:
        """Store the workflows."""
        names = "id", "state", "added", "open", "undo", "compensated", "reason"
        await self._session.fetch("update_workflows", *columns_of(self.held.values(), *names))
        for workflow in self.held.values():
            workflow.steps += workflow.added
            workflow.added = 0


async def insert_steps(
    session: Session, rows: Sequence[StepRow], *, tenants: Mapping[int, str | None], start: Iterable[int]
) -> int:
    """Add steps; returns how many start at once.

    tenants: of their workflows. start: workflows whose steps start at once if nothing has to be looked up; the caller
    starts the others.
    """
    await session.plan_for(len(rows))
    starting, started = set(start), 0
    is_traced = active.active() is not None
    here = trace_context.current() if is_traced else None
    for first in range(0, len(rows), _STEPS_AT_ONCE):
        columns: list[tuple[Any, ...]] = []
        for workflow, number, parent, step in rows[first : first + _STEPS_AT_ONCE]:
            task, payload, options = step.task or _WITHOUT_TASK, None, None
            if step.task is not None:
                payload = session.codec.encode(task.payload, payload_aad(task.action, tenants[workflow]))
            if step.options != StepOptions():
                options = msgspec.json.encode(step.options).decode()
                if step.options.template is not None:  # it holds payloads
                    options = session.codec.encode(options, aad_of("options", workflow, number))
            at_once = workflow in starting and step.kind == StepKind.TASK and not step.after and options is None
            started += at_once
            columns.append((
                workflow, number, step.name, step.kind, step.action, parent, "{" + ",".join(map(str, step.after)) + "}",
                len(step.after), State.SCHEDULED if at_once else State.WAITING, step.on_failure, step.undo,
                step.results_as, step.errors_as, options, payload, task.run_at, task.priority, task.max_attempts,
                task.timeout_seconds, task.labels, task.expires_at, task.limit_key, task.trace or (here and here.text),
            ))  # fmt: skip
        await session.fetch("insert_steps", *map(list, zip(*columns, strict=True)), is_traced)
    for action, count in Counter(step.task.action for _, _, _, step in rows if step.task is not None).items():
        metrics.ENQUEUED.labels(action, "workflow").inc(count)
    return started


def _merged(payload: str, step: Any, inputs: StepInputs) -> str:
    """The payload with the inputs of the step, which replace those of an earlier run."""
    members = _decode_members(payload)
    for name, text in ((step["results_as"], inputs.results), (step["errors_as"], inputs.errors)):
        if name is not None:
            members[name] = msgspec.Raw(text.encode())
    return escape_for_sqs(msgspec.json.encode(members).decode())


def _columns(steps: Sequence[Any]) -> tuple[list[int], list[int]]:
    return [step["workflow_id"] for step in steps], [step["number"] for step in steps]
