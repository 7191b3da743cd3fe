"""`penstock credential`: credentials of scheduler0's API, created directly in the database."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import listing, print_fields
from penstock.cli.database import Database
from penstock.cli.groups import Commands, add_group
from penstock.protocol.errors import PenstockError

if TYPE_CHECKING:
    from penstock.compat.scheduler0.store import Credential

_ALL = 2**31 - 1
_print_page = listing(
    "credentials",
    ("id", ("api key", "apiKey"), ("archived", lambda one: "yes" if one["archived"] else ""),
     ("created", "dateCreated")),
    right=("id",),
)  # fmt: skip


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_credentials, "create": create, "archive": archive}
    help = "Credentials of scheduler0's API: created, listed and archived in the database, without the api."
    add_group(app, "credential", commands, panel="Set-up", help=help)


def create(database: Database) -> None:
    """Create a credential and print its API key and secret; only a digest of the secret is stored."""
    from penstock.compat.scheduler0 import store

    readable = database.settings.scheduler0_readable_secrets
    made = database.run(lambda session: store.create_credential(session, readable=readable))

    def show(_: Any) -> None:
        typer.echo(f"API_KEY={made.api_key}\nAPI_SECRET={made.api_secret}")
        typer.echo(f"credential {made.id} is valid now; its secret is not shown again", err=True)

    database.show(_members(made) | {"apiSecret": made.api_secret}, show)
    if not database.settings.scheduler0:
        note = "with these settings no api serves scheduler0's API; set PENSTOCK_SCHEDULER0=true where it runs"
        typer.echo(f"note: {note}", err=True)


def list_credentials(database: Database) -> None:
    """List credentials, newest first, including archived ones."""
    from penstock.compat.scheduler0 import store

    found = database.run(lambda session: store.list_credentials(session, limit=_ALL, offset=0))
    members = [_members(one) for one in found]
    database.show(members, lambda _: _print_page({"credentials": members}))


def archive(
    *,
    credential: Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="The credential's number.")],
    database: Database,
) -> None:
    """Archive a credential; every api refuses it from then on."""
    from penstock.compat.scheduler0 import store

    changed = database.run(lambda session: store.archive_credential(session, credential))
    if changed is None:
        raise PenstockError(f"no credential {credential}: `penstock credential list` lists the credentials")
    archived = (("archived", f"credential {changed.id}"), ("api key", changed.api_key))
    database.show(_members(changed), lambda _: print_fields(archived))


def _members(credential: Credential) -> dict[str, Any]:
    return {
        "id": credential.id,
        "apiKey": credential.api_key,
        "archived": credential.archived,
        "dateCreated": credential.date_created.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
