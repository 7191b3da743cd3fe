"""`penstock payload-key`: keys that encrypt payloads, unlike `penstock keys`, which are API keys."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.common import print_json


def add_to(app: typer.Typer) -> None:
    app.command("payload-key", rich_help_panel="Set-up")(payload_key)


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
