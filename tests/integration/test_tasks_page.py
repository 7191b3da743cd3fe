"""docs/tasks.md is run, example by example."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from penstock.db.pool import Store
from penstock.settings.model import Settings
from tests.integration.apis import JSON, running
from tests.integration.test_protocol_page import same

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


async def test_every_example_of_the_tasks_page_is_true(store: Store, settings: Settings) -> None:
    blocks = re.findall(r"^```json http\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    pairs = [
        pair
        for text in blocks
        for pair in re.findall(r"^--> (.*?)^<-- (.*?)(?=^-->|\Z)", text, re.MULTILINE | re.DOTALL)
    ]
    assert len(pairs) >= 9
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        for request, answer in pairs:
            actual = (await http.post("/rpc", content=request)).json()
            assert same(json.loads(answer), actual), f"{request} is answered {json.dumps(actual)}"
