"""Reads and checks definitions of workflows, and children that a result requests; without I/O."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter

import msgspec

from penstock.protocol.answers import StepKind
from penstock.protocol.checks import CONTROL, check_chars, read_action
from penstock.protocol.errors import InvalidParams, TooLarge
from penstock.protocol.method import checked
from penstock.protocol.task import NewTask
from penstock.settings.model import Settings
from penstock.tasks.params import EnqueueParams, new_task
from penstock.workflows import model
from penstock.workflows.model import ChildParams, Compensate, CreateWorkflow, NewStep, StepOptions, StepParams

_OF_A_TASK = tuple(name for name in EnqueueParams.__struct_fields__ if name in ChildParams.__struct_fields__)
_decode_children = msgspec.json.Decoder(list[ChildParams]).decode


def read_create(given: model.WorkflowCreateParams, settings: Settings) -> CreateWorkflow:
    """Raises InvalidParams, naming the step, and TooLarge."""
    if (given.steps is None) == (given.chain is None):
        raise InvalidParams("steps", "or chain must be given, not both")
    if given.steps is not None:
        listed, field = {f"steps[{place}]": step for place, step in enumerate(given.steps)}, "steps"
    else:
        listed, field = _linked_steps(given.chain or []), "chain"
    if not 1 <= len(listed) <= model.MAX_STEPS:
        raise InvalidParams(field, f"must hold 1 to {model.MAX_STEPS} steps, not {len(listed)}")
    numbers = _number_steps(listed)
    checked = []
    for at, step in listed.items():
        with _errors_at(at):
            checked.append(_new_step(step, numbers, settings))
    for at, made in zip(listed, checked, strict=True):
        over = made.options.over
        if over is not None and checked[over].kind is StepKind.JOIN:
            raise InvalidParams(f"{at}.over", f"names {checked[over].name!r}, which has no action, and so no result")
    items = sum(len(step.options.items or ()) for step in checked)
    if items > model.MAX_CHILDREN:
        raise InvalidParams(field, f"have lists of {items} items together; the limit is {model.MAX_CHILDREN}")
    edges = sum(len(step.after) for step in checked)
    if edges > model.MAX_EDGES:
        problem = f"follow each other {edges} times; the limit is {model.MAX_EDGES}. Between two wide groups put a step"
        hint = "without an action, which waits for the one and is waited for by the other"
        raise InvalidParams(field, f"{problem} {hint}")
    _check_order(checked, [*listed])
    if len(given.name) > model.NAME_MAX_CHARS or CONTROL.search(given.name):
        problem = f"must have at most {model.NAME_MAX_CHARS} characters, none of them a control character"
        raise InvalidParams("name", problem)
    encoded = msgspec.json.encode([given.name, given.steps, given.chain])
    try:
        plain = msgspec.json.decode(encoded)
    except msgspec.ValidationError:  # numbers beyond a double are compared as they were written
        plain = json.loads(encoded, parse_int=str, parse_float=str)
    digest = hashlib.sha256(msgspec.json.encode(plain, order="sorted")).digest()
    return CreateWorkflow(given.key, given.name, checked, digest, given.tenant)


def read_children(text: str, settings: Settings) -> list[tuple[ChildParams, NewTask]]:
    """The children that a result requests, and their tasks. Raises InvalidParams, TooLarge."""
    try:
        children = _decode_children(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("spawn", f"is wrong: {str(exc)[:200]}") from None
    if len(children) > model.MAX_CHILDREN:
        raise InvalidParams("spawn", f"holds {len(children)} children; the limit is {model.MAX_CHILDREN}")
    names: set[str] = set()
    made = []
    for place, child in enumerate(children):
        with _errors_at(f"spawn[{place}]"):
            if child.name is not None:
                check_name(child.name)
                if child.name.isdigit():
                    raise InvalidParams("name", f"is a number, {child.name!r}, as those without a name have")
                if child.name in names:
                    raise InvalidParams("name", f"is that of another child too: {child.name!r}")
                names.add(child.name)
            check_undoing(child)
            made.append((child, step_task(child, settings)))
    return made


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    """Errors of the block say at which step their field is wrong."""
    try:
        yield
    except InvalidParams as exc:
        raise InvalidParams(f"{place}.{exc.data['field']}", exc.data["problem"]) from None
    except TooLarge as exc:
        raise TooLarge(f"{place}.payload", exc.data["size"], exc.data["limit"]) from None


# Steps


def _number_steps(steps: Mapping[str, StepParams]) -> dict[str, int]:
    """The index of each step by name. steps: by their places, which errors name. Raises InvalidParams."""
    numbers: dict[str, int] = {}
    for number, (at, step) in enumerate(steps.items()):
        with _errors_at(at):
            name = name_of(step)
            if not name:
                raise InvalidParams("name", "is missing, and there is no action to be named after")
            check_name(name)
            other = numbers.setdefault(name, number)
            if other != number:
                raise InvalidParams("name", f"is that of step {other} too: {name!r}; a step has a name of its own")
    return numbers


def _new_step(step: StepParams, numbers: dict[str, int], settings: Settings) -> NewStep:
    """numbers: of all steps by name. Raises InvalidParams, TooLarge."""
    name = name_of(step)
    after = []
    for before in dict.fromkeys([*step.after, *([step.over] if isinstance(step.over, str) else [])]):
        number = numbers.get(before)
        if number is None:
            raise InvalidParams("after", f"of {name!r} names {before[:200]!r}, and there is no such step")
        if before == name:
            raise InvalidParams("after", f"of {name!r} names itself")
        after.append(number)
    check_undoing(step)
    if step.action is None:
        return _joint(step, name, after)
    task = step_task(step, settings)
    if step.over is not None:
        return NewStep(name, StepKind.MAP, task.action, None, after, *policy_of(step), options=_map_of(step, numbers))
    if step.item_as is not None:
        raise InvalidParams("item_as", "goes with over")
    for member in ("results_as", "errors_as"):
        _check_member(getattr(step, member), member, step)
    if step.results_as is not None and step.results_as == step.errors_as:
        raise InvalidParams("errors_as", f"is the member that results_as names: {step.errors_as!r}")
    if (step.results_as or step.errors_as) and not after:
        raise InvalidParams("results_as" if step.results_as else "errors_as", "needs predecessors: give after")
    options = StepOptions(task.ordering_key, task.delay_seconds, task.expires_in_seconds)
    inputs = step.results_as, step.errors_as
    return NewStep(name, StepKind.TASK, task.action, task, after, *policy_of(step), *inputs, options)


def _joint(step: StepParams, name: str, after: list[int]) -> NewStep:
    usual = StepParams(name=step.name, after=step.after, payload=step.payload)
    given = [f.name for f in msgspec.structs.fields(step) if getattr(step, f.name) != getattr(usual, f.name)]
    if bytes(step.payload) != b"{}":
        given.append("payload")
    if given:
        raise InvalidParams("action", f"is missing, and {name!r} says {given[0]}, which is an action's")
    if not after:
        raise InvalidParams("action", f"is missing; without one, {name!r} is to join others: give after")
    return NewStep(name, StepKind.JOIN, None, None, after)


def _map_of(step: StepParams, numbers: dict[str, int]) -> StepOptions:
    for member in ("results_as", "errors_as"):
        if getattr(step, member) is not None:
            raise InvalidParams(member, "does not go with over: its tasks are given the items")
    item_as = "item" if step.item_as is None else step.item_as
    _check_member(item_as, "item_as", step)
    over = numbers[step.over] if isinstance(step.over, str) else None
    items = step.over if isinstance(step.over, list) else None
    if items is not None and (problem := model.children_problem(step.payload, items)):
        raise InvalidParams("over", problem)
    common = {f.name: getattr(step, f.name) for f in msgspec.structs.fields(ChildParams) if f.name != "name"}
    return StepOptions(over=over, items=items, item_as=item_as, template=ChildParams(**common))


def _check_member(member: str | None, field: str, step: StepParams) -> None:
    if member is None:
        return
    if not 1 <= len(member) <= model.NAME_MAX_CHARS or CONTROL.search(member):
        raise InvalidParams(field, f"must have 1 to {model.NAME_MAX_CHARS} characters, none of them a control one")
    payload = bytes(step.payload)
    if not payload.lstrip().startswith(b"{"):
        raise InvalidParams(field, "adds a member to the payload, which must be an object")
    if member in msgspec.json.decode(payload, type=dict[str, msgspec.Raw]):
        raise InvalidParams(field, f"names a member that the payload has already: {member!r}")


def policy_of(child: ChildParams) -> tuple[str, str | None]:
    """The stored failure policy, as `compensate:ACTION` if it has an action, and the action that undoes the step."""
    if isinstance(child.on_failure, Compensate):
        return f"compensate:{child.on_failure.compensate}", child.compensate
    return child.on_failure, child.compensate


def fallback_of(policy: str) -> str | None:
    """The action of a stored policy for steps without one of their own, or empty; None: nothing is undone."""
    name, _, action = policy.partition(":")
    return action if name == "compensate" else None


def step_task(step: ChildParams, settings: Settings) -> NewTask:
    """The task of a step or of a spawned child. Raises InvalidParams, TooLarge."""
    if step.action is None:
        raise InvalidParams("action", "is missing")
    params = EnqueueParams(**{name: getattr(step, name) for name in _OF_A_TASK})
    return new_task(checked(params), settings, large=False)


def _check_order(steps: Sequence[NewStep], places: Sequence[str]) -> None:
    """Raises InvalidParams for a cycle of steps, naming it. places: for errors."""
    try:
        TopologicalSorter({number: step.after for number, step in enumerate(steps)}).prepare()
    except CycleError as exc:
        numbers = exc.args[1][:0:-1]  # backwards: each step before the one that it waits for
        circle = [steps[number].name for number in numbers]
        shown = " after ".join(repr(name) for name in [*circle[:5], *(["..."] if len(circle) > 5 else []), circle[0]])
        raise InvalidParams(f"{places[numbers[0]]}.after", f"goes in a circle: {shown}") from None


def _linked_steps(chain: list[StepParams | list[StepParams]]) -> dict[str, StepParams]:
    """The steps of a chain by their places in it.

    Two groups are joined by a step without an action, so that their edges add up, and do not multiply. Raises
    InvalidParams.
    """
    steps: dict[str, StepParams] = {}
    groups = [link if isinstance(link, list) else [link] for link in chain]
    taken = Counter({step.name for group in groups for step in group if step.name is not None})
    before: list[str] = []
    for place, group in enumerate(groups):
        if not group:
            raise InvalidParams(f"chain[{place}]", "is an empty group")
        if len(group) > 1 and len(before) > 1:
            joint = _free_name("join", taken)
            steps[f"chain[{place}]"] = StepParams(name=joint, after=before)
            before = [joint]
        called = []
        for number, step in enumerate(group):
            at = f"chain[{place}][{number}]" if group is chain[place] else f"chain[{place}]"
            if step.after:
                raise InvalidParams(f"{at}.after", "goes with steps; in a chain the place says it")
            name = _free_name(name_of(step) or "join", taken) if step.name is None else step.name
            called.append(name)
            steps[at] = msgspec.structs.replace(step, name=name, after=before)
        before = called
    return steps


def check_name(name: str) -> None:
    """Raises InvalidParams."""
    check_chars(name, "name", max_chars=model.NAME_MAX_CHARS)
    if "/" in name:
        raise InvalidParams("name", f"holds a /, which names of children have: {name!r}")


def check_undoing(step: ChildParams) -> None:
    """Check the actions that undo a step. Raises InvalidParams."""
    of_policy = step.on_failure.compensate if isinstance(step.on_failure, Compensate) else None
    for member, action in (("compensate", step.compensate), ("on_failure.compensate", of_policy)):
        try:
            if action is not None:
                read_action(action)
        except InvalidParams as exc:
            raise InvalidParams(member, exc.data["problem"]) from None


def name_of(step: ChildParams) -> str:
    """The step's name, or that of its action, or empty."""
    return step.name if step.name is not None else (step.action or "").replace("/", "-")


def _free_name(name: str, taken: Counter[str]) -> str:
    """The name, with a number if it is taken. taken: names, and the last number tried for each."""
    free = name
    while free in taken:
        taken[name] += 1
        free = f"{name}-{taken[name]}"
    taken[free] = 1
    return free
