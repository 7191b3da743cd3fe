"""The figures and the chart of a soak; a soak itself is `make soak`."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from tests.soak.__main__ import KILLED, figures, growth, seconds_between_kills
from tests.soak.chart import chart


def sample(at: float, **changes: Any) -> dict[str, Any]:
    return {
        "at": at, "rate": 50.0, "p50_ms": 10.0, "p99_ms": 30.0, "memory_mb": {"api": 60.0}, "files": {"api": 12},
        "connections": 9.0, "wal": at * 2**20, "dead_rows": 3.0, "table_bytes": 2.0**20, "other_bytes": 2.0**20,
        "live": 4.0,
    } | changes  # fmt: skip


def test_growth_compares_the_last_quarter_with_the_second() -> None:
    assert growth([9.0, 10.0, 50.0, 11.0]) == 0.1
    assert growth([9.0, None, 10.0, 10.0, 50.0, 50.0, 12.0, None]) == 0.2
    assert growth([1.0, 2.0]) is None
    assert growth([0.0] * 8) is None


def test_each_quarter_has_whole_rounds_of_kills() -> None:
    assert seconds_between_kills(2 * 3600) == 1800 / (4 * len(KILLED))
    assert seconds_between_kills(90) == 60.0


def test_the_chart_has_a_line_for_each_figure() -> None:
    shown = figures([sample(1), sample(2, p99_ms=None), sample(4, memory_mb={"api": 66.0, "<worker>": 1.0})])
    assert shown["WAL, MiB/interval"]["wal"] == [None, 1.0, 2.0]
    assert shown["memory, MiB"] == {"<worker>": [None, None, 1.0], "api": [60.0, 60.0, 66.0]}
    root = ElementTree.fromstring(chart("50 < 60", [1, 2, 4], shown))
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == sum(len(one) for one in shown.values())
    assert lines[0].get("points", "").count(",") == 3
