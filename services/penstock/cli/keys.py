"""`penstock keys` and `credential`: made in the database, since the first one cannot come through the api."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from penstock.cli.common import Database, listing, print_fields
from penstock.cli.parameters import Commands
from penstock.protocol.api_key import NAME_MAX_CHARS, Permission
from penstock.protocol.errors import PenstockError

if TYPE_CHECKING:
    from penstock.api.keys import Key
    from penstock.compat.scheduler0.store import Credential

_ALL = 2**31 - 1


def create(
    *,
    name: Annotated[str, typer.Argument(help=f"The key's name, up to {NAME_MAX_CHARS} characters.")],
    permission: list[Permission],
    expires_in_days: Annotated[float | None, typer.Option(min=0.0001, max=36_500)] = None,
    tenant: str | None = None,
    action: list[str] | None = None,
    database: Database,
) -> None:
    """Create a key and print it; only its digest is stored, so it cannot be shown again.

    permission: enqueue: add tasks. read: read everything. admin: read, change and delete everything. worker: calls that
        workers make. scaling: figures for autoscaling. Repeatable.
    expires_in_days: Default: the key does not expire.
    tenant: Restrict the key to the tasks of a tenant.
    action: The key may enqueue only this action, such as mail.send or mail.*. Repeatable. Default: all; with --tenant
        all except built-in ones such as http.request.
    """
    from penstock.api import keys

    seconds = None if expires_in_days is None else expires_in_days * 86_400
    command = keys.create.read(keys.CreateKey(name, permission, seconds, tenant, action), database.settings)
    made = database.run(lambda session: keys.create_key(session, command))
    if made is None:
        raise PenstockError(f"a key {command.name!r} already exists: revoke it first, or choose another name")

    def show(_: Any) -> None:
        typer.echo(made.key)
        only = "" if made.tenant is None else f", for tenant {made.tenant!r} only"
        said = f"key {made.id} {made.name!r} may {', '.join(made.permissions)}{only}"
        typer.echo(f"{said}; it takes effect within seconds and is not shown again", err=True)

    database.show(_members(made), show)
    if not database.settings.needs_keys:
        note = "with these settings the api requires no keys; set PENSTOCK_API_REQUIRE_KEYS=true where it runs"
        typer.echo(f"note: {note}", err=True)


def list_keys(
    *,
    with_revoked: Annotated[bool, typer.Option("--all", help="Include revoked keys.")] = False,
    database: Database,
) -> None:
    """List keys, newest first, without those of PENSTOCK_API_KEYS."""
    from penstock.api import keys

    page = keys.KeysListParams(_ALL, revoked=with_revoked)
    members = [_members(key) for key in database.run(lambda session: keys.list_keys(session, page))]
    database.show(members, lambda _: _print_keys({"keys": members}))


def revoke(
    *,
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="The key's number, or its name.")],
    database: Database,
) -> None:
    """Revoke a key permanently; every api refuses it within 10 seconds."""
    from penstock.api import keys

    number = int(key) if key.isascii() and key.isdigit() and len(key) < 19 else None
    record = database.run(lambda session: keys.revoke_key(session, number, key.strip()))
    if record is None:
        raise PenstockError(f"no key {key!r}: `penstock keys` lists the keys")
    shown = _members(record)
    revoked = (("revoked", f"key {record.id} {record.name}"), ("at", shown["revoked_at"]))
    database.show(shown, lambda _: print_fields(revoked))


_print_keys = listing(
    "keys",
    (
        "id", "name", ("key", lambda key: f"{key['prefix']}…"),
        ("permissions", lambda key: ", ".join(key["permissions"])), "tenant",
        ("actions", lambda key: ", ".join(key["actions"] or ())), ("created", "created_at"), ("expires", "expires_at"),
        ("revoked", "revoked_at"), ("last used", "last_used_at"),
    ),
    right=("id",),
)  # fmt: skip


def _members(key: Key) -> dict[str, Any]:
    """Instants to the second."""
    return {
        name: f"{value[:19]}Z" if name.endswith("_at") and value else value
        for name, value in msgspec.to_builtins(key).items()
    }


def create_credential(database: Database) -> None:
    """Create a credential and print its API key and secret; only a digest of the secret is stored."""
    from penstock.compat.scheduler0 import store

    readable = database.settings.scheduler0_readable_secrets
    made = database.run(lambda session: store.create_credential(session, readable=readable))

    def show(_: Any) -> None:
        typer.echo(f"API_KEY={made.api_key}\nAPI_SECRET={made.api_secret}")
        typer.echo(f"credential {made.id} is valid now; its secret is not shown again", err=True)

    database.show(_members_of(made) | {"apiSecret": made.api_secret}, show)
    if not database.settings.scheduler0:
        note = "with these settings no api serves scheduler0's API; set PENSTOCK_SCHEDULER0=true where it runs"
        typer.echo(f"note: {note}", err=True)


def list_credentials(database: Database) -> None:
    """List credentials, newest first, including archived ones."""
    from penstock.compat.scheduler0 import store

    found = database.run(lambda session: session.fetch("list_credentials", _ALL, 0))
    members = [_members_of(store.Credential(**row)) for row in found]
    database.show(members, lambda _: _print_credentials({"credentials": members}))


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
    database.show(_members_of(changed), lambda _: print_fields(archived))


def _members_of(credential: Credential) -> dict[str, Any]:
    return {
        "id": credential.id,
        "apiKey": credential.api_key,
        "archived": credential.archived,
        "dateCreated": credential.date_created.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


_print_credentials = listing(
    "credentials",
    ("id", ("api key", "apiKey"), ("archived", lambda one: "yes" if one["archived"] else ""),
     ("created", "dateCreated")),
    right=("id",),
)  # fmt: skip
keys = Commands(
    "API keys: created, listed and revoked in the database, without the api.",
    list=list_keys, create=create, revoke=revoke,
)  # fmt: skip
credential = Commands(
    "Credentials of scheduler0's API: created, listed and archived in the database, without the api.",
    list=list_credentials, create=create_credential, archive=archive,
)  # fmt: skip
