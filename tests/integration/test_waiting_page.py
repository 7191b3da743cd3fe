"""docs/waiting.md and docs/batches.md are run, example by example."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from penstock.db.pool import Store
from penstock.protocol.reports import decode_reports
from penstock.results.apply import apply_reports
from penstock.settings.model import Settings, load_settings
from penstock.tasks import claim
from penstock.worker.handlers.actions import REGISTRY
from penstock.worker.handlers.context import Cancellation, Context
from penstock.worker.responses import answer_of
from tests.integration.apis import JSON, running
from tests.integration.test_protocol_page import same

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    """Kind and text of each example, in order."""
    text = (DOCS / page).read_text("utf-8")
    return re.findall(r"^```(python app|json http)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def names() -> Any:
    """What the examples take from their surroundings; the handlers that they register are forgotten afterwards."""
    before = dict(REGISTRY)
    yield {}
    REGISTRY.clear()
    REGISTRY.update(before)


async def test_every_example_of_the_waiting_page_is_true(
    store: Store, settings: Settings, names: dict[str, Any]
) -> None:
    mails: list[str] = []

    async def send_mail(_to: str, text: str) -> None:
        mails.append(text)

    names |= {"send_mail": send_mail, "provider": SimpleNamespace(charge=lambda *_, **__: None)}
    examples = blocks("waiting.md")
    assert len(examples) >= 6
    for kind, text in examples:
        if kind == "python app":
            exec(text, names)
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        for kind, text in examples:
            if kind != "json http":
                continue
            for request, answer in re.findall(r"^--> (.*?)^<-- (.*?)(?=^-->|\Z)", text, re.MULTILINE | re.DOTALL):
                asked = json.loads(request)
                if asked["params"].get("token") == "TOKEN":  # the one of the mail
                    asked["params"]["token"] = mails[-1].partition("token=")[2]
                actual = (await http.post("/rpc", json=asked)).json()
                assert same(json.loads(answer), actual), f"{request} is answered {json.dumps(actual)}"
                if asked["method"] == "enqueue":
                    await run_what_is_due(store, settings)


async def run_what_is_due(store: Store, settings: Settings) -> None:
    """As scheduler, worker and resulter would."""
    async with store.session() as session:
        dispatch = await claim.claim(session, 10)
        assert dispatch is not None
        await claim.confirm(session, dispatch.id)
    for task in dispatch.tasks:
        handler = REGISTRY.get(task.action)
        assert handler is not None
        args, kwargs = handler.fit(task.payload.encode())
        returned = handler.function(Context(task.id, task.claim, task.action), *args, **kwargs)
        returned = await returned if handler.is_async else returned
        name = f"{task.id}:{task.claim}"
        attempt: Any = SimpleNamespace(
            claim_id=name, claim=(task.id, task.claim), handler=handler, spawned=[], cancellation=Cancellation()
        )
        text = answer_of(attempt, returned, settings)
        async with store.transaction() as session:
            assert (await apply_reports(session, decode_reports(text, batch_limit=10), settings)).waiting == 1


async def test_the_handler_of_the_batches_page_answers_for_each(names: dict[str, Any]) -> None:
    async def bulk(documents: list[Any]) -> list[str]:
        return ["busy" if d.id == 2 else "too long" if d.id == 3 else "" for d in documents]

    ((_, text),) = blocks("batches.md")
    names |= {"search": SimpleNamespace(bulk=bulk)}
    exec(text, names)
    handler = REGISTRY.get("index")
    assert handler is not None
    assert (handler.batch, handler.linger_seconds, handler.timeout) == (100, 0.05, 30)
    call, document = names["Call"], names["Document"]
    one, two, three = await names["index"]([call(Context(n, 1, "index"), document(n)) for n in (1, 2, 3)])
    assert one == {"indexed": 1}
    assert (two.delay, type(three), str(three)) == (10, ValueError, "too long")


def test_numbers_on_the_waiting_page_are_the_defaults() -> None:
    settings = load_settings()
    assert (settings.retention_waits_seconds, settings.wait_timeout_seconds) == (86_400, 7 * 86_400)
