"""`penstock config show`: each setting, its value and its source."""

import json
from typing import Annotated, Any

import typer

from penstock.cli.common import Shown, load_settings, print_table
from penstock.cli.parameters import Commands
from penstock.protocol.spelling import did_you_mean


def show(
    *,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME")] = None,
    changed: bool = False,
    shown: Shown,
) -> None:
    """Show each setting with its value and its source: environment, penstock.toml or default.

    Secrets are masked. Reads the current folder and environment, as a process started here would.

    names: Settings, as max_attempts or PENSTOCK_MAX_ATTEMPTS; default all.
    changed: Only settings that are set.
    """
    from penstock.settings.model import Settings, misspelt_variables, sources_of
    from penstock.settings.values import PREFIX

    settings = load_settings()
    sources = sources_of(settings)
    wanted = [name.lower().removeprefix(PREFIX.lower()) for name in names or Settings.model_fields]
    unknown = [name for name in wanted if name not in Settings.model_fields]
    if unknown:
        raise typer.BadParameter(f"unknown setting {unknown[0]!r}{did_you_mean(unknown[0], Settings.model_fields)}")
    values = settings.model_dump(mode="json")  # which masks secrets
    rows = [
        {"name": PREFIX + name.upper(), "value": values[name], "source": sources[name]}
        for name in wanted
        if not changed or sources[name] != "default"
    ]
    cells = [(row["name"], _text(row["value"]), row["source"]) for row in rows]
    shown.show(rows, lambda _: print_table(("setting", "value", "from"), cells))
    for seen, meant in misspelt_variables():
        typer.echo(f"{seen} is not a setting; did you mean {meant}?", err=True)


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


config = Commands("The settings that a process started here would use.", show=show)
