"""A Postgres with TLS: the embedded one, which was built without, behind what speaks TLS the way Postgres does."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import trustme

_SSL_REQUEST = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"  # length 8, code 80877103


@dataclass
class TlsFront:
    """``secured``: connections whose TLS came about. ``plain``: those that asked for none, and were turned away."""

    port: int = 0
    secured: int = 0
    plain: int = 0
    ca_path: Path = field(default_factory=Path)
    other_ca_path: Path = field(default_factory=Path)
    cert_path: Path = field(default_factory=Path)
    key_path: Path = field(default_factory=Path)

    def url(self, behind: str) -> str:
        """The URL of a database, by way of this front."""
        parts = urlsplit(behind)
        return parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{self.port}").geturl()


@contextmanager
def tls_front(
    url: str, folder: Path, *, host: str = "127.0.0.1", wants_certificates: bool = False
) -> Iterator[TlsFront]:
    """Run a front before the server of a URL; its certificate is for ``host``, and is signed by the CA of ca_path.

    wants_certificates: of clients, from the same CA, as cert_path and key_path hold one.
    """
    authority = trustme.CA()
    front = TlsFront(ca_path=folder / "ca.pem", other_ca_path=folder / "other-ca.pem")
    authority.cert_pem.write_to_path(front.ca_path)
    trustme.CA().cert_pem.write_to_path(front.other_ca_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)
    if wants_certificates:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        client = authority.issue_cert("client.example", common_name="penstock")
        front.cert_path, front.key_path = folder / "client.pem", folder / "client.key"
        client.cert_chain_pems[0].write_to_path(front.cert_path)
        client.private_key_pem.write_to_path(front.key_path)
    target = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await reader.readexactly(8) != _SSL_REQUEST:
                front.plain += 1
                return
            writer.write(b"S")
            try:
                await writer.start_tls(context)
            except (OSError, ssl.SSLError):
                return  # the client does not like the certificate
            front.secured += 1
            behind_reader, behind_writer = await asyncio.open_connection(target.hostname, target.port)
            try:
                await asyncio.wait(
                    [
                        asyncio.create_task(_pump(reader, behind_writer)),
                        asyncio.create_task(_pump(behind_reader, writer)),
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                behind_writer.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    started = threading.Event()
    stop = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        front.port = server.sockets[0].getsockname()[1]
        loops.append(asyncio.get_running_loop())
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="tls-front", daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield front
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
