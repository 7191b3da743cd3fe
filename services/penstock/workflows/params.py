"""The parameters of ``workflow.*`` as they are sent, and their limits. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

NAME_MAX_CHARS = 200
MAX_STEPS = 50_000  # of one call
MAX_EDGES = 500_000
MAX_CHILDREN = 50_000  # of one step
STEP_NAMES_SHOWN = 20  # predecessors of one step that `workflow.status` names


class WorkflowState(StrEnum):
    """FAILING: a step has failed; those that run come to their end, and what is to be undone is undone."""

    RUNNING = "RUNNING"
    FAILING = "FAILING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def final(self) -> bool:
        return self not in (WorkflowState.RUNNING, WorkflowState.FAILING)


class StepKind(StrEnum):
    """map: makes a child for each item of a list. join: no task, done when its predecessors are. compensation: undoes
    another step."""

    TASK = "task"
    MAP = "map"
    JOIN = "join"
    COMPENSATION = "compensation"


OnFailure = Literal["fail", "continue", "compensate"]


class Compensate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy `compensate` with an action for the steps that name none of their own."""

    compensate: str


class ChildParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A task that a handler spawns, and what every step may say."""

    action: str | None = None
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))  # OpenRPC writes no other default
    name: str | None = None
    on_failure: OnFailure | Compensate = "fail"
    compensate: str | None = None
    run_at: str | int | None = None
    delay: float | None = None
    priority: int | None = None
    ordering_key: str | None = None
    max_attempts: int | None = None
    timeout: float | None = None
    labels: dict[str, str] | None = None
    expires_at: str | int | None = None
    expires_in: float | None = None
    limit_key: str | None = None


class StepParams(ChildParams, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    after: list[str] = msgspec.field(default_factory=list)
    results_as: str | None = None
    errors_as: str | None = None
    over: str | list[msgspec.Raw] | None = None
    item_as: str | None = None


class WorkflowCreateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: list[StepParams] | None = None
    chain: list[StepParams | list[StepParams]] | None = None
    name: str = ""
    key: str | None = None
    tenant: str | None = None


class WorkflowStatusParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int | str | None = None
    key: str | None = None
    limit: int = 100
    cursor: str | None = None
    tenant: str | None = None


class WorkflowListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: WorkflowState | None = None
    limit: int = 50
    cursor: str | None = None
    tenant: str | None = None


class WorkflowCancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int | str | None = None
    key: str | None = None
    reason: str | None = None
    tenant: str | None = None


class WorkflowRetryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int | str | None = None
    key: str | None = None
    tenant: str | None = None


WORKFLOW_PARAMS: dict[str, type[msgspec.Struct]] = {
    "workflow.create": WorkflowCreateParams,
    "workflow.status": WorkflowStatusParams,
    "workflow.list": WorkflowListParams,
    "workflow.cancel": WorkflowCancelParams,
    "workflow.retry": WorkflowRetryParams,
}
READING = frozenset({"workflow.status", "workflow.list"})
