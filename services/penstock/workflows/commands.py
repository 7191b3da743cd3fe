"""What is asked of workflows once its parameters have been checked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.protocol.task import NewTask
from penstock.workflows.params import ChildParams, StepKind, WorkflowState


class StepOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step keeps until its turn comes.

    ordering_key, delay, expires_in: of its task. over: the step whose result is the list, items: the list itself.
    template: of the children of a map. refused: children that its task asked for and that could not be made, as told.
    """

    ordering_key: str | None = None
    delay: float | None = None
    expires_in: float | None = None
    over: int | None = None
    items: list[msgspec.Raw] | None = None
    item_as: str | None = None
    template: ChildParams | None = None
    refused: str | None = None

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to keep."""
        return self != NO_OPTIONS


NO_OPTIONS = StepOptions()


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step as it is to be made.

    task: None for one that has none of its own. after: numbers of its predecessors. undo: the action that undoes it.
    fallback: with the policy `compensate`, the action for steps that name none of their own.
    """

    name: str
    kind: StepKind
    action: str | None
    task: NewTask | None
    after: Sequence[int] = ()
    on_failure: str = "fail"
    undo: str | None = None
    results_as: str | None = None
    errors_as: str | None = None
    options: StepOptions = NO_OPTIONS


@dataclass(frozen=True, slots=True)
class CreateWorkflow:
    """definition: SHA-256 of all but the key."""

    key: str | None
    name: str
    steps: Sequence[NewStep]
    definition: bytes
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class WhichWorkflow:
    """By id or by key, of which one is None. tenant: whose key it is."""

    id: int | None
    key: str | None
    tenant: str | None = None

    def __str__(self) -> str:
        return str(self.id) if self.key is None else repr(self.key)


@dataclass(frozen=True, slots=True)
class GetWorkflow:
    """Its steps from behind the number ``after``."""

    which: WhichWorkflow
    limit: int
    after: int


@dataclass(frozen=True, slots=True)
class ListWorkflows:
    """Newest first; ``before`` is the id that the page begins behind."""

    state: WorkflowState | None
    limit: int
    before: int | None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class CancelWorkflow:
    which: WhichWorkflow
    reason: str | None
