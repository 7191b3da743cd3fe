"""Reads definitions of workflows, children requested by a result, and ids; without I/O."""

from __future__ import annotations

import hashlib
import json

import msgspec

from penstock.protocol.checks import CONTROL
from penstock.protocol.errors import InvalidParams
from penstock.protocol.task import KEY_MAX_CHARS, NewTask
from penstock.protocol.tenant import read_tenant
from penstock.settings.model import Settings
from penstock.workflows import steps
from penstock.workflows.model import (
    MAX_CHILDREN,
    MAX_EDGES,
    MAX_STEPS,
    NAME_MAX_CHARS,
    ChildParams,
    CreateWorkflow,
    WorkflowCreateParams,
)


def read_create(given: WorkflowCreateParams, settings: Settings) -> CreateWorkflow:
    """Raises InvalidParams, naming the step, and TooLarge."""
    if (given.steps is None) == (given.chain is None):
        raise InvalidParams("steps", "or chain must be given, not both")
    if given.steps is not None:
        listed, field = given.steps, "steps"
    else:
        listed, field = steps.linked_steps(given.chain or []), "chain"
    if not 1 <= len(listed) <= MAX_STEPS:
        raise InvalidParams(field, f"must hold 1 to {MAX_STEPS} steps, not {len(listed)}")
    numbers = steps.number_steps(listed, field)
    checked = [steps.new_step(step, f"{field}[{place}]", numbers, settings) for place, step in enumerate(listed)]
    edges = sum(len(step.after) for step in checked)
    if edges > MAX_EDGES:
        raise InvalidParams(
            field,
            f"follow each other {edges} times; the limit is {MAX_EDGES}. Between two wide groups put a step without "
            "an action, which waits for the one and is waited for by the other",
        )
    steps.check_order(checked, field)
    check_key(given.key)
    if len(given.name) > NAME_MAX_CHARS or CONTROL.search(given.name):
        raise InvalidParams("name", f"must have at most {NAME_MAX_CHARS} characters, none of them a control character")
    return CreateWorkflow(given.key, given.name, checked, _definition(given), read_tenant(given.tenant))


def read_children(text: str, settings: Settings) -> list[tuple[ChildParams, NewTask]]:
    """The children that a result requests, and their tasks. Raises InvalidParams, TooLarge."""
    try:
        children = _decode_children(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidParams("spawn", f"is wrong: {str(exc)[:200]}") from None
    if len(children) > MAX_CHILDREN:
        raise InvalidParams("spawn", f"holds {len(children)} children; the limit is {MAX_CHILDREN}")
    names: set[str] = set()
    made = []
    for place, child in enumerate(children):
        at = f"spawn[{place}]"
        if child.name is not None:
            steps.check_name(child.name, at)
            if child.name.isdigit():
                raise InvalidParams(f"{at}.name", f"is a number, {child.name!r}, as those without a name have")
            if child.name in names:
                raise InvalidParams(f"{at}.name", f"is that of another child too: {child.name!r}")
            names.add(child.name)
        steps.check_action(child.compensate, f"{at}.compensate")
        made.append((child, steps.named_task(child, at, settings)))
    return made


_decode_children = msgspec.json.Decoder(list[ChildParams]).decode


def _definition(given: WorkflowCreateParams) -> bytes:
    encoded = msgspec.json.encode([given.name, given.steps, given.chain])
    try:
        plain = msgspec.json.decode(encoded)
    except msgspec.ValidationError:  # numbers beyond a double are compared as they were written
        plain = json.loads(encoded, parse_int=str, parse_float=str)
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).digest()


def check_key(key: str | None) -> None:
    """Raises InvalidParams."""
    if key is not None and (not 1 <= len(key) <= KEY_MAX_CHARS or CONTROL.search(key)):
        raise InvalidParams("key", f"must have 1 to {KEY_MAX_CHARS} characters, none of them a control character")
