"""What the workers of `penstock up` are given: how to reach the api, and the credentials and region of the user."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.local.children import Child
from penstock.local.service import HOST, free_port
from penstock.local.stack import Stack, _has_credentials
from penstock.protocol.api_key import Permission, digest_of, parse_entries
from penstock.settings.model import load_settings

URL = {"PENSTOCK_CONTROL_URL": "http://127.0.0.1:8123/rpc"}
HASHED = f"ci:read:{'ab' * 32}"


@pytest.mark.parametrize(
    "settings", [{"api_keys": f"{HASHED},plain-and-long-enough", "api_key": "own"}, {"api_require_keys": True}]
)
def test_workers_get_a_key_of_this_start_alone_which_may_only_ask_for_cancelled_tasks(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    stack = Stack(tmp_path)
    stack.settings, stack._http_port = load_settings(**settings), 8123
    given = stack._control_environment()
    key = given.pop("PENSTOCK_CONTROL_API_KEY")
    assert given == URL
    entries = stack._api_environment()["PENSTOCK_API_KEYS"].split(",")
    *users, ours = parse_entries(entries)
    assert users == list(stack.settings.known_keys)
    assert (ours.name, ours.digest, ours.permissions) == ("local-workers", digest_of(key.encode()), {Permission.WORKER})
    assert Stack(tmp_path / "other")._control_key != key


def test_a_key_that_the_settings_name_for_workers_stays(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.settings, stack._http_port = load_settings(api_keys="plain-and-long-enough", control_api_key="control"), 8123
    assert stack._control_environment() == URL | {"PENSTOCK_CONTROL_API_KEY": "control"}
    assert "PENSTOCK_API_KEYS" not in stack._api_environment()


def test_workers_get_no_key_where_none_is_asked_for(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.settings, stack._http_port = load_settings(api_key="own"), 8123
    assert stack._control_environment() == URL


def test_the_api_is_told_where_to_ask_the_workers_each_at_a_port_of_its_own(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.settings, stack._http_port, stack._ready = load_settings(), 8123, True
    for number in range(1, 4):
        stack._workers.append(Child(f"worker-{number}", [], {}, free_port()))
    told = stack._api_environment()
    assert (told["PENSTOCK_HTTP_PORT"], len({worker.metrics_port for worker in stack._workers})) == ("8123", 3)
    given = load_settings(dashboard_processes=told["PENSTOCK_DASHBOARD_PROCESSES"]).dashboard_processes
    assert given == tuple(f"{w.name}=http://127.0.0.1:{w.metrics_port}" for w in stack._workers)


def test_processes_that_the_user_names_stay(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.settings, stack._http_port, stack._ready = load_settings(dashboard_processes="http://host:1"), 8123, True
    assert "PENSTOCK_DASHBOARD_PROCESSES" not in stack._api_environment()


def test_a_port_that_was_lost_is_not_replaced_by_that_of_another_process_of_the_stack(tmp_path: Path) -> None:
    stack = Stack(tmp_path, port=0)
    stack.settings = load_settings()
    first = stack._http_port = stack._api_port()
    promised = free_port()
    with ExitStack() as taken:
        for port in range(first, promised):
            with suppress(OSError):  # then it is another program's
                taken.enter_context(socket.create_server((HOST, port)))
        assert int(stack._api_environment()["PENSTOCK_HTTP_PORT"]) != promised


@pytest.mark.parametrize(
    ("files", "variables", "found"),
    [
        ({"credentials": "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"}, {}, True),
        ({"config": "[default]\nsso_session = work\n"}, {}, True),
        ({"config": "[default]\nregion = eu-central-1\n"}, {}, False),
        ({"credentials": "[other]\naws_access_key_id = a\naws_secret_access_key = b\n"}, {}, False),
        ({"config": "no file of AWS"}, {}, False),
        ({}, {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1/"}, True),
        ({}, {}, False),
    ],
    ids=["credentials", "sso", "region", "other-profile", "junk", "container", "none"],
)
def test_credentials_of_the_user_are_found_where_the_sdk_finds_them(
    files: dict[str, str], variables: dict[str, str], found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, variable in (("credentials", "AWS_SHARED_CREDENTIALS_FILE"), ("config", "AWS_CONFIG_FILE")):
        monkeypatch.setenv(variable, str(tmp_path / name))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    assert _has_credentials() is found
    places = Stack(tmp_path)._places_of(load_settings(), "http://127.0.0.1:1", "key:secret")
    assert places["PENSTOCK_AWS_REGION"] == ("eu-central-1" if "eu-central-1" in str(files) else "us-east-1")


def test_without_sqs_the_users_endpoint_and_region_stay(tmp_path: Path) -> None:
    """For deliveries such as sqs.send."""
    stack = Stack(tmp_path, transport_url="amqp://127.0.0.1/")
    places = stack._places_of(load_settings(), "", "")
    assert not {"PENSTOCK_SQS_ENDPOINT_URL", "PENSTOCK_AWS_REGION"} & places.keys()
