"""The applications of docs/web-frameworks.md are served requests, against a real api and database."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.client import default
from penstock.db.pool import Store
from penstock.protocol.task import State
from penstock.settings.model import Settings
from penstock.tasks import claim, settle
from penstock.worker.handlers.actions import REGISTRY
from tests.docs_blocks import all_blocks
from tests.integration.apis import running

PAGE = "docs/web-frameworks.md"


def block(info: str) -> str:
    (found,) = [block.text for block in all_blocks() if (block.page, block.info) == (PAGE, info)]
    return found


@pytest.fixture
def _receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "receipts.py").write_text(block("python receipts.py"), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(REGISTRY)
    monkeypatch.setattr(default, "_arguments", {})
    default.client.cache_clear()
    yield
    default.client.cache_clear()
    sys.modules.pop("receipts", None)
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture
async def orders(
    _receipts: None, store: Store, settings: Settings, sql: Any, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    await sql.execute("create table public.orders (id int primary key)")
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with running(store, settings) as api:
        monkeypatch.setenv("PENSTOCK_API_URL", api.url)
        yield


@pytest.mark.usefixtures("orders")
async def test_the_application_of_fastapi_adds_orders_with_their_tasks(
    store: Store, task_of: Callable[[int], Any]
) -> None:
    pytest.importorskip("fastapi")
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(block("python fastapi"), PAGE, "exec"), names)
    transport = httpx.ASGITransport(app=names["app"], raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http:
        added = await http.post("/orders/1", params={"to": "ann@example.org"})
        task_id = added.json()["task"]
        assert (await http.post("/orders/1", params={"to": "ann@example.org"})).status_code == 500  # a second order 1
        assert await task_of(task_id + 1) is None
        assert (await http.get(f"/tasks/{task_id}")).json() == {"state": "SCHEDULED"}
        assert (await http.get(f"/tasks/{task_id + 1}")).status_code == 404
        waiting = asyncio.create_task(http.get(f"/receipts/{task_id}"))
        async with store.transaction() as session:
            batch = await claim.claim(session, 1)
            assert batch is not None
            await settle.finish(session, {(task_id, batch.id): json.dumps({"sent_to": "ann@example.org"})})
        assert (await waiting).json() == {"sent_to": "ann@example.org"}
    await names["engine"].dispose()
    assert json.loads((await task_of(task_id))["payload"]) == {"order": 1, "to": "ann@example.org"}


@pytest.mark.usefixtures("orders")
async def test_the_application_of_flask_adds_orders_with_their_tasks(task_of: Callable[[int], Any]) -> None:
    pytest.importorskip("flask")
    names: dict[str, Any] = {"__name__": "shop"}
    exec(compile(block("python flask"), PAGE, "exec"), names)

    def use() -> int:
        http = names["app"].test_client()
        task_id: int = http.post("/orders/1?to=ann@example.org").json["task"]
        assert http.post("/orders/1?to=ann@example.org").status_code == 500
        assert http.get(f"/tasks/{task_id}").json == {"state": "SCHEDULED"}
        assert http.get(f"/tasks/{task_id + 1}").status_code == 404
        names["engine"].dispose()
        return task_id

    task = await task_of(await asyncio.to_thread(use))
    assert (State(task["state"]), json.loads(task["payload"])) == (
        State.SCHEDULED,
        {"order": 1, "to": "ann@example.org"},
    )
