"""Moving workflows on: what has settled is noted, what may start is started, what has failed is dealt with.

Settling a task only adds an event. Here the events of a workflow are taken, with its row held, and all that follows
from them happens in the same transaction: successors start, children are made, policies are carried out, the workflow
ends. Nothing is known outside the database, so a kill at any point loses nothing and repeats nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.payloads.codec import options_aad, payload_aad, spawn_aad
from penstock.protocol import trace_context
from penstock.protocol.errors import PayloadLost, RpcError
from penstock.protocol.json_text import escape_for_sqs, utf8_size
from penstock.protocol.task import NewTask, State
from penstock.runtime import metrics
from penstock.runtime.logs import get_logger
from penstock.runtime.tracing import active
from penstock.settings.model import Settings
from penstock.tasks import settle
from penstock.tasks.objects import reference_objects
from penstock.workflows.commands import NewStep, StepOptions
from penstock.workflows.definition import read_children, step_task
from penstock.workflows.names import child_names
from penstock.workflows.params import MAX_CHILDREN, ChildParams, StepKind, WorkflowState
from penstock.workflows.step_inputs import Handover, hand_over, list_result, undo_payload
from penstock.workflows.steps import fallback_of, policy_of

EVENTS_AT_ONCE = 5000
NO_TASK = 0
"""In an event: a step of the workflow waits to be tried again, which is not to be where the workflow fails."""
_MANY = 50
_HANDED_OVER_AT_ONCE = 100
_REASON_CHARS = 500
_LIMIT_NAMED = "PENSTOCK_PAYLOAD_LIMIT_BYTES, or with a bucket PENSTOCK_PAYLOAD_MAX_BYTES"

log = get_logger()
_decode_options = msgspec.json.Decoder(StepOptions).decode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
Node = tuple[int, int]  # (workflow, number of the step)


@dataclass(slots=True)
class Flow:
    """A workflow that is held. ``undo``: None, or the action for steps that name none of their own, or empty."""

    id: int
    state: WorkflowState
    steps: int
    open: int
    undo: str | None
    compensated: bool
    reason: str | None
    added: int = 0
    to_stop: bool = False


@dataclass(slots=True)
class Advanced:
    """What a round did. started: tasks that may run now. ended: workflows by the state that they ended in."""

    events: int = 0
    started: int = 0
    ended: Counter[str] = field(default_factory=Counter)


class Mover:
    """Moves workflows on inside one transaction; their rows are held by the caller."""

    def __init__(self, session: Session, rows: Iterable[Any], settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self.flows = {row["id"]: Flow(**dict(row) | {"state": WorkflowState(row["state"])}) for row in rows}
        self.advanced = Advanced()
        self._refused = False

    async def advance(self) -> Advanced:
        """Take every event there is, and do all that follows from them."""
        ids = list(self.flows)
        while True:
            events = await self._session.fetch("take_events", ids, EVENTS_AT_ONCE)
            if events:
                self.advanced.events += len(events)
                await self._take(events)
            stopped = False
            for flow in self.flows.values():
                if flow.to_stop:
                    flow.to_stop = False
                    stopped |= await self._stop(flow)
            refused, self._refused = self._refused, False
            if len(events) < EVENTS_AT_ONCE and not (stopped or refused or await self._compensate()):
                break
        for flow in self.flows.values():
            if not flow.open and not flow.state.final:
                is_well = flow.state == WorkflowState.RUNNING
                flow.state = WorkflowState.SUCCESS if is_well else WorkflowState.FAILED
                self.advanced.ended[flow.state] += 1
        await self.write()
        return self.advanced

    async def _take(self, events: Sequence[Any]) -> None:
        await self._session.plan_for(len(events))
        for event in events:
            if event["task_id"] == NO_TASK:
                flow = self.flows[event["workflow_id"]]
                flow.to_stop |= flow.state == WorkflowState.FAILING
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

    def split_childless(self, steps: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of steps that begin again: those that failed only because their children were refused, and the others.

        The task of such a step has succeeded and is not run again.
        """
        split: tuple[list[Any], list[Any]] = [], []
        for step in steps:
            is_map = step["kind"] == StepKind.MAP
            split[is_map or self._options(step).refused is None].append(step)
        return split

    async def spawn_again(self, steps: Sequence[Any]) -> None:
        """Make the children that could not be made of what these steps asked for; see ``split_childless``."""
        if steps:
            asked = {step["task_id"]: self._options(step).refused for step in steps}
            reasons = await self._make_children(steps, asked)
            ends = [State.CRITICAL_ERROR if step["task_id"] in reasons else State.SUCCESS for step in steps]
            ended = [(step, end, reasons.get(step["task_id"])) for step, end in zip(steps, ends, strict=True)]
            await self._ended(await self._settle_nodes(ended))

    async def start(self, ready: Sequence[Any]) -> None:
        """Start steps whose turn has come; rows of ready steps."""
        nodes = await self._start(ready)
        await self._ended(nodes)

    # What follows from the end of steps

    async def _ended(self, steps: Sequence[Any]) -> None:
        """All that follows when these steps have ended, as far as it happens at once."""
        while steps:
            await self._note_failures(steps)
            done = [step for step in steps if step["done"]]
            for step in done:
                self.flows[step["workflow_id"]].open -= 1
            ready = await self._release(done)
            children = Counter(
                (step["workflow_id"], step["parent"])
                for step in done
                if step["parent"] is not None and step["kind"] != StepKind.COMPENSATION
            )
            steps = await self._release_parents(children) + await self._start(ready)

    async def _note_failures(self, steps: Sequence[Any]) -> None:
        """Carry out the policies of steps that have failed; a workflow that fails already goes on doing so."""
        changed = []
        for step in steps:
            flow = self.flows[step["workflow_id"]]
            policy: str = step["on_failure"]
            has_failed = step["state"] != State.SUCCESS and step["kind"] != StepKind.COMPENSATION
            if not has_failed or policy == "continue" or flow.state.final:
                continue
            is_first = flow.state == WorkflowState.RUNNING
            if is_first:
                flow.state = WorkflowState.FAILING
                flow.reason = f"step {step['name']} is {step['state']}"[:_REASON_CHARS]
                flow.to_stop = True
                changed.append(flow)
            # What was cancelled because the workflow failed did not fail itself.
            if flow.undo is None and (is_first or step["state"] == State.CRITICAL_ERROR):
                flow.undo = fallback_of(policy)
        if changed:
            await self.write(changed)

    async def _release(self, done: Sequence[Any]) -> Sequence[Any]:
        passed = [
            (step["workflow_id"], step["number"])
            for step in done
            if step["passed"]
            and (
                self.flows[step["workflow_id"]].state == WorkflowState.RUNNING or step["kind"] == StepKind.COMPENSATION
            )
        ]
        return await self._session.fetch("release_successors", *_columns(passed)) if passed else []

    async def _release_parents(self, children: Counter[Node]) -> list[Any]:
        if not children:
            return []
        return await self._session.fetch("release_parents", *_columns(children), list(children.values()))

    # Starting

    def _options(self, step: Any) -> StepOptions:
        """Raises PayloadUnavailable, PayloadLost."""
        text = step["options"]
        if text is None:
            return StepOptions()
        aad = options_aad(step["workflow_id"], step["number"])
        return _decode_options(self._session.codec.decode_inline(text, aad))

    async def _start(self, ready: Sequence[Any]) -> list[Any]:
        """Start steps, each after its kind; returns those that have ended thereby."""
        if not ready:
            return []
        kinds: dict[str, list[Any]] = {}
        for step in ready:
            kinds.setdefault(step["kind"], []).append(step)
        tasks = kinds.get(StepKind.TASK, [])
        plain = [step for step in tasks if step["results_as"] is None and step["errors_as"] is None]
        await self._start_tasks({step["task_id"]: (step, None) for step in plain})
        taking = [step for step in tasks if step["results_as"] is not None or step["errors_as"] is not None]
        for start in range(0, len(taking), _HANDED_OVER_AT_ONCE):
            await self._hand_over(taking[start : start + _HANDED_OVER_AT_ONCE])
        for step in kinds.get(StepKind.COMPENSATION, []):
            await self._start_compensation(step)
        ended = [await self._expand(step) for step in kinds.get(StepKind.MAP, [])]
        ended += [(step, State.SUCCESS, None) for step in kinds.get(StepKind.JOIN, [])]
        return await self._settle_nodes(ended)

    async def _settle_nodes(self, ended: Sequence[tuple[Any, State, str | None]]) -> list[Any]:
        if not ended:
            return []
        nodes = _columns((step["workflow_id"], step["number"]) for step, _, _ in ended)
        return await self._session.fetch("settle_nodes", *nodes, [s for _, s, _ in ended], [r for _, _, r in ended])

    async def _start_tasks(self, steps: dict[int, tuple[Any, str | None]]) -> None:
        """By task: the step, and its payload where that has changed."""
        if not steps:
            return
        if self._session.codec.is_on:
            tenants = await _tenants(self._session, (step["workflow_id"] for step, _ in steps.values()))
            steps = {
                task_id: (step, await self._keep(task_id, step, text, tenants.get(step["workflow_id"])))
                for task_id, (step, text) in steps.items()
            }
        options = [self._options(step) for step, _ in steps.values()]
        rows = await self._session.fetch(
            "start_steps", list(steps), [o.ordering_key for o in options], [o.delay for o in options],
            [o.expires_in for o in options], [payload for _, payload in steps.values()],
        )  # fmt: skip
        self.advanced.started += len(rows)
        for action, count in Counter(row["action"] for row in rows if row["state"] == State.SCHEDULED).items():
            metrics.TRANSITIONS.labels(action, State.SCHEDULED).inc(count)

    async def _keep(self, task_id: int, step: Any, payload: str | None, tenant: str | None) -> str | None:
        """A changed payload as it is stored. Raises PayloadUnavailable: then all of this is done again later."""
        if payload is None:
            return None
        kept = await self._session.codec.store(payload, payload_aad(step["action"], tenant))
        await reference_objects(self._session, [(kept, task_id)])
        return kept

    async def _hand_over(self, steps: Sequence[Any]) -> None:
        """Start tasks with the results of their predecessors; one that cannot have them is cancelled, with why."""
        limit = self._settings.largest_payload_bytes
        handovers = await hand_over(self._session, steps, limit_bytes=limit)
        found = await self._session.fetch("read_payloads", [step["task_id"] for step in steps])
        actions = {step["task_id"]: step["action"] for step in steps}
        payloads: dict[int, str] = {}
        lost: dict[int, str] = {}
        for row in found:
            try:
                aad = payload_aad(actions[row["id"]], row["tenant"])
                payloads[row["id"]] = await self._session.codec.load(row["payload"], aad)
            except PayloadLost as exc:
                payloads[row["id"]], lost[row["id"]] = "{}", f"its payload cannot be had: {exc}"
        startable: dict[int, tuple[Any, str | None]] = {}
        for step, handover in zip(steps, handovers, strict=True):
            task_id: int = step["task_id"]
            if task_id not in payloads:
                continue  # somebody has just cancelled it
            problem = handover.problem or lost.get(task_id)
            if problem is None:
                merged = _merged(payloads[task_id], step, handover)
                size = utf8_size(merged)
                if size <= limit:
                    startable[task_id] = (step, merged)
                    continue
                problem = (
                    f"its payload with the results of its predecessors is {size} bytes; the limit is {limit} "
                    f"({_LIMIT_NAMED})"
                )
            await self._refuse(step, problem)
        await self._start_tasks(startable)

    async def _refuse(self, step: Any, problem: str) -> None:
        """A step that cannot start, told as a cancelled task."""
        self._refused = True
        log.warning("step_refused", workflow=step["workflow_id"], step=step["name"], reason=problem)
        await settle.cancel(self._session, [step["task_id"]], problem[:_REASON_CHARS])

    async def _start_compensation(self, step: Any) -> None:
        payload, problem = await undo_payload(self._session, step)
        size = utf8_size(payload or "")
        limit = self._settings.largest_payload_bytes
        if problem is None and size > limit:
            problem = f"the payload and the result to be undone are {size} bytes; the limit is {limit} ({_LIMIT_NAMED})"
        if problem is not None:
            await self._refuse(step, problem)
            return
        await self._start_tasks({step["task_id"]: (step, payload)})

    # Children

    async def _expand(self, step: Any) -> tuple[Any, State, str | None]:
        """Make a child for each item of a list; the step itself has ended thereby, well or not."""
        try:
            options = self._options(step)
        except PayloadLost as exc:
            return step, State.CRITICAL_ERROR, f"what it keeps for its children cannot be had: {exc}"[:_REASON_CHARS]
        template, problem = options.template, None
        assert template is not None
        if options.items is not None:
            items: list[msgspec.Raw] | None = options.items
        else:
            items, problem = await list_result(
                self._session, step, options.over or 0, limit_bytes=self._settings.largest_result_bytes
            )
        if items is None:
            return step, State.CRITICAL_ERROR, problem
        if len(items) > MAX_CHILDREN:
            return step, State.CRITICAL_ERROR, f"the list has {len(items)} items; the limit is {MAX_CHILDREN}"
        try:
            children = [_of_item(template, options.item_as or "item", item) for item in items]
            tasks = [step_task(child, self._settings) for child in children]
        except RpcError as exc:
            return step, State.CRITICAL_ERROR, exc.message[:_REASON_CHARS]
        await self._add_children([(step, children, tasks)], as_step=True)
        return step, State.SUCCESS, None

    async def _spawn(self, events: Sequence[Any]) -> dict[int, str]:
        """Make the children that accepted results ask for; returns the tasks of which that cannot be done, with why.

        They were checked when the result was accepted, so that only happens where the settings of two processes differ.
        What was asked for is kept with the step, for a retry of its workflow.
        """
        asked = {event["task_id"]: event["children"] for event in events}
        steps = []
        for step in await self._session.fetch("find_steps", list(asked)):
            if step["kind"] == StepKind.COMPENSATION:
                log.warning("children_ignored", task_id=step["task_id"], reason="a compensation has none")
            else:
                steps.append(step)
        reasons = await self._make_children(steps, asked)
        for task_id in reasons:
            kept = msgspec.json.encode(StepOptions(refused=asked[task_id])).decode()
            await self._session.fetch("keep_refused_children", task_id, kept)
        return reasons

    async def _make_children(self, steps: Sequence[Any], asked: Mapping[int, str | None]) -> dict[int, str]:
        """Make what tasks have asked for, as it was told; returns why not, of those of which that cannot be done."""
        made = []
        reasons: dict[int, str] = {}
        for step in steps:
            task_id: int = step["task_id"]
            try:
                text = self._session.codec.decode_inline(asked[task_id] or "[]", spawn_aad(task_id))
                children = read_children(text, lambda child: step_task(child, self._settings))
                made.append((step, children, [step_task(child, self._settings) for child in children]))
            except (RpcError, PayloadLost) as exc:
                reasons[task_id] = f"its children were refused: {exc}"[:_REASON_CHARS]
                log.error("children_refused", workflow=step["workflow_id"], step=step["name"], reason=str(exc))
        await self._add_children(made, as_step=False)
        return reasons

    async def _add_children(
        self, made: Sequence[tuple[Any, Sequence[ChildParams], Sequence[NewTask]]], *, as_step: bool
    ) -> None:
        """Add children and start them; those of a workflow that does not run are made to be cancelled at once.

        as_step: they fail as their parent would; otherwise each has a policy of its own.
        """
        rows: list[tuple[int, int, int | None, NewStep]] = []
        parents: list[tuple[int, int, int]] = []
        for parent, children, tasks in made:
            if not children:
                continue
            flow = self.flows[parent["workflow_id"]]
            first = flow.steps + flow.added
            names = child_names(parent["name"], children)
            for place, (child, task, name) in enumerate(zip(children, tasks, names, strict=True)):
                policy, undo = (parent["on_failure"], parent["undo"]) if as_step else policy_of(child)
                options = StepOptions(task.ordering_key, task.delay_seconds, task.expires_in_seconds)
                step = NewStep(name, StepKind.TASK, task.action, task, (), policy, undo, options=options)
                rows.append((flow.id, first + place, parent["number"], step))
            flow.added += len(children)
            flow.open += len(children)
            flow.to_stop |= flow.state != WorkflowState.RUNNING
            parents.append((flow.id, parent["number"], len(children)))
        if rows:
            await self._session.fetch("add_children", *map(list, zip(*parents, strict=True)))
            running = {flow.id for flow in self.flows.values() if flow.state == WorkflowState.RUNNING}
            self.advanced.started += await insert_steps(self._session, rows, start=running)
            for flow_id in running & {row[0] for row in rows}:
                first = min(number for flow, number, _, _ in rows if flow == flow_id)
                await self._start(await self._session.fetch("find_ready", flow_id, first))

    # Failing

    async def _stop(self, flow: Flow) -> bool:
        """Cancel what has not started, or all of a workflow that was cancelled; whether there was any."""
        everything = flow.state == WorkflowState.CANCELLED
        ids = [row["id"] for row in await self._session.fetch("hold_unstarted_steps", flow.id, everything)]
        await self._session.plan_for(len(ids))
        why = flow.reason if everything else f"workflow {flow.id} has failed: {flow.reason}"
        reason = (why or f"workflow {flow.id} was cancelled")[:_REASON_CHARS]
        if ids:
            await settle.cancel(self._session, ids, reason)
        nodes = await self._session.fetch("cancel_nodes", flow.id, reason)
        await self._ended(nodes)
        return bool(ids or nodes)

    async def _compensate(self) -> bool:
        """Have what has succeeded undone, where everything else has ended; whether anything was begun."""
        begun = False
        for flow in self.flows.values():
            if flow.state != WorkflowState.FAILING or flow.open or flow.undo is None or flow.compensated:
                continue
            found = await self._session.fetch("find_undoable", flow.id, flow.undo)
            if not found:
                continue
            flow.compensated = True
            first = flow.steps + flow.added
            rows: list[tuple[int, int, int | None, NewStep]] = []
            for place, row in enumerate(found):
                task = NewTask(row["undo"], max_attempts=self._settings.max_attempts)
                after = [first + place - 1] if place else []
                step = NewStep(f"{row['name']}/undo", StepKind.COMPENSATION, task.action, task, after, "continue")
                rows.append((flow.id, first + place, row["number"], step))
            flow.added += len(rows)
            flow.open += len(rows)
            await self._session.plan_for(len(rows))
            await insert_steps(self._session, rows, start=())
            ready = await self._session.fetch("find_ready", flow.id, first)
            await self._start(ready)
            begun = True
            log.info("workflow_compensates", workflow=flow.id, steps=len(rows))
        return begun

    # The workflows themselves

    async def write(self, flows: Sequence[Flow] | None = None) -> None:
        """Write what these workflows are now, or all of them."""
        written = list(self.flows.values()) if flows is None else flows
        await self._session.fetch(
            "update_workflows", [f.id for f in written], [f.state for f in written], [f.added for f in written],
            [f.open for f in written], [f.undo for f in written], [f.compensated for f in written],
            [f.reason for f in written],
        )  # fmt: skip
        for flow in written:
            flow.steps += flow.added
            flow.added = 0


