"""Charts as SVG: shapes with classes that the stylesheet colours, no inline style. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from penstock.api.dashboard.formats import compact, number

_HEIGHT = 100.0


class Series(NamedTuple):
    """kind: its class in the stylesheet."""

    label: str
    kind: str
    values: Sequence[float]


def nice_top(value: float) -> float:
    """The top of an axis: the next 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten."""
    if value < 1e-9:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999)


def columns(stacked: Sequence[Series], line: Series | None, labels: Sequence[str], unit: str) -> Markup:
    """Stacked columns and a line, one value for each label, with an axis and a tooltip for each column."""
    count = len(labels)
    sums = [sum(series.values[place] for series in stacked) for place in range(count)]
    top = nice_top(max([*sums, *(line.values if line else [0.0]), 0.0]))
    width = 10.0 * count
    parts = [Markup('<line class="rule" x1="0" x2="{}" y1="{}" y2="{}"/>').format(width, y, y) for y in (0, 50, 100)]
    for place, label in enumerate(labels):
        floor = _HEIGHT
        texts = [f"{series.label} {number(series.values[place])}" for series in stacked]
        if line:
            texts.insert(0, f"{line.label} {number(line.values[place])}")
        shapes = []
        for series in stacked:
            height = series.values[place] / top * _HEIGHT
            if height <= 0:
                continue
            floor -= height
            shape = '<rect class="{}" x="{:.1f}" y="{:.2f}" width="8" height="{:.2f}"/>'
            shapes.append(Markup(shape).format(series.kind, place * 10 + 1, floor, height))
        hover = Markup('<rect class="hover" x="{}" y="0" width="10" height="100"/>').format(place * 10)
        title = Markup("<title>{}\n{}</title>").format(label, f"{', '.join(texts)} {unit}")
        parts.append(Markup("<g>{}{}{}</g>").format(title, hover, Markup("").join(shapes)))
    if line:
        points = " ".join(f"{p * 10 + 5},{_HEIGHT - v / top * _HEIGHT:.2f}" for p, v in enumerate(line.values))
        parts.append(Markup('<polyline class="line {}" points="{}"/>').format(line.kind, points))
    drawn = Markup('<svg viewBox="0 0 {} 100" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>').format(
        width, f"{unit}; highest {number(max(sums, default=0))}", Markup("").join(parts)
    )
    ticks = Markup("").join(Markup("<span>{}</span>").format(compact(value)) for value in (top, top / 2, 0))
    ends = [labels[0], labels[count // 2], labels[-1]] if labels else []
    below = Markup("").join(Markup("<span>{}</span>").format(label) for label in ends)
    return Markup(
        '<div class="plot"><div class="y">{}</div><div class="field">{}</div><div class="x">{}</div></div>'
    ).format(ticks, drawn, below)


def sparkline(values: Sequence[float], kind: str) -> Markup:
    """A small area chart without axes."""
    top = max([*values, 0.0]) or 1.0
    last = max(1, len(values) - 1)
    points = [f"{place / last * 100:.2f},{28 - value / top * 26:.2f}" for place, value in enumerate(values)]
    return Markup(
        '<svg class="spark {}" viewBox="0 0 100 28" preserveAspectRatio="none" aria-hidden="true">'
        '<polygon points="0,28 {} 100,28"/><polyline points="{}"/></svg>'
    ).format(kind, " ".join(points), " ".join(points))


def share_bar(parts: Mapping[str, float]) -> Markup:
    """One bar divided by class, each part as wide as its share."""
    total = sum(parts.values()) or 1.0
    at, drawn = 0.0, []
    for kind, value in parts.items():
        width = value / total * 100
        shape = '<rect class="{}" x="{:.3f}" y="0" width="{:.3f}" height="10"><title>{}</title></rect>'
        drawn.append(
            Markup(shape).format(kind, at, width, f"{kind.removeprefix('s-').replace('_', ' ')}: {number(value)}")
        )
        at += width
    return Markup(
        '<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(
        ", ".join(f"{kind.removeprefix('s-')} {number(value)}" for kind, value in parts.items()),
        Markup("").join(drawn),
    )


def bar(value: float, top: float, kind: str) -> Markup:
    """A bar as long as the share of ``value`` in ``top``."""
    return Markup(
        '<svg class="bar {}" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="6" rx="3"/><rect width="{:.2f}" height="6" rx="3"/></svg>'
    ).format(kind, max(1.0, value / top * 100) if top > 0 and value > 0 else 0)


def quantiles(values: tuple[float, float, float], low: float, top: float) -> Markup:
    """p50 to p99 on a logarithmic scale: a band, with a mark at p95."""

    def place(seconds: float) -> float:
        if top <= low:
            return 50.0
        return min(98.0, max(1.0, math.log(max(seconds, low) / low) / math.log(top / low) * 98))

    p50, p95, p99 = map(place, values)
    return Markup(
        '<svg class="quantiles" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" y="4" width="100" height="2"/>'
        '<rect class="band" x="{:.2f}" y="3" width="{:.2f}" height="4"/>'
        '<rect class="mark p50" x="{:.2f}" y="1" width="1.2" height="8"/><rect class="mark" x="{:.2f}" y="2" width="1" '
        'height="6"/></svg>'
    ).format(p50, max(1.0, p99 - p50), p50, p95)


def percentile(ordered: Sequence[float], share: float) -> float:
    """ordered: ascending; 0 if empty."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
