"""The layout of workflow graphs: steps in columns by depth, lines along dependencies. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from penstock.workflows.model import Step

NODE_WIDTH, NODE_HEIGHT = 156, 46
_GAP_X, _GAP_Y, _EDGE = 52, 16, 12
_SWEEPS = 4


def layout(steps: Sequence[Step]) -> dict[str, Any]:
    """Places of the steps of one workflow, and lines between them; spawned steps follow their parent."""
    first = {step.name: place for place, step in reversed([*enumerate(steps)])}
    edges = [
        (first[name], place, is_spawned)
        for place, step in enumerate(steps)
        for name, is_spawned in [*((name, False) for name in step.after), (step.parent or "", True)]
        if first.get(name, place) != place
    ]
    columns = _order(_columns(len(steps), edges), edges)
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
        "nodes": [(step, places[place]) for place, step in enumerate(steps)],
        "lines": [(places[start], places[end], is_spawned) for start, end, is_spawned in edges],
    }


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
    for sweep in range(_SWEEPS):
        is_forward = sweep % 2 == 0
        neighbours = before if is_forward else after
        rank = {node: place / len(column) for column in columns for place, node in enumerate(column)}
        for column in columns if is_forward else reversed(columns):
            middle = {node: fmean([rank[one] for one in neighbours[node]] or [rank[node]]) for node in column}
            column.sort(key=middle.__getitem__)
            rank |= {node: place / len(column) for place, node in enumerate(column)}
    return columns
