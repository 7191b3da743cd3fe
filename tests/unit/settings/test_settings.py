from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.errors import SettingsError
from penstock.protocol.retry import Backoff
from penstock.settings.model import Settings, load_settings, misspelt_variables
from penstock.settings.values import is_loopback, masked

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no penstock.toml of a developer's checkout is read."""
    monkeypatch.chdir(tmp_path)


def mistakes(**values: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**values)
    return str(caught.value)


def test_without_any_source_the_defaults_hold() -> None:
    settings = load_settings()
    assert (settings.max_attempts, settings.retry_base_seconds, settings.retry_cap_seconds) == (10, 5, 3600)
    assert settings.sqs_endpoint_url is None
    assert settings.backoff == Backoff(5, 2, 3600, 0.2)


def test_arguments_win_over_the_environment_over_the_file_over_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "penstock.toml").write_text('max_attempts = 2\nretry_factor = 3\nlog_level = "debug"\n')
    monkeypatch.setenv("PENSTOCK_MAX_ATTEMPTS", "3")
    monkeypatch.setenv("PENSTOCK_RETRY_FACTOR", "4")
    settings = load_settings(max_attempts=4)
    assert (settings.max_attempts, settings.retry_factor, settings.log_level) == (4, 4, "debug")
    assert settings.concurrency == 2


def test_the_file_may_stand_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.toml"
    path.write_text('inbound_queue = "mine"\napi_keys = ["one-long-secret-key", "two-long-secret-key"]\n')
    monkeypatch.setenv("PENSTOCK_CONFIG", str(path))
    settings = load_settings()
    assert settings.inbound_queue == "mine"
    assert [key.get_secret_value() for key in settings.api_keys] == ["one-long-secret-key", "two-long-secret-key"]


def test_a_file_that_is_named_and_missing_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "gone.toml"))
    assert "gone.toml" in mistakes()


@pytest.mark.parametrize("text", ["a = ", b"\xff"])
def test_a_file_that_is_no_toml_is_a_mistake_with_its_name(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "penstock.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    assert "penstock.toml is not valid TOML" in mistakes()


def test_a_misspelt_setting_in_the_file_is_a_mistake_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("max_atempts = 2\n")
    assert "did you mean max_attempts?" in mistakes()


def test_misspelt_variables_are_found_and_foreign_ones_left_alone() -> None:
    seen = {"PENSTOCK_MAX_ATEMPTS": "1", "PENSTOCK_MAX_ATTEMPTS": "1", "PENSTOCK_CONFIG": "", "PENSTOCK_HOME_TOWN": "",
            "MAX_ATEMPTS": "1", "PENSTOCK_UP_DATABASE_URL": "", "PENSTOCK_UP_TRANSPORT_URL": "", "penstock_config": "",
            "penstock_log_level": "info", "penstock_log_levle": "info"}  # fmt: skip
    meant = {"PENSTOCK_MAX_ATEMPTS": "PENSTOCK_MAX_ATTEMPTS", "penstock_log_levle": "PENSTOCK_LOG_LEVEL"}
    assert dict(misspelt_variables(seen)) == meant


def test_all_mistakes_are_told_at_once() -> None:
    text = mistakes(max_attempts=0, database_url="mysql://root:hush@db/x", log_level="loud", nonsense=1)
    for name in ("MAX_ATTEMPTS", "DATABASE_URL", "LOG_LEVEL", "NONSENSE"):
        assert f"PENSTOCK_{name}: " in text
    assert "postgresql://" in text


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"retry_base_seconds": 10, "retry_cap_seconds": 9}, "retry_cap_seconds must be at least"),
        ({"heartbeat_seconds": 60, "stale_after_seconds": 60}, "stale_after_seconds must be above"),
        ({"http_host": "0.0.0.0"}, "set PENSTOCK_API_KEYS first"),
        ({"http_host": "api.example.org"}, "set PENSTOCK_API_KEYS first"),
        ({"sqs_endpoint_url": "localhost:9324"}, "must begin with http://"),
        ({"api_url": "ftp://x"}, "must begin with http://"),
        ({"visibility_timeout_seconds": 43201}, "less than or equal to 43200"),
        ({"receive_wait_seconds": 21}, "less than or equal to 20"),
        ({"inbound_queue": ""}, "at least 1 character"),
        ({"retry_jitter": 1.5}, "less than or equal to 1"),
        ({"metrics_port": 65536}, "less than or equal to 65535"),
    ],
)
def test_values_that_cannot_work_are_refused_with_the_reason(values: dict[str, Any], problem: str) -> None:
    assert problem in mistakes(**values)


@pytest.mark.parametrize("name", ["retry_base_seconds", "retry_cap_seconds", "retry_factor", "stale_after_seconds",
                                  "poll_seconds", "grace_seconds", "task_timeout_seconds",
                                  "retention_success_seconds"])  # fmt: skip
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_that_is_none_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", value)
    assert f"PENSTOCK_{name.upper()}" in mistakes()


@pytest.mark.parametrize(
    "name", ["database_url", "sqs_endpoint_url", "aws_region", "api_url", "api_key", "metrics_port"]
)
def test_an_empty_variable_is_an_unset_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PENSTOCK_{name.upper()}", "")
    assert getattr(load_settings(), name) is None


