"""`penstock claim-key`: a new key for the ids under which workers are given tasks."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.common import DataDirOption, print_json
from penstock.cli.keys import in_database, settings_of
from penstock.cli.processes import DatabaseUrlOption

# SQS keeps a message for at most this long, so no result of an id made before can come later.
ACCEPTED_DAYS = 14.0


def add_to(app: typer.Typer) -> None:
    app.command("claim-key", rich_help_panel="Set-up")(claim_key)


def claim_key(
    accept_older_days: Annotated[
        float, typer.Option(min=0, max=365, help="Days for which ids made with the keys before are accepted.")
    ] = ACCEPTED_DAYS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    database_url: DatabaseUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make a new key for the ids under which workers are given tasks; schedulers use it within a minute.

    With --accept-older-days 0, after the database has leaked, results of tasks in flight are refused: those tasks run
    again.
    """
    import secrets

    seconds = accept_older_days * 86_400
    settings = settings_of(database_url, data_dir)
    older = in_database(settings, lambda session: session.value("change_claim_key", secrets.token_bytes(32), seconds))
    if as_json:
        print_json({"older": older, "accepted_seconds": seconds})
    else:
        typer.echo(f"made a new key; {older} older are accepted for {accept_older_days:g} days")
