"""Visits every state of a model, breadth first, so a counterexample is a shortest one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

State = Any  # hashable
Step = tuple[str, State]


class Model(NamedTuple):
    """steps: what may happen next. broken: which property a state contradicts, or None. is_over: nothing has to happen
    any more. faults: names of steps that nothing may rely on, such as a cancellation. seen: what an observer of
    Postgres sees of a state. bugs: names of mistakes that `steps` makes when it is given one."""

    name: str
    beginning: State
    steps: Callable[[State, str | None], Iterator[Step]]
    broken: Callable[[State], str | None]
    is_over: Callable[[State], bool]
    seen: Callable[[State], Any]
    bugs: Sequence[str]
    faults: frozenset[str]


class Counterexample(NamedTuple):
    problem: str
    path: list[Step]

    def __str__(self) -> str:
        return "\n".join([self.problem, *(f"  {name:<12} {state}" for name, state in self.path)])


def check(model: Model, bug: str | None = None) -> tuple[int, Counterexample | None]:
    """How many states there are, and a shortest way to one that contradicts a property, or that cannot end."""
    came: dict[State, Step | None] = {model.beginning: None}
    before: dict[State, list[State]] = {}
    todo = deque([model.beginning])
    while todo:
        state = todo.popleft()
        problem = model.broken(state)
        if problem is not None:
            return len(came), Counterexample(problem, _path(came, state))
        for name, after in model.steps(state, bug):
            if name not in model.faults:
                before.setdefault(after, []).append(state)
            if after not in came:
                came[after] = (name, state)
                todo.append(after)
    ending = {state for state in came if model.is_over(state)}
    todo = deque(ending)
    while todo:
        for state in before.get(todo.popleft(), ()):
            if state not in ending:
                ending.add(state)
                todo.append(state)
    stuck = next((state for state in came if state not in ending), None)
    return len(came), None if stuck is None else Counterexample("it can never end", _path(came, stuck))


def _path(came: dict[State, Step | None], state: State) -> list[Step]:
    path = []
    step = came[state]
    while step is not None:
        name, earlier = step
        path.append((name, state))
        state, step = earlier, came[earlier]
    return path[::-1]


def replay(model: Model, observations: Iterable[Any]) -> int | None:
    """Whether the model can show these one after the other; returns the place of the first that it cannot."""
    seen_last, states = model.seen(model.beginning), {model.beginning}
    for place, observation in enumerate(observations):
        if observation == seen_last:
            continue
        reached, todo = set(states), deque(states)
        states = set()
        while todo:
            for _, after in model.steps(todo.popleft(), None):
                if model.seen(after) == observation:
                    states.add(after)
                elif model.seen(after) == seen_last and after not in reached:
                    reached.add(after)
                    todo.append(after)
        if not states:
            return place
        seen_last = observation
    return None