async def insert_steps(
    session: Session, rows: Sequence[tuple[int, int, int | None, NewStep]], *, start: Iterable[int]
) -> int:
    """Add steps, (workflow, number, parent, step) each, in one statement.

    start: the workflows of which steps that wait for nothing start at once; the others are for the caller to start.
    Returns how many have.
    """
    await session.plan_for(len(rows))
    starting = set(start)
    trace = await _traces(session, rows)
    at_once = [flow in starting and _starts_at_once(step) for flow, _, _, step in rows]
    steps = [step for _, _, _, step in rows]
    tasks = [step.task for step in steps]
    tenants = await _tenants(session, (flow for flow, _, _, _ in rows))
    await session.fetch(
        "insert_steps",
        [flow for flow, _, _, _ in rows],
        [number for _, number, _, _ in rows],
        [s.name for s in steps],
        [s.kind for s in steps],
        [s.action for s in steps],
        [parent for _, _, parent, _ in rows],
        ["{" + ",".join(map(str, s.after)) + "}" for s in steps],
        [len(s.after) for s in steps],
        [State.SCHEDULED if now else State.WAITING for now in at_once],
        [s.on_failure for s in steps],
        [s.undo for s in steps],
        [s.results_as for s in steps],
        [s.errors_as for s in steps],
        [_kept(session, flow, number, step.options) for flow, number, _, step in rows],
        [
            step.task and session.codec.encode(step.task.payload, payload_aad(step.task.action, tenants.get(flow)))
            for flow, _, _, step in rows
        ],
        [t and t.run_at for t in tasks],
        [t.priority if t else 0 for t in tasks],
        [t.max_attempts if t else 1 for t in tasks],
        [t and t.timeout_seconds for t in tasks],
        [t and t.labels for t in tasks],
        [t and t.expires_at for t in tasks],
        [t and t.limit_key for t in tasks],
        trace,
    )
    for action, count in Counter(t.action for t in tasks if t is not None).items():
        metrics.ENQUEUED.labels(action, "workflow").inc(count)
    return sum(at_once)


