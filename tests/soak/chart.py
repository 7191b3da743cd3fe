"""Figures over time as an SVG: one small chart each, below each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _GAP = 900, 110, 190, 34
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0550ae")


def chart(title: str, seconds: Sequence[float], charts: Mapping[str, Mapping[str, Sequence[float | None]]]) -> str:
    """charts: by what they show, with its unit; of each the lines by name, one value for each instant or None."""
    height = 40 + len(charts) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="10" y="22" font-size="16">{escape(title)}</text>',
    ]
    for place, (label, lines) in enumerate(charts.items()):
        parts += _panel(40 + place * (_HEIGHT + _GAP), label, seconds, lines)
    return "\n".join([*parts, "</svg>", ""])


def _panel(top: float, label: str, seconds: Sequence[float], lines: Mapping[str, Sequence[float | None]]) -> list[str]:
    values = [value for line in lines.values() for value in line if value is not None]
    most, length = max(values, default=0.0) or 1.0, max(seconds, default=0.0) or 1.0
    parts = [
        f'<text x="10" y="{top + 14}">{escape(label)}</text>'
        f'<text x="{_LEFT - 8}" y="{top + 10}" text-anchor="end" fill="#57606a">{most:,.4g}</text>'
        f'<text x="{_LEFT - 8}" y="{top + _HEIGHT}" text-anchor="end" fill="#57606a">0</text>'
        f'<text x="{_LEFT + _WIDTH}" y="{top + _HEIGHT + 14}" text-anchor="end" fill="#57606a">'
        f"{length / 60:,.4g} min</text>"
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#d0d7de"/>'
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{_LEFT + _WIDTH * at / length:.1f},{top + _HEIGHT - _HEIGHT * value / most:.1f}"
            for at, value in zip(seconds, line, strict=True)
            if value is not None
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(lines) > 1:
            parts.append(
                f'<text x="10" y="{top + 30 + 11 * number}" font-size="10" fill="{colour}">{escape(name)}</text>'
            )
    return parts
