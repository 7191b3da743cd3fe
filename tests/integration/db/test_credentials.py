"""Passwords that change while a store is open, tokens of IAM, and client certificates, against a real Postgres."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import botocore.auth
import botocore.session
import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.db import connecting
from penstock.db.pool import Store, open_store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.model import load_settings
from tests.tls import tls_front

HOST = "127.0.0.1"


@pytest.fixture
def role(postgres: EmbeddedPostgres) -> Iterator[str]:
    name = f"app_{secrets.token_hex(4)}"
    postgres.execute(f"create role {name} login password 'first'")
    yield name
    postgres.execute(f"drop role {name}")


@pytest.fixture
def bare_url(role: str, database_url: str) -> str:
    """The URL of the role, without a password."""
    parts = urlsplit(database_url)
    return parts._replace(netloc=f"{role}@{parts.hostname}:{parts.port}").geturl()


@pytest.fixture
async def opened() -> AsyncIterator[Any]:
    stores: list[Store] = []

    def of(**settings: Any) -> Store:
        stores.append(open_store(load_settings(**settings), "penstock-rotating"))
        return stores[-1]

    yield of
    for store in stores:
        await store.close()


async def replace_password(postgres: EmbeddedPostgres, role: str, password: str) -> None:
    """The role's new password; its connections end, so that new ones are made."""
    postgres.execute(f"alter role {role} password '{password}'")
    ended = "select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity where usename = $1"
    postgres.fetch_value(ended, role)


@pytest.mark.parametrize("source", ["file", "command"])
async def test_a_password_is_replaced_while_the_store_is_open(
    source: str, bare_url: str, role: str, postgres: EmbeddedPostgres, tmp_path: Path, opened: Any
) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    command = shlex.join([sys.executable, "-c", "import sys; print(open(sys.argv[1]).read().strip())", str(file)])
    given = {"database_password_file": str(file)} if source == "file" else {"database_password_command": command}
    store = opened(database_url=bare_url, **given)
    await store.ping()
    await replace_password(postgres, role, "second")
    with pytest.raises(Unavailable):
        await store.ping()
    with pytest.raises(Unavailable, match="password authentication failed"):
        await store.ping()
    file.write_text("second\n")
    await store.ping()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('hunter2'); raise SystemExit(3)", "exited with code 3"),
        ("print('hunter2'); print('hunter3')", "must give one line"),
        ("pass", "must give one line"),
    ],
)
async def test_a_command_that_gives_no_password_is_named_without_its_output(
    program: str, reason: str, bare_url: str, opened: Any
) -> None:
    command = shlex.join([sys.executable, "-c", program])
    store = opened(database_url=bare_url, database_password_command=command)
    with pytest.raises(Unavailable, match=f"PENSTOCK_DATABASE_PASSWORD_COMMAND {reason}") as failure:
        await store.ping()
    assert "hunter" not in str(failure.value)


async def test_a_command_that_is_not_there_is_named(bare_url: str, opened: Any) -> None:
    store = opened(database_url=bare_url, database_password_command="/no/such/program --key x")
    with pytest.raises(Unavailable, match="cannot be run: No such file"):
        await store.ping()


async def test_a_file_that_is_gone_is_unavailable_until_it_is_back(bare_url: str, tmp_path: Path, opened: Any) -> None:
    file = tmp_path / "password"
    file.write_text("first")
    store = opened(database_url=bare_url, database_password_file=str(file))
    file.unlink()
    with pytest.raises(Unavailable, match="PENSTOCK_DATABASE_PASSWORD_FILE cannot be read"):
        await store.ping()
    file.write_text("first")
    await store.ping()


