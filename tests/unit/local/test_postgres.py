"""The embedded Postgres: starts anywhere, keeps its data and place, and comes back after a crash."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from penstock.local.postgres import _GROUP, _NO_ID, _USER, EmbeddedPostgres, _acl, _add_passage
from penstock.local.service import HOST
from penstock.protocol.errors import StackError
from tests import postgres_versions

Make = Callable[..., EmbeddedPostgres]


@pytest.fixture
def make(data_path: Path) -> Iterator[Make]:
    """Servers in a folder of this test, stopped at its end."""
    made: list[EmbeddedPostgres] = []

    def build(folder: Path = data_path / "pg", **arguments: object) -> EmbeddedPostgres:
        made.append(EmbeddedPostgres(folder, **arguments))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for server in made:
        server.stop()


def wait_dead(server: EmbeddedPostgres) -> None:
    assert server._child is not None
    server._child.wait(10)


async def fetch(dsn: str, query: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_long_path_with_spaces_and_kill_9_loses_no_committed_row(make: Make, data_path: Path) -> None:
    server = make(data_path / "with space" / ("long" * 40) / "pg")
    server.start()
    assert server.create_database("app") is True
    server.execute("CREATE TABLE t AS SELECT 7 AS x", "app")
    before = server.dsn("app")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_dead(server)
    assert server.pid is None

    server.start()

    assert server.dsn("app") == before
    assert await fetch(before, "SELECT x FROM t") == 7
    assert await fetch(before, "SHOW fsync") == "on"
    assert server.create_database("app") is False


def test_second_object_on_the_folder_finds_port_and_password_again(make: Make) -> None:
    first = make()
    first.start()
    dsn = first.dsn()
    first.stop()
    assert first.returncode == 0
    second = make()
    second.start()
    assert second.dsn() == dsn


def test_pid_file_whose_pid_belongs_to_another_process_now_does_not_hinder_a_start(make: Make) -> None:
    server = make()
    server.start()
    server.stop()
    (server.pgdata / "postmaster.pid").write_text(f"{os.getpid()}\n{server.pgdata}\n1\n{server.port}\n\n{HOST}\n")
    server.start()
    assert server.pid is not None


def test_server_left_behind_by_another_owner_is_stopped_before_the_start(make: Make) -> None:
    left = make()
    left.start()
    server = make()
    server.start()
    assert left.pid is None
    assert server.pid is not None


def test_half_made_cluster_of_a_killed_first_start_is_made_anew(make: Make, data_path: Path) -> None:
    half = data_path / "pg" / "pgdata.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    server = make()
    server.start()
    assert not half.exists()


def test_folder_of_another_major_version_is_refused_with_both_versions_named(make: Make, data_path: Path) -> None:
    pgdata = data_path / "pg" / "pgdata"
    pgdata.mkdir(parents=True)
    (pgdata / "PG_VERSION").write_text("16\n")
    with pytest.raises(StackError, match=r"made by PostgreSQL 16, this is 18.*--data-dir"):
        make().start()


def test_version_that_is_not_shipped_is_refused(data_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedPostgres, "version", 9)
    with pytest.raises(StackError, match="PostgreSQL 9"):
        EmbeddedPostgres(data_path)


def test_version_16_starts_too(data_path: Path) -> None:
    server = postgres_versions.server(data_path / "pg", version=16)
    server.start()
    server.stop()
    assert (server.pgdata / "PG_VERSION").read_text().strip() == "16"


def test_the_port_is_named_in_the_error_where_another_program_has_it_at_a_restart(make: Make) -> None:
    server = make()
    server.start()
    server.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections to the stopped server linger
        other.bind((HOST, server.port))
        other.listen()
        with pytest.raises(StackError, match=f"port {server.port} is taken"):
            server.start()


def test_unknown_server_option_is_shown_with_the_end_of_the_log(make: Make) -> None:
    with pytest.raises(StackError, match="unrecognized configuration parameter"):
        make(options={"no_such_option": "1"}).start()


async def test_password_is_private_and_needed(make: Make) -> None:
    server = make()
    server.start()
    mode = stat.S_IMODE((server.data_dir / "password").stat().st_mode)
    assert mode == 0o600
    password = (server.data_dir / "password").read_text()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(server.dsn().replace(password, "wrong"))


def test_the_server_and_its_files_are_given_nothing_of_the_caller_but_places(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_PAYLOAD_KEYS", "AWS_SECRET_ACCESS_KEY", "PGOPTIONS", "SOME_TOKEN"):
        monkeypatch.setenv(name, "of-the-caller")
    server = make()
    server.start()
    assert server.pid is not None
    assert "of-the-caller" not in psutil.Process(server.pid).environ().values()
    assert stat.S_IMODE(server.log_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.data_dir.stat().st_mode) & 0o066 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="Postgres then runs as the user itself")
def test_folders_above_the_data_stay_closed_to_all_but_the_servers_user(make: Make, data_path: Path) -> None:
    closed = data_path / "closed"
    closed.mkdir(mode=0o700)
    os.chmod(closed, 0o700)
    try:
        _add_passage(closed, 0o700, os.geteuid())
    except OSError:
        pytest.skip("this file system has no access lists")
    server = make(closed / "deeper" / "pg")
    server.start()
    assert closed.stat().st_mode & stat.S_IRWXO == 0
    entries = {(tag, user): permissions for tag, permissions, user in _acl(closed)}
    assert entries[_USER, server.pgdata.stat().st_uid] == 1
    assert entries[_GROUP, _NO_ID] == 0
    server.stop()
    make(closed / "deeper" / "pg").start()
    assert len(_acl(closed)) == len(entries)


async def test_a_role_of_its_own_reaches_its_own_database_and_nothing_else(make: Make) -> None:
    server = make()
    server.start()
    server.create_database("penstock")
    server.execute("create schema penstock create table penstock.task (id int)", "penstock")
    first, url = server.own_database("export"), server.own_database("export")
    assert await fetch(url, "select current_user || current_database()") == "exportexport"
    with pytest.raises(asyncpg.InvalidPasswordError):
        await fetch(first, "select 1")
    connection = await asyncpg.connect(url)
    await connection.execute("create table mine (id int)")
    await connection.close()
    for refused in ("select count(*) from penstock.task", "copy (select 1) to program 'true'"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await fetch(url.replace("/export", "/penstock", 2).replace("//penstock:", "//export:"), refused)
