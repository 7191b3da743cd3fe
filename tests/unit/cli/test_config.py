"""`penstock config show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX

SECRETS = {
    "PENSTOCK_SQS_ACCESS_KEY": "AKID:hunter2",
    "PENSTOCK_DATABASE_URL": "postgresql://me:hunter2@db:5432/tasks?passfile=hunter2",
    "PENSTOCK_DATABASE_LISTEN_URL": "postgresql://me:hunter2@db:5433/tasks",
    "PENSTOCK_DATABASE_READ_URL": "postgresql://me:hunter2@db:5434/tasks",
    "PENSTOCK_API_KEYS": "hunter2hunter2hunter2,ci:read:" + "0" * 64,
    "PENSTOCK_CONTROL_API_KEY": "hunter2",
    "PENSTOCK_HTTP_SIGNING_SECRETS": "billing:hunter2",
    "PENSTOCK_TRANSPORT_URL": "amqp://me:hunter2@mq/vhost",
    "PENSTOCK_AMQP_PUBLISH_URL": "amqps://me:hunter2@mq/vhost",
    "PENSTOCK_KAFKA_SECURITY_PROTOCOL": "sasl_ssl",
    "PENSTOCK_KAFKA_SASL_USERNAME": "me",
    "PENSTOCK_KAFKA_SASL_PASSWORD": "hunter2",
    "PENSTOCK_KAFKA_SSL_KEY_PASSWORD": "hunter2",
    "PENSTOCK_SCHEDULER0_AUTH_USERNAME": "me",
    "PENSTOCK_SCHEDULER0_AUTH_PASSWORD": "hunter2",
    "PENSTOCK_PAYLOAD_KEYS": "hunter2" + "A" * 36 + "=",
    "PENSTOCK_SQL_STATEMENTS": '{"a": {"dsn": "postgresql://me:hunter2@db/x", "statement": "select 1"}}',
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(*arguments: str) -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(app, ["config", "show", "--json", *arguments])
    assert done.exit_code == 0, done.output
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_every_setting_is_shown_and_by_default_comes_from_the_default() -> None:
    rows = shown()
    assert list(rows) == [PREFIX + name.upper() for name in Settings.model_fields]
    assert {row["source"] for row in rows.values()} == {"default"}
    assert rows["PENSTOCK_MAX_ATTEMPTS"]["value"] == 10
    assert rows["PENSTOCK_DATABASE_URL"]["value"] is None
    assert shown("--changed") == {}


def test_a_value_comes_from_where_it_was_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "penstock.toml").write_text('max_attempts = 3\nretry_cap_seconds = 60\ndeliveries = ["sqs.send"]\n')
    monkeypatch.setenv("PENSTOCK_MAX_ATTEMPTS", "4")
    monkeypatch.setenv("penstock_grace_seconds", "7")
    rows = shown("--changed")
    assert {name: (row["value"], row["source"]) for name, row in rows.items()} == {
        "PENSTOCK_MAX_ATTEMPTS": (4, "environment"),
        "PENSTOCK_RETRY_CAP_SECONDS": (60.0, "penstock.toml"),
        "PENSTOCK_DELIVERIES": (["sqs.send"], "penstock.toml"),
        "PENSTOCK_GRACE_SECONDS": (7.0, "environment"),
    }
    (folder / "penstock.toml").rename(folder / "other.toml")
    monkeypatch.setenv("PENSTOCK_CONFIG", "other.toml")
    assert shown("retry_cap_seconds")["PENSTOCK_RETRY_CAP_SECONDS"]["source"] == "other.toml"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch, form: list[str]) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["config", "show", *form])
    assert done.exit_code == 0
    assert "hunter2" not in done.output
    assert "0" * 64 not in done.output
    assert "postgresql://me:***@db:5432/tasks" in done.output


def test_every_secret_of_the_settings_is_among_those_that_were_tried() -> None:
    """A new one must be added above."""
    secret = {
        PREFIX + name.upper() for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
    }
    assert secret - {"PENSTOCK_API_KEY"} <= set(SECRETS)


def test_names_are_taken_in_each_form_and_a_misspelt_one_is_told() -> None:
    assert list(shown("max_attempts", "PENSTOCK_GRACE_SECONDS")) == ["PENSTOCK_MAX_ATTEMPTS", "PENSTOCK_GRACE_SECONDS"]
    done = CliRunner().invoke(app, ["config", "show", "max_attemps"])
    assert done.exit_code == 2
    assert "did you mean max_attempts?" in done.output


def test_a_variable_that_only_looks_like_a_setting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_ATTEMPS", "3")
    done = CliRunner().invoke(app, ["config", "show", "max_attempts"])
    assert done.stdout.splitlines()[1].split() == ["PENSTOCK_MAX_ATTEMPTS", "10", "default"]
    assert "PENSTOCK_MAX_ATTEMPS is not a setting; did you mean PENSTOCK_MAX_ATTEMPTS?" in done.stderr
