"""What a workflow is asked to be: parameters of ``workflow.*``, and the checked steps that they become. Pure.

:mod:`penstock.workflowstore` makes workflows and :mod:`penstock.advance` moves them on.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidParams, TooLarge
from penstock.tasks import KEY_MAX_CHARS, NewTask
from penstock.tenants import read_tenant

NAME_MAX_CHARS = 200
MAX_STEPS = 50_000  # of one call
MAX_EDGES = 500_000
MAX_CHILDREN = 50_000  # of one step
STEP_NAMES_SHOWN = 20  # predecessors of one step that `workflow.status` names

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


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


# Commands: parameters that have been checked


class StepOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step keeps until its turn comes.

    ordering_key, delay, expires_in: of its task. over: the step whose result is the list, items: the list itself.
    template: of the children of a map.
    """

    ordering_key: str | None = None
    delay: float | None = None
    expires_in: float | None = None
    over: int | None = None
    items: list[msgspec.Raw] | None = None
    item_as: str | None = None
    template: ChildParams | None = None

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


@dataclass(frozen=True, slots=True)
class RetryWorkflow:
    which: WhichWorkflow


WorkflowChange = CreateWorkflow | CancelWorkflow | RetryWorkflow
WorkflowCommand = WorkflowChange | GetWorkflow | ListWorkflows

MakeTask = Callable[[ChildParams], NewTask]
"""Checks what is a task's own of a step. Raises InvalidParams, TooLarge."""


def read_create(given: WorkflowCreateParams, make: MakeTask) -> CreateWorkflow:
    """Check a whole definition. Raises InvalidParams, naming the step, and TooLarge."""
    if (given.steps is None) == (given.chain is None):
        raise InvalidParams("steps", "or chain must be given, not both")
    listed, field = (given.steps, "steps") if given.steps is not None else (_linked(given.chain or []), "chain")
    if not 1 <= len(listed) <= MAX_STEPS:
        raise InvalidParams(field, f"must hold 1 to {MAX_STEPS} steps, not {len(listed)}")
    numbers = _numbers(listed, field)
    steps = [_step(step, place, numbers, field, make) for place, step in enumerate(listed)]
    edges = sum(len(step.after) for step in steps)
    if edges > MAX_EDGES:
        raise InvalidParams(
            field,
            f"follow each other {edges} times; the limit is {MAX_EDGES}. Between two wide groups put a step without "
            "an action, which waits for the one and is waited for by the other",
        )
    _check_order(steps, field)
    return CreateWorkflow(_key(given.key), _label(given.name), steps, _definition(given), read_tenant(given.tenant))


