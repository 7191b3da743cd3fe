"""Roles for the processes of a test, each with what `penstock grants` prints for one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, urlsplit

from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.local.postgres import EmbeddedPostgres


@contextmanager
def role_of(process: str, postgres: EmbeddedPostgres, database_url: str) -> Iterator[str]:
    """The database's URL for a role of that process, which is dropped afterwards."""
    name, database = f"penstock {process}", urlsplit(database_url).path.removeprefix("/")
    postgres.execute(f"""create role "{name}" login password 'app'""")
    printed = CliRunner().invoke(app, ["grants", "--role", name, "--process", process]).stdout
    for _ in range(2):  # again, it changes nothing
        postgres.execute(printed, database)
    yield urlsplit(database_url)._replace(netloc=f"{quote(name)}:app@127.0.0.1:{postgres.port}").geturl()
    postgres.execute(f'drop owned by "{name}"', database)
    postgres.execute(f'drop role "{name}"')
