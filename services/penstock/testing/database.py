"""Databases for tests: one embedded Postgres for the run, a copy of a migrated template for each test."""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

from penstock.db.migrate import upgrade
from penstock.local.postgres import EmbeddedPostgres
from penstock.testing.clock import clock_statements

_TEMPLATE = "penstock_testing"
_FOLDER = "penstock_clocks"  # in the data folder: the offset of each database, in seconds, in a file of its name
_OFFSET = (
    f"make_interval(secs => coalesce(pg_read_file('{_FOLDER}/' || current_database(), 0, 100, true), '0')::float8)"
)
_OPTIONS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}  # no test pulls the plug
_numbers = itertools.count(1)


@contextmanager
def running_server() -> Iterator[EmbeddedPostgres]:
    """Raises StackError, which says what to install, where the embedded Postgres is missing."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-", ignore_cleanup_errors=True) as folder:
        server = EmbeddedPostgres(Path(folder), options=_OPTIONS)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@cache
def _make_template(server: EmbeddedPostgres) -> None:
    """A migrated database whose clock `set_offset` moves, in each copy."""
    if server.create_database(_TEMPLATE):
        upgrade(server.dsn(_TEMPLATE))
        now, clock = f"pg_catalog.now() + {_OFFSET}", f"pg_catalog.clock_timestamp() + {_OFFSET}"
        server.execute(clock_statements("penstock_clock", now, clock), _TEMPLATE)
        server.execute("grant execute on function pg_read_file(text, bigint, bigint, boolean) to public", _TEMPLATE)
        (server.pgdata / _FOLDER).mkdir(mode=0o755)


@contextmanager
def database_of_test(server: EmbeddedPostgres) -> Iterator[str]:
    """A database of its own, by its name."""
    _make_template(server)
    name = f"{_TEMPLATE}_{next(_numbers)}"
    strategy = "strategy file_copy" if server.version > 14 else ""  # a fifth of the time; 14 has no other way
    server.execute(f"create database {name} template {_TEMPLATE} {strategy}")
    server.execute(f'alter database {name} set search_path = "$user", public, penstock_clock, pg_catalog')
    try:
        yield name
    finally:
        server.drop_database(name)
        (server.pgdata / _FOLDER / name).unlink(missing_ok=True)


def set_offset(server: EmbeddedPostgres, name: str, offset: timedelta) -> None:
    """How far a database's clock is ahead of the real one."""
    file = server.pgdata / _FOLDER / name
    file.with_suffix(".new").write_text(repr(offset.total_seconds()), "ascii")
    file.with_suffix(".new").replace(file)
