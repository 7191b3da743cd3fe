"""docs/payloads.md: its programs are run against a pipeline with a bucket."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from penstock import Context, action
from penstock.settings.model import Settings, load_settings
from penstock.worker.handlers.actions import Registry
from tests.integration.plants import plant, until
from tests.s3 import S3Bucket

PAGE = Path(__file__).parents[2] / "docs" / "payloads.md"


async def test_the_programs_of_the_page_run(settings: Settings, s3: S3Bucket) -> None:
    over_http, through_the_queue = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    registry = Registry()

    @action("measure", registry=registry)
    async def measure(ctx: Context, text: str) -> int:
        return len(text)

    changed = load_settings(
        **settings.model_dump() | {"payload_bucket": s3.url, "payload_s3_endpoint_url": s3.endpoint_url}
    )
    async with plant(changed, registry) as pipe:
        assert pipe.http is not None
        names: dict[str, Any] = {"url": str(pipe.http.base_url)}
        running = asyncio.create_task(asyncio.to_thread(exec, over_http, names))
        await pipe.work()
        await running
        assert len(s3.objects()) == 1  # the payload; its result is small
        names = {
            "bucket": s3.url, "s3_url": s3.endpoint_url, "inbound": settings.inbound_queue,
            "sqs_url": settings.sqs_endpoint_url,
        }  # fmt: skip
        body = "".join(f"    {line}\n" for line in through_the_queue.splitlines())
        exec(f"async def program():\n{body}", names)
        await names["program"]()
        await until(pipe.submitter.run_once, "the message")
        await pipe.work()
        assert [task["result"] for task in (await pipe.call("list"))["tasks"]] == [3_000_000, 2_000_000]


def test_every_setting_has_its_place_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    named = {name for name in Settings.model_fields if name.startswith("payload_")} - {"payload_retention_seconds"}
    assert {name for name in named if f"PENSTOCK_{name.upper()}" not in text} == set()
