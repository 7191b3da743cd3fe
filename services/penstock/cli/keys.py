"""`penstock keys`: API keys, made in the database itself, for the first one has to come from somewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.common import DataDirOption, print_fields, print_json, print_page
from penstock.cli.groups import add_group
from penstock.cli.processes import DatabaseUrlOption
from penstock.protocol.api_key import NAME_MAX_CHARS, Permission, check_name, check_patterns
from penstock.protocol.errors import PenstockError, SettingsError
from penstock.protocol.tenant import check_tenant

if TYPE_CHECKING:
    from penstock.api.key_store import KeyRecord
    from penstock.db.session import Session
    from penstock.settings.model import Settings

PAGE = 1000
Result = TypeVar("Result")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    add_group(
        app,
        "keys",
        {"list": list_keys, "create": create, "revoke": revoke},
        panel="Set-up",
        help="API keys: made, listed and revoked in the database; the api needs none for it.",
    )


def create(
    name: Annotated[str, typer.Argument(help=f"Whose key it is, up to {NAME_MAX_CHARS} characters.")],
    permission: Annotated[
        list[Permission],
        typer.Option(
            help="enqueue: add tasks. read: look at everything. admin: that and change or delete anything. worker: "
            "what workers ask of the api. scaling: figures for autoscaling. Repeatable."
        ),
    ],
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.0001, max=36_500, show_default=False, help="Default: it does not expire.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(show_default=False, help="Bind it to a tenant, whose tasks alone it sees and touches.")
    ] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help="It may enqueue this action alone, such as mail.send or mail.*. Repeatable. Default: all; with "
            "--tenant all but built-in ones such as http.request.",
        ),
    ] = None,
    as_json: JsonOption = False,
    database_url: DatabaseUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Make a key and print it; it is stored as a digest and cannot be shown again."""
    from penstock.api import key_store

    try:
        name = check_name(name)
    except ValueError as exc:
        raise typer.BadParameter(f"the name {exc}") from None
    try:
        bound = None if tenant is None else check_tenant(tenant)
    except ValueError as exc:
        raise typer.BadParameter(f"the tenant {exc}") from None
    try:
        actions = check_patterns(action)
    except ValueError as exc:
        raise typer.BadParameter(f"--action {exc}") from None
    seconds = None if expires_in_days is None else expires_in_days * 86_400
    settings = settings_of(database_url, data_dir)
    made = in_database(
        settings, lambda session: key_store.create_key(session, name, permission, seconds, bound, actions)
    )
    if made is None:
        raise PenstockError(f"there is a key {name!r} already: revoke it first, or take another name")
    record, secret = made
    if as_json:
        print_json(_members(record) | {"key": secret})
    else:
        typer.echo(secret)
        typer.echo(
            f"key {record.id} {record.name!r} may {', '.join(record.permissions)}"
            f"{'' if bound is None else f' with what is of {bound!r}'}; "
            "it counts within seconds and is not shown again",
            err=True,
        )
    if not settings.needs_keys:
        typer.echo(
            "note: by these settings the api asks for no keys; set PENSTOCK_API_REQUIRE_KEYS=true where it runs",
            err=True,
        )


def list_keys(
    with_revoked: Annotated[bool, typer.Option("--all", help="With those that are revoked.")] = False,
    as_json: JsonOption = False,
    database_url: DatabaseUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List keys, newest first. Keys of PENSTOCK_API_KEYS are not among them."""
    from penstock.api import key_store

    async def read(session: Session) -> list[KeyRecord]:
        records: list[KeyRecord] = []
        while True:
            before = records[-1].id if records else None
            page = await key_store.list_keys(session, before=before, limit=PAGE, revoked=with_revoked)
            records += page
            if len(page) < PAGE:
                return records

    records = in_database(settings_of(database_url, data_dir), read)
    if as_json:
        print_json([_members(record) for record in records])
        return
    columns = ("id", "name", "key", "permissions", "tenant", "actions", "created", "expires", "revoked", "last used")
    rows = [
        (
            record.id, record.name, f"{record.prefix}…", ", ".join(record.permissions), record.tenant,
            ", ".join(record.actions or ()),
            *map(_shown, (record.created_at, record.expires_at, record.revoked_at, record.last_used_at)),
        )
        for record in records
    ]  # fmt: skip
    print_page(columns, rows, right=("id",))


def revoke(
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="The key's number, or its name.")],
    as_json: JsonOption = False,
    database_url: DatabaseUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Revoke a key for good; every api refuses it within 10 seconds."""
    from penstock.api import key_store

    async def change(session: Session) -> KeyRecord | None:
        key_id = await key_store.find_key(session, key.strip())
        if key_id is None and key.isascii() and key.isdigit() and len(key) < 19:
            key_id = int(key)
        return None if key_id is None else await key_store.revoke_key(session, key_id)

    record = in_database(settings_of(database_url, data_dir), change)
    if record is None:
        raise PenstockError(f"there is no key {key!r}: `penstock keys` shows those there are")
    if as_json:
        print_json(_members(record))
    else:
        print_fields((("revoked", f"key {record.id} {record.name}"), ("at", _shown(record.revoked_at))))


def settings_of(database_url: str | None, data_dir: Path | None) -> Settings:
    """Settings with the database that is meant: the option's, else the stack's in --data-dir, else the settings' own,
    else that of the stack that runs here."""
    from penstock.local.state import DataDir
    from penstock.settings.loading import load_settings

    if database_url is not None:
        return load_settings(database_url=database_url)
    settings = load_settings()
    if data_dir is None and settings.database_url is not None:
        return settings
    state = DataDir.of(data_dir).read_state()
    if state is not None:
        return load_settings(database_url=state["database_url"])
    if data_dir is not None:
        raise PenstockError(f"no stack runs in {data_dir}: start one with `penstock up --data-dir {data_dir}`")
    raise SettingsError(
        "no database is named: set PENSTOCK_DATABASE_URL, pass --database-url, or start `penstock up` in this folder"
    )


def in_database(settings: Settings, work: Callable[[Session], Awaitable[Result]]) -> Result:
    from penstock.db.pool import Store

    async def run() -> Result:
        store = Store(settings.require_database_url, pool_size=1, application_name="penstock-cli")
        try:
            async with store.session() as session:
                return await work(session)
        finally:
            await store.close()

    return asyncio.run(run())


def _members(record: KeyRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "prefix": record.prefix,
        "permissions": list(record.permissions),
        "created_at": _shown(record.created_at),
        "expires_at": _shown(record.expires_at),
        "revoked_at": _shown(record.revoked_at),
        "last_used_at": _shown(record.last_used_at),
        "tenant": record.tenant,
        "actions": None if record.actions is None else list(record.actions),
    }


def _shown(instant: datetime | None) -> str | None:
    return None if instant is None else instant.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
