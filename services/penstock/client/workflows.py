"""A builder of workflows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

from penstock.protocol.options import StepOptions
from penstock.protocol.requests import given, prepared


class Step:
    """A step of a Workflow under construction."""

    def __init__(self, name: str, members: dict[str, Any]) -> None:
        self.name = name
        self.members = members

    def after(self, *others: Step) -> Step:
        """Run it after these steps too; returns it."""
        known = self.members.setdefault("after", [])
        known += [other.name for other in others if other.name not in known]
        return self


class Workflow:
    """A graph of steps, built one at a time and then given to ``client.workflows.create``.

    name: for display. key: the same key and definition again return the first workflow.
    """

    def __init__(self, name: str = "", *, key: str | None = None) -> None:
        self.name = name
        self.key = key
        self._steps: dict[str, Step] = {}
        self._numbers: dict[str, int] = {}

    def step(
        self,
        action: str,
        payload: Any = None,
        *,
        name: str | None = None,
        after: Step | Iterable[Step] = (),
        **options: Unpack[StepOptions],
    ) -> Step:
        """Add a step. name: None for its action, with a number if that is taken.

        options: results_as, errors_as, on_failure, compensate, and those of ``enqueue`` but unique_key, unique,
        on_duplicate and tenant. Raises ValueError for a name that is taken.
        """
        members = {"action": action} | ({} if payload is None else {"payload": payload}) | prepared(options)
        return self._add(action.replace("/", "-") if name is None else name, name is None, members, after)

    def map(
        self,
        action: str,
        over: Step | Sequence[Any],
        payload: Any = None,
        *,
        item_as: str = "item",
        name: str | None = None,
        after: Step | Iterable[Step] = (),
        **options: Unpack[StepOptions],
    ) -> Step:
        """Add a step that runs the action once for each item of a list, or of the list that a step returns.

        Each task receives ``payload`` and its item as the member ``item_as``. The steps after it wait for all and
        receive an array of their results. Otherwise as ``step``.
        """
        step = self.step(action, payload, name=name, after=after, **options)
        step.members |= {"over": over.name if isinstance(over, Step) else list(over), "item_as": item_as}
        return step

    def join(self, *steps: Step, name: str | None = None) -> Step:
        """Add a step without a task, which is done when these are; the steps after it receive their results."""
        return self._add("join" if name is None else name, name is None, {}, steps)

    def chain(self, *links: Step | Sequence[Step]) -> None:
        """Order steps one after the other; a sequence of steps is a group that runs side by side."""
        before: Sequence[Step] = ()
        for link in links:
            group = (link,) if isinstance(link, Step) else tuple(link)
            if len(before) > 1 and len(group) > 1:
                before = (self.join(*before),)  # their widths add up, and do not multiply
            for step in group:
                step.after(*before)
            before = group

    def params(self) -> dict[str, Any]:
        """The parameters of ``workflow.create``."""
        steps = [{"name": step.name, **step.members} for step in self._steps.values()]
        return {"steps": steps} | given(name=self.name or None, key=self.key)

    def _add(self, name: str, may_number: bool, members: dict[str, Any], after: Step | Iterable[Step]) -> Step:
        free = name
        while may_number and free in self._steps:
            self._numbers[name] = self._numbers.get(name, 1) + 1
            free = f"{name}-{self._numbers[name]}"
        if free in self._steps:
            raise ValueError(f"a step named {name!r} is there already: give this one another name")
        step = self._steps[free] = Step(free, members)
        return step.after(*((after,) if isinstance(after, Step) else after))
