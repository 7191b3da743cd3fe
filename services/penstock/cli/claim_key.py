"""`penstock claim-key`: a new key for the claim ids that workers are given."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from penstock.cli.database import Database
from penstock.cli.options import expanded

# SQS keeps a message for at most this long, so no result under an older id can arrive later.
ACCEPTED_DAYS = 14.0


def add_to(app: typer.Typer) -> None:
    app.command("claim-key", rich_help_panel="Set-up")(expanded(claim_key))


def claim_key(
    *,
    accept_older_days: Annotated[
        float, typer.Option(min=0, max=365, help="Days for which ids made with older keys are accepted.")
    ] = ACCEPTED_DAYS,
    database: Database,
) -> None:
    """Create a new key for the claim ids that workers are given; schedulers use it within a minute.

    With --accept-older-days 0, after a leak of the database, results of tasks in flight are refused: those tasks run
    again.
    """
    seconds = accept_older_days * 86_400
    older = database.run(lambda session: session.value("change_claim_key", secrets.token_bytes(32), seconds))
    database.show(
        {"older": older, "accepted_seconds": seconds},
        lambda _: typer.echo(f"created a key; {older} older keys are accepted for {accept_older_days:g} days"),
    )