def test_a_line_end_behind_a_variable_as_of_a_file_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_URL", "https://penstock.internal\n")
    monkeypatch.setenv("PENSTOCK_SQS_ACCESS_KEY", "id:secret\r\n")
    settings = load_settings()
    assert settings.api_url == "https://penstock.internal"
    assert settings.sqs_access_key is not None
    assert settings.sqs_access_key.get_secret_value() == "id:secret"


def test_api_keys_are_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEYS", " one-long-secret-key, two-long-secret-key ,,")
    monkeypatch.setenv("PENSTOCK_HTTP_HOST", "0.0.0.0")
    assert [key.get_secret_value() for key in load_settings().api_keys] == [
        "one-long-secret-key",
        "two-long-secret-key",
    ]


def test_no_secret_is_shown_in_a_repr_a_dump_or_a_mistake() -> None:
    secret = "hush-hush-hush-hush"
    url = f"postgresql://me:{secret}@db/x"
    settings = load_settings(database_url=url, api_keys=secret, api_key=secret)
    assert secret not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    assert secret not in mistakes(database_url=url.replace("postgresql", "mysql"), api_keys=secret, max_attempts=0)
    assert settings.require_database_url == url


def test_a_missing_database_url_names_the_next_step() -> None:
    with pytest.raises(SettingsError, match=r"PENSTOCK_DATABASE_URL is not set.*penstock up"):
        _ = load_settings().require_database_url


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().max_attempts = 3


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example.org", False), ("", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest_of_the_world(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# Deliveries


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("http_allow", "10.0.0.0/33", "'10.0.0.0/33' is neither a network such as 10.1.0.0/16"),
        ("http_allow", "billing.internal,http://x", "'http://x' is neither"),
        ("http_signing_secrets", "good:one,geheim", "entry 2 is not name:secret"),
        ("http_signing_secrets", "a b:geheim", "entry 1 is not name:secret"),
        ("http_signing_secrets", "a:whsec_geheim!", "a secret that begins with whsec_ must go on with base64"),
        ("http_ca_file", "/no/such/file", "/no/such/file is no file that can be read"),
    ],
)
def test_settings_of_deliveries_that_cannot_work_are_refused_without_their_secrets(
    name: str, value: str, reason: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(**{name: value})
    assert f"PENSTOCK_{name.upper()}: {reason}" in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_a_secret_may_stand_twice_under_one_name_and_hold_colons() -> None:
    settings = load_settings(http_signing_secrets="a:geheim, b:x:y ,a:two")
    assert settings.signing_secrets == {"a": ("geheim", "two"), "b": ("x:y",)}
    assert "geheim" not in repr(settings)


def test_no_name_of_the_groups_takes_the_place_of_another() -> None:
    seen = Counter(name for body in class_bodies() for name in names_of(body))
    assert {"database_url", "_database_problems", "backoff"} <= set(seen)
    assert [name for name, count in seen.items() if count > 1] == []


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    """What a class defines."""
    for each in body:
        if isinstance(each, ast.FunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
            assert isinstance(target, ast.Name)
            yield target.id


# docs/configuration.md

_ROW = re.compile(r"^\| `(PENSTOCK_[A-Z0-9_]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)


def documented_rows() -> list[tuple[str, ...]]:
    text = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    return [tuple(match.groups()) for match in _ROW.finditer(text)]


def class_bodies() -> Iterator[list[ast.stmt]]:
    """Of the groups of settings, and of the class that they become."""
    for path in (REPOSITORY / "services" / "penstock" / "settings").glob("*.py"):
        for each in ast.parse(path.read_text("utf-8")).body:
            if isinstance(each, ast.ClassDef) and each.name.endswith("Settings"):
                yield each.body


def descriptions() -> dict[str, str]:
    """The text below each field of a group of settings."""
    found = {}
    for field, text in (pair for body in class_bodies() for pair in pairwise(body)):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def expected_rows() -> list[tuple[str, ...]]:
    """The rows that the document must hold, made from the settings themselves."""
    described = descriptions()
    return [
        (f"PENSTOCK_{name.upper()}", shown_default(field.default), described[name])
        for name, field in Settings.model_fields.items()
    ]


def shown_default(default: Any) -> str:
    if isinstance(default, tuple):
        default = ",".join(default)
    return "unset" if default in (None, "", {}) else f"`{default}`"


def test_every_setting_has_a_description() -> None:
    described = descriptions()
    assert [name for name in Settings.model_fields if not described.get(name)] == []


def test_the_document_tables_every_setting_with_its_default_and_meaning() -> None:
    assert documented_rows() == expected_rows()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hush@db/tasks", "postgresql://u:***@db/tasks"),
        ("postgresql://u@db/tasks?password=hush", "postgresql://u@db/tasks?***"),
        ("postgresql://u:hush@db/tasks?sslmode=require", "postgresql://u:***@db/tasks?***"),
        ("postgresql:///tasks", "postgresql:///tasks"),
    ],
)
def test_a_database_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_a_file_that_cannot_be_read_is_a_mistake_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").mkdir()
    assert "penstock.toml cannot be read: Is a directory" in mistakes()
