"""Workflows and their steps: parameters, results, and checked definitions; without I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from penstock.protocol.answers import StepKind, WorkflowState
from penstock.protocol.checks import KEY, LIMIT, NUMBERED, REASON, Checked, read_id
from penstock.protocol.errors import InvalidParams
from penstock.protocol.task import KEY_MAX_CHARS, REASON_MAX_CHARS, NewTask
from penstock.protocol.tenant import TENANT
from penstock.protocol.views import CURSOR, about

NAME_MAX_CHARS = 200
MAX_STEPS = 50_000  # of one call
MAX_EDGES = 500_000
MAX_CHILDREN = 50_000  # of one step
MAX_CHILDREN_BYTES = 128 * 1024 * 1024  # of the payloads of a step's children by a list, which are held at once
STEP_NAMES_SHOWN = 20  # predecessors of one step that `workflow.status` names


class Compensate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The policy `compensate` with an action for the steps that name none of their own."""

    compensate: str


class ChildParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A task that a handler spawns, and what every step may say."""

    action: str | None = None
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))  # OpenRPC writes no other default
    name: str | None = None
    on_failure: Literal["fail", "continue", "compensate"] | Compensate = "fail"
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


def children_problem(payload: msgspec.Raw, items: Sequence[msgspec.Raw]) -> str | None:
    """Why a list has too many items, or the payloads of children, one for each of them, are too much together."""
    if len(items) > MAX_CHILDREN:
        return f"holds {len(items)} items; the limit is {MAX_CHILDREN}"
    size = len(bytes(payload)) * len(items) + sum(len(bytes(item)) for item in items)
    if size <= MAX_CHILDREN_BYTES:
        return None
    return f"makes payloads of {size} bytes together; the limit is {MAX_CHILDREN_BYTES}"


class StepParams(ChildParams, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    after: list[str] = msgspec.field(default_factory=list)
    results_as: str | None = None
    errors_as: str | None = None
    over: str | list[msgspec.Raw] | None = None
    item_as: str | None = None


_TenantOfKey = Annotated[str | None, about("With key: the tenant that owns it."), TENANT]


def _check_step(cursor: str, name: str) -> None:
    if read_id(cursor, name) >= 2**31:
        raise InvalidParams(name, f"must be that of a page before, not {cursor!r}")


class WorkflowCreateParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: Annotated[
        list[StepParams] | None,
        about(f"Objects, each a step with the names of those that it comes after; 1 to {MAX_STEPS}."),
    ] = None
    chain: Annotated[
        list[StepParams | list[StepParams]] | None,
        about("Instead of steps: steps that run one after the other; an array is a group that runs in parallel."),
    ] = None
    name: Annotated[str, about(f"Shown with the workflow; up to {NAME_MAX_CHARS} characters.")] = ""
    key: Annotated[
        str | None,
        about(
            "The same key and definition again get the first workflow; another definition is an error. "
            f"1 to {KEY_MAX_CHARS} characters."
        ),
        KEY,
    ] = None
    tenant: Annotated[str | None, about("The tenant of its steps and of its key."), TENANT] = None


class Which(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters that name a workflow by its id or its key, of which one is None. tenant: the owner of the key."""

    id: Annotated[int | str | None, about("The workflow.")] = None
    key: Annotated[str | None, about("Instead of id: the key that it was created with."), KEY] = None
    if TYPE_CHECKING:  # it stands last among the parameters
        tenant: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidParams; makes a number of the id."""
        if self.id is not None:
            msgspec.structs.force_setattr(self, "id", read_id(self.id, "id"))
        if (self.id is None) == (self.key is None):
            raise InvalidParams("id", "or key must be given, not both")
        if self.tenant is not None and self.key is None:
            raise InvalidParams("tenant", "goes with key, which each tenant has for itself; an id needs no tenant")


class WorkflowStatusParams(Which, frozen=True):
    limit: Annotated[int, about("Maximum number of steps; 1 to 1000."), LIMIT] = 100
    cursor: Annotated[str | None, CURSOR, Checked(_check_step)] = None
    tenant: _TenantOfKey = None


class WorkflowListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[WorkflowState | None, about("Only workflows in this state.")] = None
    limit: Annotated[int, about("Maximum number of workflows; 1 to 1000."), LIMIT] = 50
    cursor: Annotated[str | None, CURSOR, NUMBERED] = None
    tenant: Annotated[str | None, about("Only workflows of this tenant."), TENANT] = None


class WorkflowCancelParams(Which, frozen=True):
    reason: Annotated[
        str | None, about(f"Shown with it and its steps; 1 to {REASON_MAX_CHARS} characters."), REASON
    ] = None
    tenant: _TenantOfKey = None


class WorkflowRetryParams(Which, frozen=True):
    tenant: _TenantOfKey = None


# Results


# Checked parameters


class StepOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options that are stored with a step until it starts: of its task, or of its children."""

    ordering_key: str | None = None
    delay: float | None = None
    expires_in: float | None = None
    over: int | None = None  # the step whose result is the list
    items: list[msgspec.Raw] | None = None  # the list itself
    item_as: str | None = None
    template: ChildParams | None = None  # of the children of a map
    refused: str | None = None  # requested children that could not be created, as JSON


@dataclass(frozen=True, slots=True)
class NewStep:
    """A checked step. after: numbers of its predecessors. undo: the action that undoes it."""

    name: str
    kind: StepKind
    action: str | None
    task: NewTask | None
    after: Sequence[int] = ()
    on_failure: str = "fail"
    undo: str | None = None
    results_as: str | None = None
    errors_as: str | None = None
    options: StepOptions = field(default_factory=StepOptions)


@dataclass(frozen=True, slots=True)
class CreateWorkflow:
    """definition: SHA-256 of all but the key."""

    key: str | None
    name: str
    steps: Sequence[NewStep]
    definition: bytes
    tenant: str | None = None
