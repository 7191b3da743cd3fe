"""Workflow graphs as SVG: steps in columns by depth, lines along dependencies. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from markupsafe import Markup

from penstock.api.dashboard.formats import word
from penstock.workflows.model import Step

NODE_WIDTH, NODE_HEIGHT = 156, 46
_GAP_X, _GAP_Y, _EDGE = 52, 16, 12
_FITS = 1500  # drawings up to this width are scaled to the page
_SWEEPS = 4
_NAME_CHARS = 20


def draw(steps: Sequence[Step]) -> Markup:
    """Steps of one workflow in the colours of their states; spawned steps follow their parent."""
    edges = _edges(steps)
    columns = _order(_columns(len(steps), edges), edges)
    tallest = max(map(len, columns), default=0)
    height = tallest * (NODE_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _EDGE
    width = len(columns) * (NODE_WIDTH + _GAP_X) - _GAP_X + 2 * _EDGE
    places: dict[int, tuple[float, float]] = {}
    for across, column in enumerate(columns):
        top = (height - len(column) * (NODE_HEIGHT + _GAP_Y) + _GAP_Y) / 2
        for down, node in enumerate(column):
            places[node] = _EDGE + across * (NODE_WIDTH + _GAP_X), top + down * (NODE_HEIGHT + _GAP_Y)
    lines = [_line(places[start], places[end], spawned) for start, end, spawned in edges]
    nodes = [_node(step, *places[place]) for place, step in enumerate(steps)]
    return Markup(
        '<svg class="{kind}" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>{lines}{nodes}</svg>'
    ).format(
        kind="graph fits" if width <= _FITS else "graph",
        w=width,
        h=height,
        label=f"{len(steps)} steps",
        lines=Markup("").join(lines),
        nodes=Markup("").join(nodes),
    )


def _edges(steps: Sequence[Step]) -> list[tuple[int, int, bool]]:
    """(from, to, whether the first spawned the second), as indexes; only between these steps."""
    by_name: dict[str, int] = {}
    for place, step in enumerate(steps):
        by_name.setdefault(step.name, place)
    edges: list[tuple[int, int, bool]] = []
    for place, step in enumerate(steps):
        edges += [(by_name[name], place, False) for name in step.after if by_name.get(name, place) != place]
        if step.parent is not None and by_name.get(step.parent, place) != place:
            edges.append((by_name[step.parent], place, True))
    return edges


def _columns(count: int, edges: Sequence[tuple[int, int, bool]]) -> list[list[int]]:
    """Each step in the column behind its last predecessor. Rounds are bounded: repeated names could form a cycle."""
    depth = [0] * count
    for _ in range(count):
        moved = False
        for start, end, _spawned in edges:
            if depth[end] <= depth[start] and depth[start] + 1 < count:
                depth[end] = depth[start] + 1
                moved = True
        if not moved:
            break
    columns: dict[int, list[int]] = defaultdict(list)
    for place, column in enumerate(depth):
        columns[column].append(place)
    return [columns[column] for column in sorted(columns)]


def _order(columns: list[list[int]], edges: Sequence[tuple[int, int, bool]]) -> list[list[int]]:
    """Sort each column by the mean position of its neighbours, in sweeps both ways, so that few lines cross."""
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for start, end, _spawned in edges:
        before[end].append(start)
        after[start].append(end)
    for sweep in range(_SWEEPS):
        neighbours = before if sweep % 2 == 0 else after
        rank = {node: place / max(1, len(column)) for column in columns for place, node in enumerate(column)}

        def middle(node: int, near: dict[int, list[int]] = neighbours, rank: dict[int, float] = rank) -> float:
            found = near[node]
            return sum(rank[one] for one in found) / len(found) if found else rank[node]

        for column in columns if sweep % 2 == 0 else reversed(columns):
            column.sort(key=middle)
            rank |= {node: place / max(1, len(column)) for place, node in enumerate(column)}
    return columns


def _line(start: tuple[float, float], end: tuple[float, float], spawned: bool) -> Markup:
    x1, y1 = start[0] + NODE_WIDTH, start[1] + NODE_HEIGHT / 2
    x2, y2 = end[0] - 2, end[1] + NODE_HEIGHT / 2
    bend = max(24.0, (x2 - x1) / 2)
    curve = Markup("M{:.0f},{:.0f} C{:.0f},{:.0f} {:.0f},{:.0f} {:.0f},{:.0f}").format(
        x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2
    )
    kind = "edge spawned" if spawned else "edge"
    return Markup('<path class="{}" marker-end="url(#tip)" d="{}"/>').format(kind, curve)


def _node(step: Step, x: float, y: float) -> Markup:
    name = step.name if len(step.name) <= _NAME_CHARS else step.name[: _NAME_CHARS - 1] + "…"
    state = word(step.state)
    if step.children:
        state += f" · {step.children - step.open_children}/{step.children} children"
    inner = Markup(
        '<title>{title}</title><rect x="{x:.0f}" y="{y:.0f}" width="{w}" height="{h}" rx="8"/>'
        '<rect class="stripe" x="{x:.0f}" y="{y:.0f}" width="5" height="{h}" rx="2.5"/>'
        '<text class="name" x="{tx:.0f}" y="{ty:.0f}">{name}</text>'
        '<text class="state" x="{tx:.0f}" y="{sy:.0f}">{state}</text>'
    ).format(
        title=f"{step.name}: {word(step.state)}" + (f", {step.action}" if step.action else ""), x=x, y=y,
        w=NODE_WIDTH, h=NODE_HEIGHT, tx=x + 16, ty=y + 19, sy=y + 35, name=name, state=state,
    )  # fmt: skip
    group = Markup('<g class="node s-{}">{}</g>').format(str(step.state).lower(), inner)
    return group if step.task_id is None else Markup('<a href="/tasks/{}">{}</a>').format(step.task_id, group)
