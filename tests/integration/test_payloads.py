"""Large payloads in S3 and payloads at rest, through the passes of every process."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from penstock import Call, Context, action
from penstock.handlers import Registry
from penstock.payload_settings import fingerprint, new_key, read_key
from penstock.settings import Settings, load_settings
from tests.integration.plants import Plant, plant, until
from tests.s3 import S3Bucket

MARKER = "the quick brown fox 4711"
LARGE = {"text": MARKER * 100}


@pytest.fixture
def registry() -> Registry:
    registry = Registry()

    @action("echo", registry=registry)
    async def echo(ctx: Context, text: str) -> Any:
        await ctx.progress(50, MARKER)
        return {"echo": text}

    @action("measure", registry=registry)
    def measure(ctx: Context, text: str) -> int:
        return len(text)

    @action("fail", registry=registry, max_attempts=2)
    async def fail(ctx: Context, text: str) -> None:
        raise ValueError(f"cannot use {text}")

    @action("each", batch=10, linger=0.01, registry=registry)
    async def each(calls: list[Call[dict[str, str]]]) -> list[Any]:
        return [{"echo": call.params["text"]} for call in calls]

    return registry


def with_bucket(settings: Settings, s3: S3Bucket, **more: Any) -> Settings:
    return load_settings(**settings.model_dump() | s3.settings() | more)


async def raw(sql: asyncpg.Connection, task_id: int) -> Any:
    """The columns of a task as they are stored."""
    text = "select payload::text as payload, failures::text as failures, progress::text as progress, state::text as state"
    row = await sql.fetchrow(f"{text}, null as result, attempts from penstock.task where id = $1", task_id)
    return row or await sql.fetchrow(
        f"{text}, result::text as result, attempts from penstock.task_history where id = $1", task_id
    )


async def everything(sql: asyncpg.Connection) -> str:
    """Every row of every table, as text."""
    tables = await sql.fetch(
        "select table_name as name from information_schema.tables where table_schema = 'penstock' "
        "and table_type = 'BASE TABLE'"
    )
    found = []
    for table in tables:
        rows = await sql.fetch(f"select t::text as row from penstock.{table['name']} t")
        found += [f"{table['name']}: {row['row']}" for row in rows]
    return "\n".join(found)


# Large payloads


async def test_a_large_payload_goes_by_an_object_and_its_handler_sees_none_of_that(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="echo", payload=LARGE)
        (stored,) = s3.objects().values()
        assert json.loads(stored) == LARGE
        row = await raw(sql, task["id"])
        assert row["payload"].startswith('"penstock+object:')
        assert len(row["payload"]) < 200
        assert (await pipe.status(task["id"]))["payload"] == LARGE
        await pipe.work()
        assert MARKER not in "".join(body for body in pipe.seen if '"method":"echo"' in body)
        shown = await pipe.status(task["id"])
        assert (shown["state"], shown["result"]) == ("SUCCESS", {"echo": LARGE["text"]})
        assert (await raw(sql, task["id"]))["result"].startswith('"penstock+object:')
        assert (await pipe.call("result", id=task["id"]))["result"] == {"echo": LARGE["text"]}
        assert len(s3.objects()) == 2
