"""`penstock stats`: counts, rates and lag."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    given,
    print_fields,
    print_json,
    print_table,
)


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel="Tasks")(stats)


def stats(
    tenant: Annotated[
        str | None, typer.Option(show_default=False, help="Counts of this tenant alone, among the newest records.")
    ] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Show counts per state and action, rates and lag."""
    result = connect(api_url, data_dir).call("stats", given({"tenant": tenant}))
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            typer.echo(f"{name}:")
            columns = list(value[0])
            print_table(columns, [[row.get(column) for column in columns] for row in value])
        elif isinstance(value, dict) and value:
            _print_counts(name, value)
        else:
            print_fields([(name, "none" if value is None or value in ([], {}) else value)])


def _print_counts(name: str, value: dict[str, Any]) -> None:
    """A mapping of counts; of mappings of counts, as a table with one row each."""
    typer.echo(f"{name}:")
    if all(isinstance(inner, dict) for inner in value.values()):
        columns = sorted({column for inner in value.values() for column in inner})
        rows = [[key, *(inner.get(column) for column in columns)] for key, inner in value.items()]
        print_table([name, *columns], rows, right=columns)
    else:
        print_fields((f"  {key}", inner) for key, inner in value.items())
