"""Names of steps and of what they refer to: which may be given, and which are given to those without. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.protocol.checks import CONTROL
from penstock.protocol.errors import InvalidParams
from penstock.workflows.params import NAME_MAX_CHARS, ChildParams


def check_name(name: str, at: str) -> None:
    """Of a step. Raises InvalidParams."""
    if not 1 <= len(name) <= NAME_MAX_CHARS:
        raise InvalidParams(f"{at}.name", f"must have 1 to {NAME_MAX_CHARS} characters, not {len(name)}")
    if CONTROL.search(name):
        raise InvalidParams(f"{at}.name", "holds a control character")
    if "/" in name:
        raise InvalidParams(f"{at}.name", f"holds a /, which names of children have: {name!r}")


def check_action(action: str | None, field: str) -> None:
    """Of an action that undoes. Raises InvalidParams."""
    if action is not None and (not 1 <= len(action) <= NAME_MAX_CHARS or CONTROL.search(action)):
        raise InvalidParams(field, f"must be an action's name, of 1 to {NAME_MAX_CHARS} characters")


def name_of(step: ChildParams) -> str:
    """Its own, or that of its action; empty where it has neither."""
    return step.name if step.name is not None else (step.action or "").replace("/", "-")


def child_names(parent: str, children: Iterable[ChildParams], first: int = 0) -> list[str]:
    """What the children of a step are called."""
    return [f"{parent}/{number if child.name is None else child.name}" for number, child in enumerate(children, first)]


class FreeNames:
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
