"""Commands that work on the database directly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from penstock.cli.common import DataDirOption, Shown
from penstock.protocol.errors import PenstockError, SettingsError

if TYPE_CHECKING:
    from penstock.db.session import Session
    from penstock.settings.model import Settings

Result = TypeVar("Result")

DatabaseUrlOption = Annotated[
    str | None,
    typer.Option("--database-url", help="Postgres to use; default PENSTOCK_DATABASE_URL."),
]


@dataclass(frozen=True)
class Database(Shown):
    """The database that a command works on, and how its answer is printed."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    database_url: DatabaseUrlOption = None
    data_dir: DataDirOption = None

    @cached_property
    def settings(self) -> Settings:
        """Settings whose database is that of --database-url, else of the stack in --data-dir, else of the settings,
        else of the stack running in the current folder."""
        from penstock.local.state import DataDir
        from penstock.settings.model import load_settings

        if self.database_url is not None:
            return load_settings(database_url=self.database_url)
        settings = load_settings()
        if self.data_dir is None and settings.database_url is not None:
            return settings
        state = DataDir(self.data_dir).read_state()
        if state is not None:
            return load_settings(database_url=state["database_url"])
        if self.data_dir is not None:
            raise PenstockError(
                f"no stack runs in {self.data_dir}: start one with `penstock up --data-dir {self.data_dir}`"
            )
        raise SettingsError(
            "no database is set: set PENSTOCK_DATABASE_URL, pass --database-url, or start `penstock up` in this folder"
        )

    def run(self, work: Callable[[Session], Awaitable[Result]]) -> Result:
        """The result of work in a session of its own."""
        import asyncio

        from penstock.db.pool import Store

        async def run() -> Result:
            store = Store(self.settings.require_database_url, pool_size=1, application_name="penstock-cli")
            try:
                async with store.session() as session:
                    return await work(session)
            finally:
                await store.close()

        return asyncio.run(run())