def read_children(text: str, make: MakeTask) -> list[ChildParams]:
    """The children that a result asks for. Raises InvalidParams, TooLarge."""
    try:
        children = _decode_children(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("spawn", f"is wrong: {str(exc)[:200]}") from None
    if len(children) > MAX_CHILDREN:
        raise InvalidParams("spawn", f"holds {len(children)} children; the limit is {MAX_CHILDREN}")
    names: Counter[str] = Counter()
    for place, child in enumerate(children):
        at = f"spawn[{place}]"
        if child.name is not None:
            _check_name(child.name, at)
            if child.name.isdigit():
                raise InvalidParams(f"{at}.name", f"is a number, {child.name!r}, as those without a name have")
            names[child.name] += 1
            if names[child.name] > 1:
                raise InvalidParams(f"{at}.name", f"is that of another child too: {child.name!r}")
        _check_action(child.compensate, f"{at}.compensate")
        _made(child, at, make)
    return children


_decode_children = msgspec.json.Decoder(list[ChildParams]).decode


def policy_of(child: ChildParams) -> tuple[str, str | None]:
    """What is kept of a failure policy: its name, and for `compensate` with an action both, joined by a colon."""
    if isinstance(child.on_failure, Compensate):
        return f"compensate:{child.on_failure.compensate}", child.compensate
    return child.on_failure, child.compensate


def fallback_of(policy: str) -> str | None:
    """Of a kept policy: None where nothing is undone, else the action for steps that name none, or empty."""
    name, _, action = policy.partition(":")
    return action if name == "compensate" else None


def _linked(chain: list[StepParams | list[StepParams]]) -> list[StepParams]:
    """A chain as steps: each after the one before, a group after that and before what follows.

    Between two groups stands a step without an action, so that their widths add up and do not multiply.
    """
    steps: list[StepParams] = []
    names = _Names(step.name for link in chain for step in (link if isinstance(link, list) else [link]))
    before: list[str] = []
    for place, link in enumerate(chain):
        group = link if isinstance(link, list) else [link]
        if not group:
            raise InvalidParams(f"chain[{place}]", "is an empty group")
        if len(group) > 1 and len(before) > 1:
            joint = names.free("join")
            steps.append(StepParams(name=joint, after=before))
            before = [joint]
        called = []
        for step in group:
            if step.after:
                raise InvalidParams(f"chain[{place}].after", "goes with steps; in a chain the place says it")
            name = step.name if step.name is not None else names.free((step.action or "join").replace("/", "-"))
            called.append(name)
            steps.append(msgspec.structs.replace(step, name=name, after=before))
        before = called
    return steps


class _Names:
    """Names for the steps of a chain that have none: that of the action, with a number where it is taken."""

    def __init__(self, given: Iterable[str | None]) -> None:
        self._taken = set(given)
        self._counts: Counter[str] = Counter()

    def free(self, name: str) -> str:
        while True:
            self._counts[name] += 1
            count = self._counts[name]
            free = name if count == 1 else f"{name}-{count}"
            if free not in self._taken:
                self._taken.add(free)
                return free


def _numbers(steps: Sequence[StepParams], field: str) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for place, step in enumerate(steps):
        name = _name_of(step)
        if not name:
            raise InvalidParams(f"{field}[{place}].name", "is missing, and there is no action to be named after")
        _check_name(name, f"{field}[{place}]")
        if name in numbers:
            raise InvalidParams(
                f"{field}[{place}].name", f"is that of step {numbers[name]} too: {name!r}; a step has a name of its own"
            )
        numbers[name] = place
    return numbers


def _name_of(step: ChildParams) -> str:
    return step.name if step.name is not None else (step.action or "").replace("/", "-")


def _check_name(name: str, at: str) -> None:
    if not 1 <= len(name) <= NAME_MAX_CHARS:
        raise InvalidParams(f"{at}.name", f"must have 1 to {NAME_MAX_CHARS} characters, not {len(name)}")
    if _CONTROL.search(name):
        raise InvalidParams(f"{at}.name", "holds a control character")
    if "/" in name:
        raise InvalidParams(f"{at}.name", f"holds a /, which names of children have: {name!r}")


def _step(step: StepParams, place: int, numbers: dict[str, int], field: str, make: MakeTask) -> NewStep:
    name = _name_of(step)
    at = f"{field}[{place}]"
    after = _predecessors(step, name, numbers, at)
    policy, undo = policy_of(step)
    _check_action(step.compensate, f"{at}.compensate")
    if isinstance(step.on_failure, Compensate):
        _check_action(step.on_failure.compensate, f"{at}.on_failure.compensate")
    shared: dict[str, Any] = {"after": after, "on_failure": policy, "undo": undo}
    if step.action is None:
        return _joint(step, name, after, at)
    task = _made(step, at, make)
    if step.over is not None:
        return _map(step, name, task, numbers, at, shared)
    if step.item_as is not None:
        raise InvalidParams(f"{at}.item_as", "goes with over")
    for member in ("results_as", "errors_as"):
        _check_member(getattr(step, member), member, step, at)
    if step.results_as is not None and step.results_as == step.errors_as:
        raise InvalidParams(f"{at}.errors_as", f"is the member that results_as names: {step.errors_as!r}")
    if (step.results_as or step.errors_as) and not after:
        raise InvalidParams(
            f"{at}.{'results_as' if step.results_as else 'errors_as'}", "needs predecessors: give after"
        )
    options = StepOptions(task.ordering_key, task.delay_seconds, task.expires_in_seconds)
    return NewStep(
        name, StepKind.TASK, task.action, task, **shared, results_as=step.results_as, errors_as=step.errors_as,
        options=options,
    )  # fmt: skip


def _predecessors(step: StepParams, name: str, numbers: dict[str, int], at: str) -> list[int]:
    after = []
    for before in dict.fromkeys([*step.after, *([step.over] if isinstance(step.over, str) else [])]):
        number = numbers.get(before)
        if number is None:
            raise InvalidParams(f"{at}.after", f"of {name!r} names {before[:200]!r}, and there is no such step")
        if before == name:
            raise InvalidParams(f"{at}.after", f"of {name!r} names itself")
        after.append(number)
    return after


def _joint(step: StepParams, name: str, after: list[int], at: str) -> NewStep:
    usual = StepParams(name=step.name, after=step.after, payload=step.payload)
    names = (f.name for f in msgspec.structs.fields(step))
    given = [name for name in names if getattr(step, name) != getattr(usual, name)]
    if bytes(step.payload) != b"{}":
        given.append("payload")
    if given:
        raise InvalidParams(f"{at}.action", f"is missing, and {name!r} says {given[0]}, which is an action's")
    if not after:
        raise InvalidParams(f"{at}.action", f"is missing; without one, {name!r} is to join others: give after")
    return NewStep(name, StepKind.JOIN, None, None, after)


def _map(
    step: StepParams, name: str, task: NewTask, numbers: dict[str, int], at: str, shared: dict[str, Any]
) -> NewStep:
    for member in ("results_as", "errors_as"):
        if getattr(step, member) is not None:
            raise InvalidParams(f"{at}.{member}", "does not go with over: its tasks are given the items")
    item_as = "item" if step.item_as is None else step.item_as
    _check_member(item_as, "item_as", step, at)
    if isinstance(step.over, list) and len(step.over) > MAX_CHILDREN:
        raise InvalidParams(f"{at}.over", f"holds {len(step.over)} items; the limit is {MAX_CHILDREN}")
    over = numbers[step.over] if isinstance(step.over, str) else None
    items = step.over if isinstance(step.over, list) else None
    common = {f.name: getattr(step, f.name) for f in msgspec.structs.fields(ChildParams) if f.name != "name"}
    options = StepOptions(over=over, items=items, item_as=item_as, template=ChildParams(**common))
    return NewStep(name, StepKind.MAP, task.action, None, **shared, options=options)


def _check_member(member: str | None, field: str, step: StepParams, at: str) -> None:
    if member is None:
        return
    if not 1 <= len(member) <= NAME_MAX_CHARS or _CONTROL.search(member):
        raise InvalidParams(f"{at}.{field}", f"must have 1 to {NAME_MAX_CHARS} characters, none of them a control one")
    payload = bytes(step.payload)
    if not payload.lstrip().startswith(b"{"):
        raise InvalidParams(f"{at}.{field}", "adds a member to the payload, which must be an object")
    if member in msgspec.json.decode(payload, type=dict[str, msgspec.Raw]):
        raise InvalidParams(f"{at}.{field}", f"names a member that the payload has already: {member!r}")


def _check_action(action: str | None, field: str) -> None:
    if action is not None and (not 1 <= len(action) <= NAME_MAX_CHARS or _CONTROL.search(action)):
        raise InvalidParams(field, f"must be an action's name, of 1 to {NAME_MAX_CHARS} characters")


def _made(step: ChildParams, at: str, make: MakeTask) -> NewTask:
    try:
        if step.action is None:
            raise InvalidParams("action", "is missing")
        return make(step)
    except InvalidParams as exc:
        raise InvalidParams(f"{at}.{exc.data['field']}", exc.data["problem"]) from None
    except TooLarge as exc:
        raise TooLarge(f"{at}.payload", exc.data["size"], exc.data["limit"]) from None


def _check_order(steps: Sequence[NewStep], field: str) -> None:
    """Raises InvalidParams when steps wait for each other in a circle, naming one."""
    pending = [len(step.after) for step in steps]
    followers: list[list[int]] = [[] for _ in steps]
    for number, step in enumerate(steps):
        for before in step.after:
            followers[before].append(number)
    ready = deque(number for number, count in enumerate(pending) if not count)
    seen = 0
    while ready:
        seen += 1
        for number in followers[ready.popleft()]:
            pending[number] -= 1
            if not pending[number]:
                ready.append(number)
    if seen == len(steps):
        return
    # Whoever is left waits for one that is left: backwards from any of them lies a circle.
    number = next(number for number, count in enumerate(pending) if count)
    walked: dict[int, int] = {}
    while number not in walked:
        walked[number] = len(walked)
        number = next(before for before in steps[number].after if pending[before])
    circle = [steps[n].name for n, place in walked.items() if place >= walked[number]]
    shown = " after ".join(repr(name) for name in [*circle[:5], *(["..."] if len(circle) > 5 else []), circle[0]])
    raise InvalidParams(f"{field}[{number}].after", f"goes in a circle: {shown}")


def _definition(given: WorkflowCreateParams) -> bytes:
    plain = msgspec.json.decode(msgspec.json.encode([given.name, given.steps, given.chain]))
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).digest()


def _key(key: str | None) -> str | None:
    if key is not None and (not 1 <= len(key) <= KEY_MAX_CHARS or _CONTROL.search(key)):
        raise InvalidParams("key", f"must have 1 to {KEY_MAX_CHARS} characters, none of them a control character")
    return key


def _label(name: str) -> str:
    if len(name) > NAME_MAX_CHARS or _CONTROL.search(name):
        raise InvalidParams("name", f"must have at most {NAME_MAX_CHARS} characters, none of them a control character")
    return name


def read_which(workflow_id: int | None, key: str | None, tenant: str | None) -> WhichWorkflow:
    """Raises InvalidParams unless one of the two is given."""
    if (workflow_id is None) == (key is None):
        raise InvalidParams("id", "or key must be given, not both")
    if tenant is not None and key is None:
        raise InvalidParams("tenant", "goes with key, which is a tenant's own; an id is nobody else's")
    return WhichWorkflow(workflow_id, _key(key), read_tenant(tenant))


def child_names(parent: str, children: Iterable[ChildParams], first: int = 0) -> list[str]:
    """What the children of a step are called."""
    return [f"{parent}/{number if child.name is None else child.name}" for number, child in enumerate(children, first)]
