"""The api over TLS: a renewed certificate is shown to new connections, half a renewal is not."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

from penstock.api import server
from penstock.api.server import Certificate
from penstock.db.pool import Store
from penstock.protocol.errors import SettingsError
from penstock.settings.model import Settings, load_settings
from tests.integration.apis import running


def write(folder: Path, authority: trustme.CA, *, key: bool = True) -> dict[str, Any]:
    """A new certificate in the same files."""
    issued = authority.issue_cert("127.0.0.1")
    cert_path, key_path = folder / "api.pem", folder / "api.key"
    cert_path.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    if key:
        key_path.write_bytes(issued.private_key_pem.bytes())
    return {"http_tls_cert": str(cert_path), "http_tls_key": str(key_path)}


def trusting(*authorities: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for authority in authorities:
        authority.configure_trust(context)
    return context


async def index(url: str, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(base_url=url, verify=context) as http:
        return (await http.get("/", headers={"Accept": "application/json"})).status_code


async def test_a_renewed_certificate_is_shown_without_a_restart(
    store: Store, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CERTIFICATE_LOOK_SECONDS", 0.02)
    old, new = trustme.CA(), trustme.CA()
    given = settings.model_copy(update=write(tmp_path, old))
    async with running(store, given) as api:
        assert api.url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=api.url, verify=trusting(old)) as kept:
            call = {"jsonrpc": "2.0", "method": "list", "params": {}, "id": 1}
            assert "result" in (await kept.post("/rpc", json=call)).json()
            write(tmp_path, new)
            for _ in range(500):
                try:
                    assert await index(api.url, trusting(new)) == 200
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
            assert await index(api.url, trusting(new)) == 200
            with pytest.raises(httpx.ConnectError):
                await index(api.url, trusting(old))
            assert "result" in (await kept.post("/rpc", json=call)).json()  # over its open connection


async def test_half_a_renewal_leaves_the_certificate_as_it_is(tmp_path: Path) -> None:
    authority = trustme.CA()
    paths = write(tmp_path, authority)
    shown = Certificate(paths["http_tls_cert"], paths["http_tls_key"])

    async def handshake() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=shown.context)
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
        writer.close()
        server.close()

    write(tmp_path, authority, key=False)
    await shown.look()
    await handshake()
    (tmp_path / "api.key").unlink()
    await shown.look()
    await handshake()


def test_files_that_do_not_fit_are_refused_at_the_start(tmp_path: Path) -> None:
    paths = write(tmp_path, trustme.CA())
    write(tmp_path, trustme.CA(), key=False)
    with pytest.raises(SettingsError, match="PENSTOCK_HTTP_TLS_CERT and _KEY cannot be used"):
        Certificate(cert=paths["http_tls_cert"], key=paths["http_tls_key"])
    with pytest.raises(SettingsError, match=r"_KEY cannot be used: .*No such file"):  # gone since settings were read
        Certificate(cert=str(tmp_path / "gone"), key=paths["http_tls_key"])
    with pytest.raises(SettingsError, match="http_tls_cert and http_tls_key go together"):
        load_settings(http_tls_cert=paths["http_tls_cert"])


async def test_an_idle_connection_makes_room_at_once_though_its_client_does_not_agree(
    store: Store, settings: Settings, tmp_path: Path
) -> None:
    authority = trustme.CA()
    given = settings.model_copy(update=write(tmp_path, authority) | {"http_connections": 2})

    def hold(port: int) -> ssl.SSLSocket:
        held = trusting(authority).wrap_socket(
            socket.create_connection(("127.0.0.1", port)), server_hostname="127.0.0.1"
        )
        held.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n\r\n")
        assert held.recv(100).startswith(b"HTTP/1.1 200")
        return held

    async with running(store, given) as api:
        port = urlsplit(api.url).port
        assert port is not None
        held = [await asyncio.to_thread(hold, port) for _ in range(2)]
        assert await index(api.url, trusting(authority)) == 200
        for one in held:
            one.close()
