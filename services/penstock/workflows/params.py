"""The parameters of ``workflow.*`` as they are sent, and their limits. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from penstock.protocol.task import KEY_MAX_CHARS, REASON_MAX_CHARS
from penstock.protocol.views import CURSOR, about

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


_Id = Annotated[int | str | None, about("The workflow.")]
_Key = Annotated[str | None, about("In place of id: the key that it was created with.")]
_TenantOfKey = Annotated[str | None, about("With key: whose key it is; null for nobody's.")]


class WorkflowCreateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: Annotated[
        list[StepParams] | None,
        about(f"Objects, each a step with the names of those that it comes after; 1 to {MAX_STEPS}."),
    ] = None
    chain: Annotated[
        list[StepParams | list[StepParams]] | None,
        about("In place of steps: steps one after the other, an array standing for a group side by side."),
    ] = None
    name: Annotated[str, about(f"Shown with it; up to {NAME_MAX_CHARS} characters.")] = ""
    key: Annotated[
        str | None,
        about(
            "The same key and definition again get the first workflow; another definition is an error. "
            f"1 to {KEY_MAX_CHARS} characters."
        ),
    ] = None
    tenant: Annotated[str | None, about("For whom all its steps are, and whose the key is; null for nobody.")] = None


class WorkflowStatusParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Id = None
    key: _Key = None
    limit: Annotated[int, about("Steps at the most; 1 to 1000.")] = 100
    cursor: Annotated[str | None, CURSOR] = None
    tenant: _TenantOfKey = None


class WorkflowListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[WorkflowState | None, about("Only workflows in this state.")] = None
    limit: Annotated[int, about("Workflows at the most; 1 to 1000.")] = 50
    cursor: Annotated[str | None, CURSOR] = None
    tenant: Annotated[str | None, about("Only workflows of this tenant.")] = None


class WorkflowCancelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Id = None
    key: _Key = None
    reason: Annotated[str | None, about(f"Shown with it and its steps; 1 to {REASON_MAX_CHARS} characters.")] = None
    tenant: _TenantOfKey = None


class WorkflowRetryParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: _Id = None
    key: _Key = None
    tenant: _TenantOfKey = None
