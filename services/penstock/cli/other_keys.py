"""`penstock claim-key` and `penstock payload-key`: keys that are not API keys, which are `penstock keys`."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from penstock.cli.common import print_json
from penstock.cli.database import Database
from penstock.cli.parameters import expanded


def add_to(app: typer.Typer) -> None:
    app.command("payload-key", rich_help_panel="Set-up")(payload_key)
    app.command("claim-key", rich_help_panel="Set-up")(expanded(claim_key))


def payload_key(
    as_json: Annotated[bool, typer.Option("--json", help="Print the key and its id as JSON.")] = False,
) -> None:
    """Create a key for PENSTOCK_PAYLOAD_KEYS and print it; it is not stored anywhere."""
    from penstock.settings.values import fingerprint, new_key, read_key

    key = new_key()
    key_id = fingerprint(read_key(key))
    if as_json:
        print_json({"key": key, "id": key_id})
        return
    typer.echo(key)
    typer.echo(f"key id {key_id}, as shown in errors and by `penstock doctor`; store the key like a password", err=True)


def claim_key(
    *,
    accept_older_days: Annotated[
        float, typer.Option(min=0, max=365, help="Days for which ids made with older keys are accepted.")
    ] = 14.0,  # SQS keeps a message for at most this long, so no result under an older id can arrive later
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
