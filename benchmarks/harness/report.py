"""Reports: the median of several runs, rows for a table, everything as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import describe_machine
from penstock.settings.model import Settings

TABLE = "table"  # figures under this name are rows of a table of their own
_SECRET = {"database_url", "api_key", "api_keys"}


def median_of(runs: Sequence[Any]) -> Any:
    """The median of every number on its own, through dicts and lists of one shape; of anything else the first."""
    first = runs[0]
    if isinstance(first, Mapping):
        names = [name for name in first if all(isinstance(run, Mapping) and name in run for run in runs)]
        return {name: median_of([run[name] for run in runs]) for name in names}
    if isinstance(first, list) and all(isinstance(run, list) and len(run) == len(first) for run in runs):
        return [median_of(items) for items in zip(*runs, strict=True)]
    if all(isinstance(run, int | float) and not isinstance(run, bool) for run in runs):
        middle = statistics.median(runs)
        return round(middle) if all(isinstance(run, int) for run in runs) else round(middle, 5)
    return first


def flat_rows(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) pairs; what is flat fills one line, what is nested gets a line for each part."""
    for name, value in figures.items():
        if name == TABLE:
            continue
        if isinstance(value, Mapping) and any(isinstance(part, Mapping) for part in value.values()):
            yield from flat_rows(value, f"{prefix}{name}.")
        else:
            yield prefix + name, shown(value)


def table_of(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """Columns and rows of the scenario's own table, where it has one; the costs stay in the JSON."""
    rows = figures.get(TABLE)
    if not rows:
        return None
    columns = [name for name in rows[0] if name != "cost"]
    return columns, [[shown(row.get(name)) for name in columns] for row in rows]


def shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)


def make_report(
    scenarios: Mapping[str, Sequence[Mapping[str, Any]]], options: Mapping[str, Any], settings: Settings
) -> dict[str, Any]:
    """What goes into the JSON file; of each scenario the medians, and its runs where there were several."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "options": dict(options),
        "settings": settings.model_dump(mode="json", exclude=_SECRET),
        "scenarios": {
            name: {"figures": median_of(runs)} | ({"runs": list(runs)} if len(runs) > 1 else {})
            for name, runs in scenarios.items()
        },
    }


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
