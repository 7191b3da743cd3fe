"""The layout of workflow graphs: steps in columns by depth, lines along dependencies. Pure."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from penstock.protocol.answers import StateName, Step
from penstock.protocol.task import State

NODE_WIDTH, NODE_HEIGHT = 156, 46
_GAP_X, _GAP_Y, _EDGE = 52, 16, 12
FAN_OUT = 8  # alike steps; more of them are drawn as one
# Of a fan-out, the first that any step is in.
_TELLING = (State.CRITICAL_ERROR, State.ERROR, State.ACQUIRED, State.SCHEDULED, State.WAITING, State.CANCELLED)


class Node(NamedTuple):
    """What is drawn: a step, or alike ones. step: the first. counts: steps by state."""

    step: Step
    state: StateName
    size: int
    counts: Sequence[tuple[StateName, int]]


def layout(steps: Sequence[Step], opened: str | None = None) -> dict[str, Any]:
    """Places of the steps of one workflow, and lines between them; spawned steps follow their parent.

    opened: the number of the first step of a fan-out whose steps are drawn one by one; ``all``; None for no fan-out.
    """
    groups = _groups(steps, opened)
    first = {step.name: place for place, group in reversed([*enumerate(groups)]) for step in group}
    edges = [*dict.fromkeys(
        (first[name], place, is_spawned)
        for place, group in enumerate(groups)
        for step in group
        for name, is_spawned in [*((name, False) for name in step.after), (step.parent or "", True)]
        if first.get(name, place) != place
    )]  # fmt: skip
    columns = _order(_columns(len(groups), edges), edges)
    height = max(map(len, columns), default=0) * (NODE_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _EDGE
    places: dict[int, tuple[float, float]] = {}
    for across, column in enumerate(columns):
        top = (height - len(column) * (NODE_HEIGHT + _GAP_Y) + _GAP_Y) / 2
        for down, node in enumerate(column):
            places[node] = _EDGE + across * (NODE_WIDTH + _GAP_X), top + down * (NODE_HEIGHT + _GAP_Y)
    return {
        "width": len(columns) * (NODE_WIDTH + _GAP_X) - _GAP_X + 2 * _EDGE,
        "height": height,
        "node_width": NODE_WIDTH,
        "node_height": NODE_HEIGHT,
        "nodes": [(_node(group), places[place]) for place, group in enumerate(groups)],
        "lines": [(places[start], places[end], is_spawned) for start, end, is_spawned in edges],
    }


def _groups(steps: Sequence[Step], opened: str | None) -> list[list[Step]]:
    """Steps that are drawn as one: of one action, behind the same steps."""
    alike: dict[tuple[Any, ...], list[Step]] = defaultdict(list)
    for step in steps:
        alike[step.kind, step.action, step.parent, *step.after].append(step)
    groups: list[list[Step]] = []
    for group in alike.values():
        is_whole = len(group) > FAN_OUT and opened not in ("all", str(group[0].number))
        groups += [group] if is_whole else [[step] for step in group]
    return sorted(groups, key=lambda group: group[0].number)


def _node(group: Sequence[Step]) -> Node:
    counts = Counter(step.state for step in group)
    state = next((state for state in _TELLING if counts[state]), State.SUCCESS)
    return Node(group[0], state, len(group), counts.most_common())


def _columns(count: int, edges: Sequence[tuple[int, int, bool]]) -> list[list[int]]:
    """Each step in the column behind its last predecessor. Rounds are bounded: repeated names could form a cycle."""
    depth = [0] * count
    for _ in range(count):
        late = [(start, end) for start, end, _ in edges if depth[end] <= depth[start] < count - 1]
        for start, end in late:
            depth[end] = max(depth[end], depth[start] + 1)
        if not late:
            break
    return [[node for node in range(count) if depth[node] == column] for column in sorted(set(depth))]


def _order(columns: list[list[int]], edges: Sequence[tuple[int, int, bool]]) -> list[list[int]]:
    """Sort each column by the mean position of its neighbours, in sweeps both ways, so that few lines cross."""
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for start, end, _spawned in edges:
        before[end].append(start)
        after[start].append(end)
    for neighbours, ordered in 2 * ((before, columns), (after, columns[::-1])):
        rank = {node: place / len(column) for column in columns for place, node in enumerate(column)}
        for column in ordered:
            middle = {node: fmean([rank[one] for one in neighbours[node]] or [rank[node]]) for node in column}
            column.sort(key=middle.__getitem__)
            rank |= {node: place / len(column) for place, node in enumerate(column)}
    return columns
