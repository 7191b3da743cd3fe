"""docs/protocol.md is run, example by example, against an api and the code that reads and writes the queues."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsTransport
from penstock.db.pool import Store
from penstock.methods.inbound import accept_inbound, read_inbound
from penstock.protocol.fence import Fence
from penstock.protocol.reports import decode_reports
from penstock.results.apply import apply_reports
from penstock.scheduler.sending import call_of
from penstock.settings.model import Settings, load_settings
from penstock.tasks import claim, enqueue
from tests.integration.apis import JSON, running

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
MESSAGE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
MEASURED = {"enqueued_per_second", "oldest_due_seconds"}


def examples() -> list[tuple[str, str]]:
    return re.findall(r"^```json (\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def same(expected: Any, actual: Any, name: str = "") -> bool:
    """Equal, members in the same order; one instant or message id is as good as another, and
    so is a number that was measured."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return list(expected) == list(actual) and all(same(expected[key], actual[key], key) for key in expected)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    if isinstance(expected, str) and isinstance(actual, str) and INSTANT.fullmatch(expected):
        return INSTANT.fullmatch(actual) is not None
    if isinstance(expected, str) and isinstance(actual, str) and MESSAGE_ID.fullmatch(expected):
        return MESSAGE_ID.fullmatch(actual) is not None
    if name in MEASURED:
        return isinstance(actual, float)
    return type(expected) is type(actual) and bool(expected == actual)


async def test_every_example_of_the_protocol_page_is_true(
    store: Store, settings: Settings, transport: SqsTransport
) -> None:
    kinds: set[str] = set()
    async with store.session() as session:
        # Each connection takes a hundred claims at a time; the page counts them one by one.
        await session._connection.execute("alter sequence penstock.claim_seq cache 1")
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=JSON) as http:
        for kind, text in examples():
            kinds.add(kind)
            if kind == "http":
                for request, answer in re.findall(r"^--> (.*?)^<-- (.*?)(?=^-->|\Z)", text, re.MULTILINE | re.DOTALL):
                    actual = (await http.post("/rpc", content=request)).json()
                    assert same(json.loads(answer), actual), f"{request} is answered {json.dumps(actual)}"
            elif kind == "inbound":
                inbound = read_inbound(text, settings)
                async with store.transaction() as session:
                    await accept_inbound(session, inbound, settings, source="inbound")
                    await enqueue.insert_rejected(session, "inbound", inbound.refused)
            elif kind == "outbound":
                async with store.transaction() as session:
                    batch = await claim.claim(session, 1)
                assert batch is not None
                [task] = batch.tasks
                assert call_of(task, Fence()) == text.strip()
            elif kind == "results":
                async with store.transaction() as session:
                    applied = await apply_reports(
                        session, decode_reports(text, batch_limit=settings.batch_limit, bare_ids=True), settings
                    )
                ended = applied.settled + applied.waiting + applied.suspended
                assert (ended + applied.alive + applied.output, applied.stale, applied.unreadable) == (
                    1,
                    0,
                    [],
                ), text
            elif kind == "dead":
                dead = transport.queue(settings.outbound_queue + "-dlq", label="outbound-dlq")
                assert (await dead.send([Outgoing(text.strip())])).failed == []
            else:
                assert kind == "rejected"
                async with store.transaction() as session:
                    reports = decode_reports(text, batch_limit=settings.batch_limit)
                    applied = await apply_reports(session, reports, settings)
                assert len(applied.unreadable) == len(json.loads(text)), text
    assert kinds == {"http", "inbound", "outbound", "results", "rejected", "dead"}


def test_limits_on_the_page_are_the_defaults() -> None:
    settings = load_settings()
    rows = re.findall(r"\| (\d+(?: [KM]iB)?) \| `PENSTOCK_(\w+)` \|", PAGE.read_text("utf-8"))
    assert len(rows) == 4
    for shown, name in rows:
        number, _, unit = shown.partition(" ")
        assert int(number) * {"": 1, "KiB": 1024, "MiB": 1024**2}[unit] == getattr(settings, name.lower()), name