async def _tenants(session: Session, flows: Iterable[int]) -> dict[int, str | None]:
    """Tenants by workflow, for the associated data of encrypted payloads; empty without encryption."""
    if not session.codec.encrypts:
        return {}
    return {row["id"]: row["tenant"] for row in await session.fetch("read_flow_tenants", list(set(flows)))}


async def _traces(session: Session, rows: Sequence[tuple[int, int, int | None, NewStep]]) -> list[str | None]:
    """What the tasks of new steps carry: the trace of who makes them, or that of the step that they belong to."""
    if active.active() is None:
        return [None] * len(rows)
    here = trace_context.current()
    given = [(None if step.task is None else step.task.trace) or (here and here.text) for _, _, _, step in rows]
    if all(given):
        return given
    parents = sorted({(flow, parent) for flow, _, parent, _ in rows if parent is not None})
    found = await session.fetch("read_step_traces", [flow for flow, _ in parents], [parent for _, parent in parents])
    of_step = {(row["workflow_id"], row["number"]): row["trace"] for row in found}
    return [
        trace or (None if parent is None else of_step.get((flow, parent)))
        for trace, (flow, _, parent, _) in zip(given, rows, strict=True)
    ]


def _starts_at_once(step: NewStep) -> bool:
    """Whether nothing has to be looked up to start it."""
    options = step.options
    return (
        step.kind == StepKind.TASK
        and not step.after
        and options.ordering_key is None
        and options.delay is None
        and options.expires_in is None
    )


def _kept(session: Session, workflow_id: int, number: int, options: StepOptions) -> str | None:
    """Options as they are stored; those of a map, which hold its items and the payload of its children, sealed."""
    if not options.is_needed:
        return None
    text = msgspec.json.encode(options).decode()
    return text if options.template is None else session.codec.encode(text, options_aad(workflow_id, number))


def _of_item(template: ChildParams, item_as: str, item: msgspec.Raw) -> ChildParams:
    members = _decode_members(bytes(template.payload)) | {item_as: item}
    return msgspec.structs.replace(template, payload=msgspec.Raw(msgspec.json.encode(members)))


def _merged(payload: str, step: Any, handover: Handover) -> str:
    """The payload with what its predecessors came to; of an earlier life of the workflow nothing is left in it."""
    members = _decode_members(payload)
    for name, text in ((step["results_as"], handover.results), (step["errors_as"], handover.errors)):
        if name is not None:
            members[name] = msgspec.Raw(text.encode())
    return escape_for_sqs(msgspec.json.encode(members).decode())


def _columns(nodes: Iterable[Node]) -> tuple[list[int], list[int]]:
    listed = list(nodes)
    return [node[0] for node in listed], [node[1] for node in listed]
