"""Settings of TLS, of API keys and of limits; and URLs that would put a password into an error's text."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.protocol.api_key import ALL_PERMISSIONS
from penstock.protocol.errors import SettingsError
from penstock.settings.model import load_settings

URL = "postgresql://me:pass@db.example:5432/tasks"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def root_cert(tmp_path: Path) -> str:
    path = tmp_path / "ca & co.pem"
    path.write_text("x")
    return str(path)


def mistakes(**values: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**values)
    return str(caught.value)


def query(url: str) -> dict[str, list[str]]:
    return parse_qs(urlsplit(url).query)


# TLS


def test_url_is_left_alone_without_settings_of_tls() -> None:
    for url in (URL, f"{URL}?sslmode=require", "postgresql://h1:1,h2:2/x?host=a#b"):
        assert load_settings(database_url=url).require_database_url == url


def test_settings_of_tls_become_parameters_of_the_url(root_cert: str) -> None:
    settings = load_settings(database_url=URL, database_ssl_mode="verify-full", database_ssl_root_cert=root_cert)
    url = settings.require_database_url
    assert url.startswith(f"{URL}?")
    assert query(url) == {"sslmode": ["verify-full"], "sslrootcert": [root_cert]}
    more = load_settings(database_url=f"{URL}?application_name=x", database_ssl_mode="require").require_database_url
    assert query(more) == {"application_name": ["x"], "sslmode": ["require"]}


def test_what_url_and_settings_agree_on_is_no_conflict(root_cert: str) -> None:
    url = load_settings(
        database_url=URL, database_ssl_mode="verify-full", database_ssl_root_cert=root_cert
    ).require_database_url
    again = load_settings(database_url=url, database_ssl_mode="verify-full", database_ssl_root_cert=root_cert)
    assert again.require_database_url == url
    assert "otherwise than database_ssl_mode" in mistakes(
        database_url=f"{URL}?sslmode=disable", database_ssl_mode="require"
    )


def test_verifying_without_a_file_takes_the_authorities_of_the_system(
    root_cert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ssl.get_default_verify_paths()
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths._replace(cafile=root_cert))
    url = load_settings(database_url=URL, database_ssl_mode="verify-full").require_database_url
    assert query(url)["sslrootcert"] == [root_cert]
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths._replace(cafile=None))
    assert "needs database_ssl_root_cert" in mistakes(database_url=URL, database_ssl_mode="verify-full")
    assert "sslrootcert" not in load_settings(database_url=URL, database_ssl_mode="require").require_database_url


def test_certificate_that_nothing_would_look_at_is_a_mistake(root_cert: str) -> None:
    assert "is not looked at with the mode prefer" in mistakes(database_url=URL, database_ssl_root_cert=root_cert)
    assert "no file that can be read" in mistakes(database_ssl_root_cert="/nowhere/ca.pem")
    assert "DATABASE_SSL_MODE" in mistakes(database_ssl_mode="verify")


# URLs


@pytest.mark.parametrize(
    "password", ["hush/5", "hush#5", "hush?5", "h]ush", "[hush", "hush/@5", "hush#@5"],
)  # fmt: skip
def test_password_that_tears_its_url_is_refused_without_being_shown(password: str) -> None:
    """The driver would take a part of it for the port, and say so in an error."""
    text = mistakes(database_url=f"postgresql://me:{password}@db.example/tasks")
    assert "%2F" in text
    assert "hush" not in text
    assert "h]ush" not in text


@pytest.mark.parametrize(
    "url",
    [URL, "postgresql:///tasks?host=/run/postgresql", "postgres://db", "postgresql://me:hu%2Fsh@[::1]:5432/x",
     "postgresql://me@h1:5432,h2:5433/x?target_session_attrs=read-write", "postgresql://me:a:b@db/x",
     "postgresql://me:@db:/x"],
)  # fmt: skip
def test_urls_that_drivers_take_are_taken(url: str) -> None:
    assert load_settings(database_url=url).require_database_url == url


@pytest.mark.parametrize("name", ["sqs_endpoint_url", "api_url"])
def test_endpoint_with_a_password_in_it_is_refused_without_being_shown(name: str) -> None:
    text = mistakes(**{name: "https://me:hush@queue.example"})
    assert "no user and no password" in text
    assert "hush" not in text


# Keys and limits


def test_keys_are_read_from_their_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEYS", f"plain-and-long-enough, ci:enqueue:{'ab' * 32}")
    keys = load_settings().known_keys
    assert [(key.name, key.permissions == ALL_PERMISSIONS) for key in keys] == [("entry 1", True), ("ci", False)]


def test_wrong_entry_is_a_mistake_that_names_its_position_only() -> None:
    text = mistakes(api_keys="good-and-long-enough,hush:nothing", max_attempts=0)
    assert "PENSTOCK_API_KEYS: entry 2" in text
    assert "PENSTOCK_MAX_ATTEMPTS" in text
    assert "hush" not in text


def test_a_plain_key_that_can_be_guessed_is_a_mistake_that_names_its_position_and_length() -> None:
    text = mistakes(api_keys=f"letmein,{'k' * 16},ci:read:{'ab' * 32},hunter2hunter2h")
    assert "entry 1 is a key of 7 characters" in text
    assert "entry 4 is a key of 15 characters" in text
    assert "openssl rand" in text
    assert "entry 2" not in text
    assert "entry 3" not in text
    assert "letmein" not in text
    assert "hunter2" not in text


def test_keys_in_postgres_open_the_api_to_the_network_when_they_are_required() -> None:
    assert not load_settings().needs_keys
    assert load_settings(http_host="0.0.0.0", api_require_keys=True).needs_keys
    assert load_settings(http_host="0.0.0.0", api_keys="one-long-secret-key").needs_keys
    assert "PENSTOCK_API_REQUIRE_KEYS=true" in mistakes(http_host="0.0.0.0")


def test_burst_without_a_rate_is_a_mistake() -> None:
    assert "api_rate_burst needs api_rate_limit" in mistakes(api_rate_burst=5)
