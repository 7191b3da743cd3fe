"""What the workers of `penstock up` are told of the api, so that they learn of cancelled tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.local.children import Child
from penstock.local.service import free_port
from penstock.local.stack import Stack
from penstock.settings import load_settings

URL = {"PENSTOCK_CONTROL_URL": "http://127.0.0.1:8123/rpc"}
HASHED = f"ci:read:{'ab' * 32}"


def environment(tmp_path: Path, worker_env: dict[str, str] | None = None, **settings: Any) -> dict[str, str]:
    stack = Stack(tmp_path, worker_env=worker_env)
    stack._settings, stack._http_port = load_settings(**settings), 8123
    return stack._control_environment()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"api_keys": f"{HASHED},plain"}, "plain"),
        ({"api_keys": "plain", "api_key": "own"}, "own"),
        ({"api_require_keys": True, "api_key": "own", "control_api_key": "control"}, "control"),
    ],
)
def test_workers_get_a_key_where_the_api_asks_for_one(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    assert environment(tmp_path, **settings) == URL | {"PENSTOCK_CONTROL_API_KEY": key}


def test_workers_get_no_key_where_none_is_asked_for(tmp_path: Path) -> None:
    assert environment(tmp_path, api_key="own") == URL


def test_workers_that_would_be_refused_are_not_told_to_ask(tmp_path: Path) -> None:
    assert environment(tmp_path, api_keys=HASHED) == {}


def test_the_api_is_told_where_to_ask_the_workers_each_at_a_port_of_its_own(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack._settings, stack._http_port, stack._ready = load_settings(), 8123, True
    for number in range(1, 4):
        stack._workers.append(Child(f"worker-{number}", [], {}, free_port()))
    told = stack._api_environment()
    assert (told["PENSTOCK_HTTP_PORT"], len({worker.metrics_port for worker in stack._workers})) == ("8123", 3)
    given = load_settings(dashboard_processes=told["PENSTOCK_DASHBOARD_PROCESSES"]).dashboard_processes
    assert given == tuple(f"{w.name}=http://127.0.0.1:{w.metrics_port}" for w in stack._workers)


def test_processes_that_the_user_names_stay(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack._settings, stack._http_port, stack._ready = load_settings(dashboard_processes="http://host:1"), 8123, True
    assert "PENSTOCK_DASHBOARD_PROCESSES" not in stack._api_environment()


def test_what_is_set_for_the_workers_alone_stays(tmp_path: Path) -> None:
    assert environment(tmp_path, {"PENSTOCK_CONTROL_URL": ""}) == {}
