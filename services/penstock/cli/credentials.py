"""`penstock credential`: those of scheduler0's API, made in the database itself; `penstock keys` are the api's own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import DataDirOption, print_fields, print_json, print_page
from penstock.cli.groups import add_group
from penstock.cli.keys import in_database, settings_of
from penstock.cli.processes import DatabaseUrlOption
from penstock.protocol.errors import PenstockError

if TYPE_CHECKING:
    from penstock.compat.scheduler0.store import Credential
    from penstock.db.session import Session

PAGE = 1000
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    add_group(
        app,
        "credential",
        {"list": list_credentials, "create": create, "archive": archive},
        panel="Set-up",
        help="Credentials of scheduler0's API: made, listed and archived in the database; the api needs none for it.",
    )


def create(as_json: JsonOption = False, database_url: DatabaseUrlOption = None, data_dir: DataDirOption = None) -> None:
    """Make a credential and print its API key and secret; the secret is stored as a digest and not shown again."""
    from penstock.compat.scheduler0 import store

    settings = settings_of(database_url, data_dir)
    readable = settings.scheduler0_readable_secrets
    made, secret = in_database(
        settings, lambda session: store.create_credential(session, readable=readable)
    )  # fmt: skip
    if as_json:
        print_json(_members(made) | {"apiSecret": secret})
    else:
        typer.echo(f"API_KEY={made.api_key}\nAPI_SECRET={secret}")
        typer.echo(f"credential {made.id} counts at once; its secret is not shown again", err=True)
    if not settings.scheduler0:
        typer.echo(
            "note: by these settings no api serves scheduler0's API; set PENSTOCK_SCHEDULER0=true where it runs",
            err=True,
        )


def list_credentials(
    as_json: JsonOption = False, database_url: DatabaseUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """List credentials, newest first, archived ones too."""
    from penstock.compat.scheduler0 import store

    async def read(session: Session) -> list[Credential]:
        found: list[Credential] = []
        while True:
            _, page = await store.list_credentials(session, limit=PAGE, offset=len(found))
            found += page
            if len(page) < PAGE:
                return found

    found = in_database(settings_of(database_url, data_dir), read)
    if as_json:
        print_json([_members(one) for one in found])
        return
    rows = [(one.id, one.api_key, "yes" if one.archived else "", _shown(one.created_at)) for one in found]
    print_page(("id", "api key", "archived", "created"), rows, right=("id",))


def archive(
    credential: Annotated[int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="The credential's number.")],
    as_json: JsonOption = False,
    database_url: DatabaseUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Archive a credential; every api refuses it from then on."""
    from penstock.compat.scheduler0 import store

    changed = in_database(
        settings_of(database_url, data_dir), lambda session: store.archive_credential(session, credential)
    )
    if changed is None:
        raise PenstockError(f"there is no credential {credential}: `penstock credential list` shows those there are")
    if as_json:
        print_json(_members(changed))
    else:
        print_fields((("archived", f"credential {changed.id}"), ("api key", changed.api_key)))


def _members(credential: Credential) -> dict[str, Any]:
    return {
        "id": credential.id,
        "apiKey": credential.api_key,
        "archived": credential.archived,
        "dateCreated": _shown(credential.created_at),
    }


def _shown(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
