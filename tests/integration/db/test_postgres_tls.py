"""Connections to Postgres by TLS, as the settings ask for them; every process, Alembic and the command line alike."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.db.pool import Store
from penstock.protocol.errors import Unavailable
from penstock.settings.model import load_settings
from tests.tls import TlsFront, tls_front

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def store_of(url: str, **settings: Any) -> AsyncIterator[Store]:
    store = Store(load_settings(database_url=url, **settings).require_database_url)
    try:
        yield store
    finally:
        await store.close()


async def test_verify_full_accepts_the_certificate_of_its_authority(database_url: str, tmp_path: Path) -> None:
    with tls_front(database_url, tmp_path) as front:
        async with store_of(
            front.url(database_url), database_ssl_mode="verify-full", database_ssl_root_cert=str(front.ca_path)
        ) as store:
            await store.ping()
            listener = await store.connect()
            assert await listener.fetchval("select 1") == 1
            await listener.close()
        assert (front.secured, front.plain) == (2, 0)


async def test_parameters_of_the_url_mean_the_same(database_url: str, tmp_path: Path) -> None:
    with tls_front(database_url, tmp_path) as front:
        url = f"{front.url(database_url)}?sslmode=verify-full&sslrootcert="
        async with store_of(f"{url}{front.ca_path}") as store:
            await store.ping()
        async with store_of(f"{url}{front.other_ca_path}") as store:
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await store.ping()
        assert (front.secured, front.plain) == (1, 0)


@pytest.mark.parametrize("mode", ["verify-ca", "verify-full"])
async def test_certificate_of_another_authority_is_refused_before_anything_is_said(
    database_url: str, tmp_path: Path, mode: str
) -> None:
    with tls_front(database_url, tmp_path) as front:
        async with store_of(
            front.url(database_url), database_ssl_mode=mode, database_ssl_root_cert=str(front.other_ca_path)
        ) as store:
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await store.ping()
        assert (front.secured, front.plain) == (0, 0)


async def test_verify_full_refuses_the_certificate_of_another_host_and_verify_ca_takes_it(
    database_url: str, tmp_path: Path
) -> None:
    with tls_front(database_url, tmp_path, host="db.example") as front:
        options = {"database_ssl_root_cert": str(front.ca_path)}
        async with store_of(front.url(database_url), database_ssl_mode="verify-full", **options) as store:
            with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
                await store.ping()
        async with store_of(front.url(database_url), database_ssl_mode="verify-ca", **options) as store:
            await store.ping()
        assert front.secured == 1


async def test_require_never_goes_on_without_tls(database_url: str) -> None:
    """The embedded server has none: a man in the middle would say the same."""
    async with store_of(database_url, database_ssl_mode="require") as store:
        with pytest.raises(Unavailable, match="SSL"):
            await store.ping()


def penstock(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "services")} | settings
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments], env=environment, capture_output=True, text=True, timeout=120,
        cwd=ROOT, check=False,
    )  # fmt: skip


async def test_migrate_takes_the_same_way(empty_database_url: str, tmp_path: Path) -> None:
    with tls_front(empty_database_url, tmp_path) as front:
        settings = {"PENSTOCK_DATABASE_URL": front.url(empty_database_url), "PENSTOCK_DATABASE_SSL_MODE": "verify-full"}
        refused = penstock("migrate", **settings, PENSTOCK_DATABASE_SSL_ROOT_CERT=str(front.other_ca_path))
        assert (refused.returncode, front.secured) == (1, 0)
        assert "certificate verify failed" in refused.stderr
        done = penstock("migrate", **settings, PENSTOCK_DATABASE_SSL_ROOT_CERT=str(front.ca_path))
        assert done.returncode == 0, done.stderr
        listed = penstock("keys", "list", **settings, PENSTOCK_DATABASE_SSL_ROOT_CERT=str(front.ca_path))
        assert listed.returncode == 0, listed.stderr
        assert (front.secured, front.plain) == (4, 0)  # migrate looks at the revision first, and holds a lock
    connection = await asyncpg.connect(empty_database_url)
    assert await connection.fetchval("select to_regclass('penstock.task')") is not None
    await connection.close()


def test_url_of_the_front_differs_in_host_and_port_alone() -> None:
    assert TlsFront(port=7).url("postgresql://me:pw@db:5432/x") == "postgresql://me:pw@127.0.0.1:7/x"
