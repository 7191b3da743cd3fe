"""What the results of the methods about workflows look like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from penstock.protocol.task import State
from penstock.protocol.views import Instant, about, timestamp
from penstock.workflows.params import StepKind, WorkflowState
from penstock.workflows.store import Changed, StepRecord, WorkflowRecord


class WorkflowAccepted(msgspec.Struct, frozen=True):
    id: int
    state: WorkflowState
    duplicate: Annotated[bool, about("True: this key was used before with this definition; nothing was added.")]


class WorkflowChanged(msgspec.Struct, frozen=True):
    id: int
    state: WorkflowState
    restarted: Annotated[int, about("How many steps begin again.")]


class Workflow(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    key: str | None
    name: str
    state: WorkflowState
    steps: Annotated[int, about("How many there are, children and compensations included.")]
    open: Annotated[int, about("How many have not come to their end.")]
    reason: Annotated[str | None, about("Which step it failed by, or why it was cancelled.")]
    compensated: Annotated[bool, about("What had succeeded is being undone, or was.")]
    created_at: Instant
    updated_at: Instant
    finished_at: Instant | None
    tenant: Annotated[str | None, about("For whom its steps are.")]


class WorkflowPage(msgspec.Struct, frozen=True):
    workflows: list[Workflow]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    number: int
    name: str
    kind: StepKind
    state: Annotated[State, about("Of its task; of a step without one, SCHEDULED while its children run.")]
    action: str | None = None
    task_id: int | None = None
    reason: str | None = None
    parent: Annotated[str | None, about("The step that made it; of a compensation, the one that it undoes.")] = None
    after: Annotated[list[str], about("Its predecessors, the first 20 of them.")] = msgspec.field(default_factory=list)
    after_count: Annotated[int, about("How many predecessors it has.")] = 0
    children: Annotated[int, about("How many steps it has made.")] = 0
    open_children: Annotated[int, about("How many of these have not come to their end.")] = 0


class WorkflowDetail(Workflow, frozen=True, kw_only=True):
    counts: Annotated[Mapping[State, int], about("Steps by state; SCHEDULED: let go and not settled.")]
    tree: Annotated[list[Step], about("A page of its steps, by number.")]
    cursor: Annotated[str | None, about("Pass it on for the next page; null at the end.")]


def accepted(changed: Changed) -> WorkflowAccepted:
    return WorkflowAccepted(changed.id, changed.state, changed.duplicate)


def changed(record: Changed) -> WorkflowChanged:
    return WorkflowChanged(record.id, record.state, record.restarted)


def workflow(record: WorkflowRecord) -> Workflow:
    return Workflow(**_members(record))


def detail(
    record: WorkflowRecord, counts: Mapping[str, int], steps: list[StepRecord], cursor: str | None
) -> WorkflowDetail:
    """A workflow with a page of its steps."""
    by_state = {State(state): count for state, count in counts.items()}
    return WorkflowDetail(**_members(record), counts=by_state, tree=[_step(step) for step in steps], cursor=cursor)


def _members(record: WorkflowRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in WorkflowRecord.__slots__} | {
        "created_at": timestamp(record.created_at),
        "updated_at": timestamp(record.updated_at),
        "finished_at": record.finished_at and timestamp(record.finished_at),
    }


def _step(record: StepRecord) -> Step:
    members = {name: getattr(record, name) for name in StepRecord.__slots__}
    return Step(**members | {"kind": StepKind(record.kind), "after": list(record.after)})
