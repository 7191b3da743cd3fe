"""Two servers of which one follows the other, and an address that leads to either: what a failover is made of."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from penstock.local.postgres import EmbeddedPostgres
from penstock.local.service import HOST, make_private

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which the module socket lacks
_RETURN_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_DROP_ALL = struct.pack("HP", 1, ctypes.addressof(_RETURN_NOTHING))


class Pair:
    """A primary and a standby; PostgreSQL 16 or 18, whose wheel has pg_basebackup. synchronous: commits wait for it."""

    def __init__(self, folder: Path, *, synchronous: bool = True, **options: str) -> None:
        self._synchronous = synchronous
        self.primary = EmbeddedPostgres(folder / "primary", options=options)
        self.standby = EmbeddedPostgres(folder / "standby", options=options)

    def start(self) -> None:
        self.primary.start()
        make_private(self.standby.data_dir)
        self.standby.pgdata.mkdir(mode=0o700)
        owner = self.primary.pgdata.stat()
        os.chown(self.standby.pgdata, owner.st_uid, owner.st_gid)
        shutil.copy(self.primary._password_path, self.standby._password_path)
        copy = [
            self.primary._bin / "pg_basebackup",
            "-D",
            self.standby.pgdata,
            "-R",
            "-c",
            "fast",
            "-d",
            self.primary.dsn(),
        ]
        subprocess.run(copy, check=True, capture_output=True, cwd="/", **self.primary._process_options())
        self.standby.start()
        if self._synchronous:
            self.primary.execute("alter system set synchronous_standby_names = '*'")
            self.primary.execute("select pg_reload_conf()")

    def stop(self) -> None:
        self.standby.stop()
        self.primary.stop()

    def kill_primary(self) -> None:
        """As when its machine goes down."""
        assert self.primary.pid is not None
        family = [psutil.Process(self.primary.pid)]
        family += family[0].children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family, 30)
        self.primary.stop()

    def promote(self) -> None:
        """Returns once the standby takes writes."""
        assert self.standby.fetch_value("select pg_promote(true, 60)")

    async def return_read_only(self) -> None:
        """Start the old primary, which takes no writes."""
        self.primary.options["default_transaction_read_only"] = "on"
        await self.primary.start_async()


def url_of_hosts(*urls: str, query: str = "") -> str:
    """The first URL with the hosts of all."""
    parts = urlsplit(urls[0])
    user = parts.netloc.rpartition("@")[0]
    hosts = ",".join(urlsplit(url).netloc.rpartition("@")[2] for url in urls)
    return parts._replace(netloc=f"{user}@{hosts}", query=query).geturl()


class Address:
    """A TCP port that leads to a server, and later to another one, as a name does in DNS. Use it as a context."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._is_lost = False
        self._connections: dict[Any, list[asyncio.Task[None]]] = {}  # a client's socket to both directions

    async def __aenter__(self) -> Address:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in [task for tasks in self._connections.values() for task in tasks]:
            task.cancel()

    def leads_to(self, url: str) -> str:
        """The URL of a server, by way of this address."""
        parts = urlsplit(url)
        port = self._server.sockets[0].getsockname()[1]
        return parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@{HOST}:{port}").geturl()

    def lose(self) -> None:
        """Acknowledge nothing that clients send from now on: all connections are half-open, and so are new ones."""
        self._is_lost = True
        for client, directions in self._connections.items():
            _drop_all(client)
            for direction in directions:
                direction.cancel()

    def point_to(self, port: int) -> None:
        """Let new connections go there; those that were lost stay half-open."""
        self._upstream, self._is_lost = port, False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = writer.get_extra_info("socket")
        self._connections[client] = []
        if self._is_lost:
            return _drop_all(client)
        try:
            upstream_reader, upstream = await asyncio.open_connection(HOST, self._upstream)
        except OSError:
            return writer.transport.abort()
        self._connections[client] = [
            asyncio.ensure_future(_pass_on(reader, upstream)),
            asyncio.ensure_future(_pass_on(upstream_reader, writer)),
        ]


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await source.read(65_536):
            target.write(chunk)
            await target.drain()
    target.close()


def _drop_all(client: Any) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile
        client.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, _DROP_ALL)