def test_the_schema_is_migrated_with_a_password_from_a_file(
    empty_database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = urlsplit(empty_database_url)
    file = tmp_path / "password"
    file.write_text(parts.password or "")
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", empty_database_url.replace(f":{parts.password}@", "@"))
    monkeypatch.setenv("PENSTOCK_DATABASE_PASSWORD_FILE", str(file))
    done = CliRunner().invoke(app, ["migrate"])
    assert (done.exit_code, done.output) == (0, "schema is at head\n")


def token_of_the_sdk(url: str, region: str) -> str:
    """What the SDK's own client makes of the same."""
    parts = urlsplit(url)
    client = botocore.session.get_session().create_client("rds", region_name=region)
    token: str = client.generate_db_auth_token(parts.hostname, parts.port, parts.username)
    return token


async def test_each_connection_has_an_iam_token_of_its_own(
    bare_url: str, role: str, postgres: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    times = [datetime(2026, 1, 1, 12, 0), datetime(2026, 1, 1, 12, 20)]
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: times[0])
    connecting._aws.cache_clear()
    with tls_front(bare_url, tmp_path) as front:
        url = urlsplit(bare_url)._replace(netloc=f"{role}@{HOST}:{front.port}").geturl()
        store = opened(
            database_url=url, database_iam=True, aws_region="eu-central-1", database_ssl_mode="verify-full",
            database_ssl_root_cert=str(front.ca_path),
        )  # fmt: skip
        tokens = []
        for _ in range(2):
            tokens.append(token_of_the_sdk(url, "eu-central-1"))
            assert f"{HOST}:{front.port}/?Action=connect&DBUser={role}&" in tokens[-1]
            await replace_password(postgres, role, tokens[-1])
            if len(tokens) == 2:
                with pytest.raises(Unavailable):
                    await store.ping()  # by the connection that was ended
            await store.ping()
            times.pop(0)
        assert tokens[0] != tokens[1]


async def test_iam_without_credentials_names_what_is_missing(
    bare_url: str, monkeypatch: pytest.MonkeyPatch, opened: Any, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    connecting._aws.cache_clear()
    store = opened(database_url=bare_url, database_iam=True, database_ssl_mode="require")
    with pytest.raises(Unavailable, match="PENSTOCK_DATABASE_IAM finds no AWS credentials"):
        await store.ping()
    connecting._aws.cache_clear()


async def test_iam_whose_role_is_refused_is_unavailable(
    bare_url: str, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    refused = ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "AssumeRoleWithWebIdentity")
    monkeypatch.setattr(connecting, "_aws", lambda: Mock(get_credentials=Mock(side_effect=refused)))
    store = opened(database_url=bare_url, database_iam=True, aws_region="eu-central-1", database_ssl_mode="require")
    with pytest.raises(Unavailable, match="PENSTOCK_DATABASE_IAM cannot sign: ClientError"):
        await store.ping()


async def test_a_client_certificate_is_shown_to_a_server_that_wants_one(
    database_url: str, tmp_path: Path, opened: Any
) -> None:
    with tls_front(database_url, tmp_path, wants_certificates=True) as front:
        settings = {
            "database_url": front.url(database_url),
            "database_ssl_mode": "verify-full",
            "database_ssl_root_cert": str(front.ca_path),
        }
        shown = {"database_ssl_cert": str(front.cert_path), "database_ssl_key": str(front.key_path)}
        await opened(**settings, **shown).ping()
        with pytest.raises(Unavailable):
            await opened(**settings).ping()
        assert front.secured == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"database_iam": True},
            "database_iam needs TLS, and the mode is prefer: set database_ssl_mode to verify-full",
        ),
        (
            {"database_iam": True, "database_password_command": "cat x", "database_ssl_mode": "require"},
            "database_password_command and database_iam give a password each",
        ),
        ({"database_url": "postgresql://me:pw@db/x", "database_password_command": "cat x"}, "the password of a URL"),
        ({"database_ssl_cert": __file__}, "database_ssl_cert and database_ssl_key go together"),
        ({"database_password_command": "  "}, "must name a program"),
        ({"database_password_command": "'"}, "No closing quotation"),
    ],
)
def test_settings_that_contradict_each_other(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as failure:
        load_settings(**{"database_url": "postgresql://me@db/x", **given})
    assert said in str(failure.value)
    assert "pw" not in str(failure.value)
