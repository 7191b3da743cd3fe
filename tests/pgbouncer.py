"""A PgBouncer for tests: Debian's package, or the program that the variable PGBOUNCER names, before a Postgres.

From 1.21 on it keeps track of prepared statements here.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from penstock.local.postgres import EmbeddedPostgres

_COMMAND = os.environ.get("PGBOUNCER") or shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
_READY_SECONDS = 30.0
WHY_NOT = None if Path(_COMMAND).exists() else "pgbouncer is not installed: apt install pgbouncer"


class PgBouncer(NamedTuple):
    port: int
    pid: int


def version() -> tuple[int, int]:
    said = subprocess.run([_COMMAND, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"PgBouncer (\d+)\.(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def through(database_url: str, port: int) -> str:
    """The URL of the same database, by the PgBouncer at that port."""
    parts = urlsplit(database_url)
    return parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}").geturl()


@contextmanager
def pgbouncer_before(server_url: str, **settings: str) -> Iterator[PgBouncer]:
    """One in transaction mode before every database of the server, for the user of the URL.

    settings: more of its own, over those here.
    """
    parts = urlsplit(server_url)
    with tempfile.TemporaryDirectory(prefix="penstock-pgbouncer-") as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        users = folder / "users"
        users.write_text(f'"{parts.username}" "{parts.password}"\n')
        chosen: Mapping[str, str] = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(port),
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": str(users),
            "pool_mode": "transaction",
            "default_pool_size": "8",
            "max_client_conn": "300",
            "server_login_retry": "1",
            "server_round_robin": "1",  # a client meets another server as often as can be
            **({"max_prepared_statements": "200"} if version() >= (1, 21) else {}),
            **settings,
        }
        lines = ["[databases]", f"* = host={parts.hostname} port={parts.port}", "[pgbouncer]"]
        file = folder / "pgbouncer.ini"
        file.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in chosen.items())]) + "\n")
        folder.chmod(0o755)  # as root, it becomes another user
        command = [_COMMAND, "-q", *(["-u", "nobody"] if os.geteuid() == 0 else []), str(file)]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _READY_SECONDS
            while not _answers(port):
                assert process.poll() is None, (folder / "output").read_text(errors="replace")
                assert time.monotonic() < deadline, (folder / "output").read_text(errors="replace")
                time.sleep(0.02)
            yield PgBouncer(port, process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def pgbouncer(postgres: EmbeddedPostgres) -> Iterator[int]:
    """The port of one PgBouncer for the run, in transaction mode."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    with pgbouncer_before(postgres.dsn()) as found:
        yield found.port
