"""`penstock keys`, beside a real api that asks for keys."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from penstock.local.state import DataDir
from tests.acceptance.conftest import penstock
from tests.acceptance.test_no_secrets import run, started

DISCOVER = {"jsonrpc": "2.0", "method": "rpc.discover", "id": 1}


def status_of(url: str, key: str) -> int:
    return httpx.post(f"{url}/rpc", json=DISCOVER, headers={"X-API-Key": key}, timeout=30).status_code


def wait_for_status(url: str, key: str, status: int) -> None:
    deadline = time.monotonic() + 10  # what is promised
    while status_of(url, key) != status:
        assert time.monotonic() < deadline, f"never {status}"
        time.sleep(0.1)


def test_first_key_is_made_listed_used_and_revoked_by_the_command(
    database_url: str, sqs_url: str, data_path: Path
) -> None:
    asking = {
        "PENSTOCK_API_REQUIRE_KEYS": "true", "PENSTOCK_API_KEYS": "", "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_SQS_ENDPOINT_URL": sqs_url,
    }  # fmt: skip
    place = DataDir(data_path)
    with started(data_path, "api", **asking) as [api], place.held():
        url = api.wait_for(r"event=api_listening .*url=(\S+)")
        place.write_state(
            {"api": url, "database_url": database_url, "database_env": {}, "env": {}}
        )  # as `penstock up` does
        folder, requiring = ("--data-dir", str(data_path)), {"PENSTOCK_API_REQUIRE_KEYS": "true"}
        assert status_of(url, "nothing") == 401
        key = penstock("keys", "create", "ops", "--permission", "admin", *folder, env=requiring).strip()
        wait_for_status(url, key, 200)
        feeder = json.loads(
            penstock("keys", "create", "feeder", "--permission", "enqueue", "--expires-in-days", "1", "--json", *folder)
        )
        assert feeder["expires_at"] is not None
        wait_for_status(url, feeder["key"], 403)
        added = penstock("enqueue", "a", *folder, env={"PENSTOCK_API_KEY": feeder["key"]})
        assert added.startswith("task 1 SCHEDULED")
        assert '"a"' in penstock("stats", "--json", *folder, env={"PENSTOCK_API_KEY": key})

        with pytest.raises(AssertionError, match="already"):
            penstock("keys", "create", "ops", "--permission", "read", *folder)
        listed = penstock("keys", "list", *folder)
        assert "feeder" in listed
        assert feeder["prefix"] in listed
        assert feeder["key"] not in listed
        assert "ops" in penstock("keys", "revoke", "ops", *folder)
        wait_for_status(url, key, 401)
        penstock("keys", "revoke", str(feeder["id"]), *folder)
        wait_for_status(url, feeder["key"], 401)
        assert json.loads(penstock("keys", "list", "--json", *folder)) == []
        assert {one["name"] for one in json.loads(penstock("keys", "list", "--all", "--json", *folder))} == {
            "ops", "feeder",
        }  # fmt: skip
        with pytest.raises(AssertionError, match="no key 'stranger'"):
            penstock("keys", "revoke", "stranger", *folder)


def test_key_made_where_none_are_asked_for_comes_with_a_note(database_url: str) -> None:
    settings = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_API_KEYS": ""}
    assert "PENSTOCK_API_REQUIRE_KEYS=true" in run("keys", "create", "x", "--permission", "read", **settings)[1]
    asked = run("keys", "create", "y", "--permission", "read", PENSTOCK_API_REQUIRE_KEYS="true", **settings)[1]
    assert "note" not in asked
    wrong = run("keys", "create", "z", "--permission", "root", **settings)
    assert wrong[0] == 2
