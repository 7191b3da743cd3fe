"""docs/deliveries.md is run, example by example, and its tables are held against the code."""

from __future__ import annotations

import inspect
import json
import re
import secrets
import tomllib
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import msgspec

from penstock.brokers.sqs import SqsTransport
from penstock.db.pool import Store
from penstock.protocol.task import BUILT_IN_ACTIONS
from penstock.settings.model import NamedStatement, Settings
from penstock.worker.deliveries import http, kafka
from penstock.worker.deliveries.amqp import AmqpMessage
from penstock.worker.deliveries.sqs import SqsMessage
from tests.integration import apis, lines
from tests.integration.http_servers import answer, serving
from tests.integration.test_protocol_page import same

PAGE = (Path(__file__).parents[2] / "docs" / "deliveries.md").read_text("utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


async def test_every_example_is_true(
    store: Store, settings: Settings, database_url: str, transport: SqsTransport
) -> None:
    prefix = secrets.token_hex(4)
    client = await transport.client()
    await client.create_queue(QueueName=f"{prefix}-orders")
    await client.create_queue(QueueName=f"{prefix}-orders.fifo", Attributes={"FifoQueue": "true"})
    connection = await asyncpg.connect(database_url)
    await connection.execute("create table archive (task bigint primary key, body jsonb)")
    replies = answer(200, b'{"ok":true}', Content_Type="application/json")
    async with serving([replies]) as server:

        def placed(text: str) -> str:
            """With the addresses of this test in the place of the page's."""
            text = text.replace("https://hooks.example.com", server.url).replace('"orders', f'"{prefix}-orders')
            return text.replace("postgresql://app:password@db.internal:5432/app", database_url)

        (toml,) = blocks("toml")
        given: dict[str, Any] = tomllib.loads(placed(toml))
        given["http_allow"].append("127.0.0.1")
        pairs = [
            (json.loads(placed(asked)), json.loads(placed(told)))
            for text in blocks("json http")
            for asked, told in re.findall(r"^--> (.*?)^<-- (.*?)(?=^-->|\Z)", text, re.MULTILINE | re.DOTALL)
        ]
        assert len(pairs) >= 6
        async with (
            lines.running(store, settings, **given) as line,
            apis.running(store, settings) as api,
            httpx.AsyncClient(base_url=api.url, headers=apis.JSON) as http_client,
        ):
            for asked, told in pairs:
                actual = (await http_client.post("/rpc", json=asked)).json()
                assert same(told, actual), f"{asked} is answered {actual}"
                if asked["method"] == "enqueue":
                    await line.until(actual["result"]["id"], "SUCCESS")
    (row,) = await connection.fetch("select * from archive")
    assert json.loads(row["body"]) == {"order": 1}
    await connection.close()
    verify: dict[str, Any] = {}
    (snippet,) = blocks("python")
    exec(snippet, verify)
    request = server.requests[0]
    secret = given["http_signing_secrets"][0].partition(":")[2]
    assert verify["verify"](secret, request.headers, request.body)
    assert not verify["verify"](secret, request.headers, request.body + b" ")
    assert not verify["verify"](secret, {**request.headers, "webhook-id": "other"}, request.body)
    assert not verify["verify"](secret, {**request.headers, "webhook-timestamp": "1600000000"}, request.body)
    assert not verify["verify"]("whsec_AAAA", request.headers, request.body)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows_of(text: str) -> list[str]:
    """The names in the first cells of a table."""
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_each_delivery_has_its_section_with_every_parameter() -> None:
    parameters = inspect.signature(http.Requests.request).parameters
    assert rows_of(section("http.request")) == [name for name in parameters if name not in ("self", "ctx")]
    assert rows_of(section("sqs.send")) == [field.name for field in msgspec.structs.fields(SqsMessage)]
    published = inspect.signature(kafka.Publisher.publish).parameters
    assert rows_of(section("kafka.publish")) == [name for name in published if name not in ("self", "ctx")]
    assert rows_of(section("amqp.publish")) == [field.name for field in msgspec.structs.fields(AmqpMessage)]
    assert rows_of(section("sql.execute")) == list(NamedStatement.model_fields)
    assert set(re.findall(r"^## ([a-z0-9]+\.[a-z]+)$", PAGE, re.MULTILINE)) <= BUILT_IN_ACTIONS


def test_the_defaults_that_the_page_tells_are_those_of_the_code() -> None:
    text = section("http.request")
    assert ", ".join(http.DEFAULT_KEPT_HEADERS) in text
    final = http.statuses("final_status", http.DEFAULT_FINAL)
    assert {status for status in range(300, 600) if status not in final} == {408, 425, 429, *range(500, 600)}
    assert http.statuses("expected_status", http.DEFAULT_EXPECTED) == frozenset(range(200, 300))
