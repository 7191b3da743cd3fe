"""The example of docs/results.md is run against an api, with a worker for the tasks."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from penstock.db.notify import CHANNEL
from penstock.db.pool import Store
from penstock.protocol.task import Failure
from penstock.settings.model import Settings
from penstock.tasks import claim, settle
from tests.integration.apis import running

PAGE = (Path(__file__).parents[2] / "docs" / "results.md").read_text("utf-8")


async def work(store: Store) -> None:
    """What scheduler, worker and resulter do together, until it is cancelled."""
    while True:
        async with store.transaction() as session:
            batch = await claim.claim(session, 1000)
            if batch is not None:
                done = {t.id: json.loads(t.payload) for t in batch.tasks if t.action == "double"}
                failed = [t.id for t in batch.tasks if t.action == "fail"]
                await settle.finish(
                    session,
                    {(task_id, batch.id): json.dumps({"doubled": 2 * given["n"]}) for task_id, given in done.items()},
                )
                error = '{"code": -32000, "message": "ValueError: no luck"}'
                await settle.fail(session, [Failure(task_id, batch.id, error, None) for task_id in failed])
                await session.fetch("notify_work", CHANNEL, "")
        await asyncio.sleep(0.01)


async def test_the_example_of_the_results_page_prints_what_it_says(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    async with running(store, settings) as api:
        monkeypatch.setenv("PENSTOCK_API_URL", api.url)
        working = asyncio.create_task(work(store))
        capsys.readouterr()
        try:
            await asyncio.to_thread(exec, compile(text, "docs/results.md", "exec"), {})
        finally:
            working.cancel()
    printed = [line for line in capsys.readouterr().out.splitlines() if "[" not in line[:40]]
    assert printed == ["{'doubled': 42}", "999000", "ValueError: no luck"]
