"""Every text that a method takes, with characters that Postgres cannot store or that separate what is stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import httpx
import msgspec
import pytest

from penstock.api.table import METHODS
from penstock.db.pool import Store
from penstock.settings.model import Settings
from tests.integration.apis import captured_log, running

REQUIRED: dict[str, Any] = {
    "id": 1, "action": "a", "name": "n", "key": "k", "token": "t", "expression": "@daily", "queue": "inbound",
    "limit": 1, "claims": ["1:1"], "tenant": "t", "error": "e", "permissions": ["read"], "schedules": [{}], "all": True,
    "delay": 1, "steps": [{"action": "a"}],
}  # fmt: skip


def kinds_of(kind: Any) -> set[Any]:
    """The types that an annotation consists of."""
    if get_origin(kind) is Annotated:
        return kinds_of(get_args(kind)[0])
    parts = get_args(kind)
    if get_origin(kind) in (dict, list) or not parts:
        return {get_origin(kind) or kind}
    return set().union(*map(kinds_of, parts))


def calls(bad: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, method in METHODS.items():
        fields = {one.name: one for one in msgspec.structs.fields(method.params)}
        base = {one.name: REQUIRED[one.name] for one in fields.values() if one.required}
        if name.startswith("bulk."):
            base["all"] = True
        for one in fields.values():
            kinds = kinds_of(one.type)
            values: list[Any] = [bad] if kinds & {str, Any} else []
            values += [{bad: "x"}, {"x": bad}] if dict in kinds else []
            values += [[bad], [{"action": bad}], [{"action": "a", "name": bad}]] if list in kinds else []
            for value in values:
                given = base | {one.name: value}
                if one.name in ("labels", "action", "tenant", "ids_from", "ids_to"):
                    given.pop("all", None)
                yield name, given
                if name == "rejected.retry" or name == "dlq.purge":
                    yield name, given | {"limit": 1}


@pytest.mark.parametrize("bad", ["a\0b", "\x1f", "a\x85b", "\ufffe"])
async def test_no_text_is_an_internal_error(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    logged = captured_log(monkeypatch)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, timeout=60) as http:
        asked = list(calls(bad))
        failed = []
        for name, params in asked:
            body = {"jsonrpc": "2.0", "method": name, "params": params, "id": 1}
            answer = (await http.post("/rpc", json=body)).json()
            if answer.get("error", {}).get("code") == -32603:
                failed.append((name, params, logged[-1:]))
    assert len(asked) > 100
    assert failed == []
