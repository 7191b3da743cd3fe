"""`penstock stats`: counts, rates and lag."""

from __future__ import annotations

from typing import Any

import typer

from penstock.cli.common import calling, print_fields, print_table
from penstock.cli.parameters import ParamsOf, expanded
from penstock.cli.values import state_label
from penstock.tasks.params import StatsParams


def add_to(app: typer.Typer) -> None:
    stats = calling("stats", ParamsOf(StatsParams), "Show counts per state and action, rates and lag.", _print_stats)
    app.command("stats", rich_help_panel="Tasks")(expanded(stats))


def _print_stats(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if not isinstance(value, dict) or not value:
            print_fields([(name, value or "none")])
            continue
        typer.echo(f"{name}:")
        if all(isinstance(inner, dict) for inner in value.values()):
            columns = sorted({column for inner in value.values() for column in inner})
            rows = [[key, *(inner.get(column) for column in columns)] for key, inner in value.items()]
            shown = [state_label(column) for column in columns]
            print_table([name, *shown], rows, right=shown)
        else:
            print_fields((f"  {state_label(key)}", inner) for key, inner in value.items())
