"""What the workers of `penstock up` are told of the api, so that they learn of cancelled tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


def test_what_is_set_for_the_workers_alone_stays(tmp_path: Path) -> None:
    assert environment(tmp_path, {"PENSTOCK_CONTROL_URL": ""}) == {}
