"""Every example of docs/python-api.md is run against a pipeline."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.brokers.sqs import SqsQueue
from penstock.client import default
from penstock.db.pool import Store
from penstock.settings.model import Settings
from penstock.worker.handlers.actions import REGISTRY
from tests.docs_blocks import all_blocks
from tests.integration.pipelines import pipeline

PAGE = "docs/python-api.md"
ADDRESS = "http://127.0.0.1:8080"


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's module of handlers, which can be imported; its actions are forgotten afterwards."""
    (block,) = [block for block in all_blocks() if (block.page, block.info) == (PAGE, "python images.py")]
    (tmp_path / "images.py").write_text(block.text, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(REGISTRY)
    monkeypatch.setattr(default, "_arguments", {})
    yield
    sys.modules.pop("images", None)
    REGISTRY.clear()
    REGISTRY.update(before)
    default.client.cache_clear()


@pytest.mark.usefixtures("images")
async def test_every_example_of_the_page_prints_what_it_says(
    store: Store, settings: Settings, outbound: SqsQueue, results: SqsQueue, database_url: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("DATABASE_URL", database_url)
    __import__("images")
    programs = [block for block in all_blocks() if (block.page, block.info) == (PAGE, "python")]
    assert len(programs) >= 4
    async with pipeline(store, settings, outbound, results, REGISTRY) as api:
        for block in programs:
            says = re.findall(r"print\(.*\) +# (.*)", block.text)
            assert says, block.place
            capsys.readouterr()
            text = block.text.replace(ADDRESS, api.url)
            await asyncio.to_thread(exec, compile(text, block.place, "exec"), {"__name__": "__main__"})
            printed = [line for line in capsys.readouterr().out.splitlines() if "event=" not in line[:80]]
            assert [line for line in printed if line in says] == says, f"{block.place}: {printed}"


def test_the_options_on_the_page_are_those_of_the_type() -> None:
    text = (Path(__file__).parents[2] / PAGE).read_text("utf-8")
    listed = re.search(r"those of \[`enqueue`\]\(tasks\.md\): (.*?)\. Times", text, re.DOTALL)
    assert listed is not None
    assert re.split(r",\s+", listed[1]) == [*penstock.EnqueueOptions.__annotations__]
