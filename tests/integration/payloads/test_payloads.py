"""Large payloads in S3 and payloads at rest, through the passes of every process."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AsyncExitStack, nullcontext, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from moto.s3.responses import S3Response

from penstock import AsyncClient, Call, Client, Context, Fail, InboundClient, Snooze, action
from penstock.compat.scheduler0 import store as credentials
from penstock.db.notify import Notifier
from penstock.db.pool import Store
from penstock.methods.inbound import take_in_tasks
from penstock.payloads.bucket import OFFERED, Bucket, folder_of, new_name
from penstock.payloads.codec import PayloadCodec, offered_aad, payload_aad
from penstock.payloads.records import encrypt_note
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.reports import encode_progress
from penstock.protocol.sealed import Reference, encode_reference, reference_of
from penstock.protocol.task import NewTask
from penstock.schedules.firing import Imports
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import fingerprint, new_key, read_key
from penstock.settings.values import DAY
from penstock.supervisor.bulk_jobs import BulkJobs
from penstock.supervisor.payloads import PayloadObjects, PayloadRetention
from penstock.supervisor.retention import Retention
from penstock.tasks.enqueue import delete_objects_later, insert_rejected
from penstock.worker.handlers.actions import Registry
from penstock.workflows import step_inputs
from penstock.workflows.advancer import WorkflowAdvancer
from tests.claims import claim_id
from tests.integration.apis import running
from tests.integration.doors import put, request
from tests.integration.plants import plant, until
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
    text = (
        "select payload::text as payload, failures::text as failures, progress::text as progress, state::text as state"
    )
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


async def columns_with(sql: asyncpg.Connection, text: str) -> set[str]:
    """The columns of tables, of which partitions count as their parent, that hold the text anywhere."""
    columns = await sql.fetch(
        "select c.relname as table, a.attname as column, a.atttypid = 'bytea'::regtype as is_bytes "
        "from pg_class c join pg_attribute a on a.attrelid = c.oid "
        "where c.relnamespace = 'penstock'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition "
        "and a.attnum > 0 and not a.attisdropped"
    )
    found = set()
    for table, column, is_bytes in columns:
        value = f"encode(\"{column}\", 'escape')" if is_bytes else f'"{column}"::text'
        where = f'from penstock."{table}" where position($1 in {value}) > 0'
        if await sql.fetchval(f"select exists (select {where})", text):
            found.add(f"{table}.{column}")
    return found


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


async def test_what_is_small_stays_where_it_was(settings: Settings, s3: S3Bucket, registry: Registry, sql: Any) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="measure", payload={"text": "abc"})
        assert json.loads((await raw(sql, task["id"]))["payload"]) == {"text": "abc"}
        await pipe.work()
        assert (await raw(sql, task["id"]))["result"] == "3"
        assert s3.objects() == {}
        assert await sql.fetchval("select count(*) from penstock.payload_object") == 0


async def test_plain_functions_and_batches_get_large_payloads_too(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        plain = await pipe.call("enqueue", action="measure", payload=LARGE)
        tasks = [await pipe.call("enqueue", action="each", payload=p) for p in (LARGE, {"text": "s"}, LARGE)]
        wrong = await pipe.call("enqueue", action="each", payload=["x" * 2000])
        await pipe.work(messages=5)
        assert (await pipe.status(plain["id"]))["result"] == len(LARGE["text"])
        shown = [(await pipe.status(task["id"]))["result"] for task in tasks]
        assert shown == [{"echo": LARGE["text"]}, {"echo": "s"}, {"echo": LARGE["text"]}]
        assert (await pipe.status(wrong["id"]))["state"] == "ERROR"


async def test_a_large_result_that_a_batched_handler_gives_early_is_kept(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    @action("early", batch=10, linger=0.01, registry=registry)
    async def early(calls: list[Call[dict[str, str]]]) -> list[Any]:
        for call in calls:
            call.answer({"echo": call.params["text"]})
        return [None for _ in calls]

    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="early", payload=LARGE)
        await pipe.work()
        shown = await pipe.status(task["id"])
        assert (shown["state"], shown["result"]) == ("SUCCESS", {"echo": LARGE["text"]})


async def test_a_large_result_that_was_given_early_is_kept_though_the_call_fails_then(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    @action("early", batch=10, linger=0.01, registry=registry)
    async def early(calls: list[Call[dict[str, str]]]) -> list[Any]:
        calls[0].answer({"echo": calls[0].params["text"]})
        raise RuntimeError("the others fail")

    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="early", payload=LARGE)
        await pipe.work()
        shown = await pipe.status(task["id"])
        assert (shown["state"], shown["result"]) == ("SUCCESS", {"echo": LARGE["text"]})


async def test_a_large_result_that_was_given_early_is_kept_though_the_call_ignores_its_time_limit(
    settings: Settings, s3: S3Bucket, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.runner._CANCEL_SECONDS", 0.2)
    over = asyncio.Event()

    @action("early", batch=10, linger=0.01, timeout=0.5, registry=registry)
    async def early(calls: list[Call[dict[str, str]]]) -> list[Any]:
        calls[0].answer({"echo": calls[0].params["text"]})
        with suppress(asyncio.CancelledError):
            await over.wait()
        await over.wait()
        return [None for _ in calls]

    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="early", payload=LARGE)
        await pipe.work()
        over.set()
        shown = await pipe.status(task["id"])
        assert (shown["state"], shown["result"]) == ("SUCCESS", {"echo": LARGE["text"]})


async def test_a_payload_over_the_greatest_size_is_refused_with_both_figures(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    changed = with_bucket(settings, s3, payload_max_bytes=5000)
    async with plant(changed, registry) as pipe:
        error = await pipe.call("enqueue", action="echo", payload={"text": "x" * 6000})
        assert (error["code"], error["data"]["limit"]) == (-32013, 5000)
        assert error["message"] == "payload is 6011 bytes; the limit is 5000"
        step = {"name": "a", "action": "echo", "payload": {"text": "x" * 300_000}}
        assert (await pipe.call("workflow.create", name="w", steps=[step]))["code"] == -32013
    assert s3.objects() == {}


async def test_a_payload_larger_than_any_message_passes(settings: Settings, s3: S3Bucket, registry: Registry) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        text = "y" * 3_000_000
        task = await pipe.call("enqueue", action="echo", payload={"text": text})
        await pipe.work()
        assert (await pipe.status(task["id"]))["result"] == {"echo": text}


async def test_what_is_too_large_to_be_shown_is_told_and_can_be_fetched(
    settings: Settings, s3: S3Bucket, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.budget.ANSWER_BYTES", 3000)
    async with plant(with_bucket(settings, s3), registry) as pipe:
        assert pipe.http is not None
        text = "z" * 4000
        task = await pipe.call("enqueue", action="echo", payload={"text": text})
        await pipe.work()
        shown = await pipe.status(task["id"])
        assert (shown["payload"], shown["payload_unread"]) == (None, "4011 bytes, too large to be shown here")
        assert (shown["result"], shown["result_unread"]) == (None, "4011 bytes, too large to be shown here")
        assert (await pipe.call("list"))["tasks"][0]["result_unread"] is not None
        path = f"/tasks/{task['id']}"
        assert (await pipe.http.get(f"{path}/payload")).json() == {"text": text}
        assert (await pipe.http.get(f"{path}/result")).json() == {"echo": text}
        page = await pipe.http.get(path, headers={"accept": "text/html"})
        assert f'href="{path}/payload"' in page.text
        assert (await pipe.http.get("/tasks/999/result")).status_code == 404
        async with AsyncClient(str(pipe.http.base_url)) as client:
            assert await client.result(task["id"]) == {"echo": text}
        with Client(str(pipe.http.base_url)) as plain:
            assert await asyncio.to_thread(plain.result, task["id"]) == {"echo": text}


async def test_downloads_ask_for_the_right_to_read(settings: Settings, s3: S3Bucket, registry: Registry) -> None:
    async with plant(with_bucket(settings, s3, api_keys="one-long-secret-key"), registry) as pipe:
        assert pipe.http is not None
        assert (await pipe.http.get("/tasks/1/payload")).status_code == 401
        headers = {"Authorization": "Bearer one-long-secret-key"}
        assert (await pipe.http.get("/tasks/1/payload", headers=headers)).status_code == 404


# Each route's objects in a folder of its own


VIDEO_URL = "https://sqs.eu-central-1.amazonaws.com/123456789012/penstock-video"


async def folders_of(sql: asyncpg.Connection) -> dict[int, str]:
    """The folder of the object that each live task's payload names."""
    rows = await sql.fetch("select id, payload::text as payload from penstock.task")
    found = {row["id"]: reference_of(row["payload"]) for row in rows}
    return {task_id: one.name.rsplit("/", 2)[0] for task_id, one in found.items() if one is not None}


async def test_objects_are_in_the_folder_of_the_queue_that_their_workers_receive_from(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    changed = with_bucket(settings, s3)
    own = f"queues/{changed.outbound_queue}"
    async with plant(changed, registry) as pipe:
        await pipe.call("route.set", name="eu", queue="penstock-eu", actions=["e*"], labels={"region": "eu"})
        await pipe.call("route.set", name="video", queue=VIDEO_URL, actions=["measure"])
        wanted = {}
        for task, folder in (
            ({"action": "echo"}, own),
            ({"action": "echo", "labels": {"region": "us"}}, own),
            ({"action": "echo", "labels": {"region": "eu", "a": "b"}}, "queues/penstock-eu"),
            ({"action": "measure", "labels": {"region": "eu"}}, "queues/penstock-video"),
        ):
            made = await pipe.call("enqueue", payload=LARGE, delay=3600, **task)
            wanted[made["id"]] = folder
        offer = InboundClient(
            settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region, payloads=changed
        )  # fmt: skip
        async with offer as client:
            await client.enqueue_many([{"action": one, "payload": LARGE, "delay": 3600} for one in ("measure", "fail")])
        await put(pipe.queues["inbound"], request("submit:measure", LARGE))
        taken = 0
        while taken < 2:
            taken += await until(pipe.submitter.run_once, "messages")
        found = await folders_of(sql)
        assert {task_id: found[task_id] for task_id in wanted} == wanted
        assert sorted(found[task_id] for task_id in found.keys() - wanted) == [
            "queues/penstock-video", "queues/penstock-video", own,
        ]  # fmt: skip


async def test_a_worker_stores_results_in_the_folder_of_its_own_queue_and_steps_get_copies_in_theirs(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        for name, pattern in (("video", "each"), ("sound", "echo")):
            pipe.queues[f"outbound:{name}"] = pipe.queues["outbound"]
            await pipe.call("route.set", name=name, queue=f"penstock-{name}", actions=[pattern])
        steps = [
            {"name": "one", "action": "each", "payload": {"text": "x" * 3000}},
            {"name": "two", "action": "echo", "payload": {"text": "t"}, "after": ["one"], "results_as": "parts"},
        ]
        await pipe.call("workflow.create", name="w", steps=steps)
        await pipe.work(outbound_queue="penstock-video")
        assert {key.split("/20")[0] for key in s3.objects()} == {"pipe/queues/penstock-video"}
        await pipe.advance()
        assert list((await folders_of(sql)).values()) == ["queues/penstock-sound"]


async def test_a_rejected_message_that_is_read_again_is_stored_by_its_route(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    narrow = with_bucket(settings, s3, payload_max_bytes=2000)
    async with plant(narrow, registry) as pipe:
        await put(pipe.queues["inbound"], request("submit:measure", LARGE))
        await until(pipe.submitter.run_once, "the message")
        (kept,) = (await pipe.call("rejected.list"))["rejected"]
    async with plant(with_bucket(settings, s3), registry) as pipe:
        await pipe.call("route.set", name="video", queue=VIDEO_URL, actions=["measure"])
        assert (await pipe.call("rejected.retry", ids=[kept["id"]]))["retried"] == 1
        assert list((await folders_of(sql)).values()) == ["queues/penstock-video"]


async def test_a_rejected_message_whose_payload_is_away_keeps_no_other_from_its_retry(
    settings: Settings, registry: Registry
) -> None:
    client = PayloadCodec(load_settings(payload_keys=new_key()))
    offered = await client.offer(json.dumps(LARGE), offered_aad("echo", None))
    payloads = [{"payload": LARGE}, {"sealed_payload": json.loads(offered)}, {"payload": LARGE}]
    bodies = [(request("enqueue", {"action": "echo", **payload}), "not allowed") for payload in payloads]
    async with plant(load_settings(**settings.model_dump() | {"payload_keys": new_key()}), registry) as pipe:
        async with pipe.store.transaction() as session:
            await insert_rejected(session, "inbound", bodies)
        answer = await pipe.call("rejected.retry", limit=10)
        assert answer["retried"] == 2
        (still,) = answer["still_rejected"]
        assert "key" in still["reason"]
        (kept,) = (await pipe.call("rejected.list"))["rejected"]
        assert (kept["id"], kept["reason"]) == (still["id"], "not allowed")


async def test_an_object_keeps_its_name_when_its_route_changes_and_names_of_before_are_read(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        moved = await pipe.call("enqueue", action="measure", payload=LARGE)
        older = await pipe.call("enqueue", action="measure", payload=LARGE)
        (reference,) = [reference_of(row["payload"]) for row in [await raw(sql, older["id"])]]
        assert reference is not None
        name = reference.name.removeprefix(f"queues/{pipe.settings.outbound_queue}/")
        copied = {"Bucket": s3.name, "Key": f"pipe/{reference.name}"}
        s3.client.copy_object(Bucket=s3.name, Key=f"pipe/{name}", CopySource=copied)
        s3.client.delete_object(**copied)
        await sql.execute(
            "update penstock.task set payload = replace(payload::text, $2, $3)::json where id = $1",
            older["id"], reference.name, name,
        )  # fmt: skip
        await sql.execute("update penstock.payload_object set name = $2 where name = $1", reference.name, name)
        pipe.queues["outbound:video"] = pipe.queues["outbound"]
        await pipe.call("route.set", name="video", queue="penstock-video", actions=["measure"])
        await pipe.work(outbound_queue="penstock-video")
        for task in (moved, older):
            assert (await pipe.status(task["id"]))["result"] == len(LARGE["text"])


async def test_no_object_is_overwritten(settings: Settings, s3: S3Bucket) -> None:
    codec = PayloadCodec(with_bucket(settings, s3))
    assert codec.bucket is not None
    try:
        name = new_name(folder_of("penstock-video"))
        await codec.bucket.put(name, b"first")
        await codec.bucket.put(name, b"second")  # as a try whose answer was lost is repeated
        assert await codec.bucket.get(name, 10) == b"first"
    finally:
        await codec.close()


@pytest.mark.parametrize("is_there", [False, True])
async def test_what_is_called_forbidden_is_lost_only_if_a_listing_has_it_not(
    settings: Settings, s3: S3Bucket, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_args: Any, **_kwargs: Any) -> Any:
        return 403, {}, "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

    codec = PayloadCodec(with_bucket(settings, s3))
    assert codec.bucket is not None
    try:
        name = new_name(folder_of("penstock-video"))
        if is_there:
            await codec.bucket.put(name, b"text")
        monkeypatch.setattr("moto.s3.responses.S3Response.get_object", forbidden)
        with pytest.raises(PayloadUnavailable if is_there else PayloadLost, match="AccessDenied" if is_there else name):
            await codec.bucket.get(name, 10)
        monkeypatch.setattr("moto.s3.responses.S3Response.list_objects_v2", forbidden)
        with pytest.raises(PayloadUnavailable, match="rejected get_object"):
            await codec.bucket.get(name, 10)
    finally:
        await codec.close()


async def test_credentials_that_change_in_their_file_are_found(
    settings: Settings, s3: S3Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_object = S3Response.put_object

    def with_the_new_key(self: S3Response) -> Any:
        if "new-key" in self.headers["Authorization"]:
            return put_object(self)
        return 403, {}, "<Error><Code>InvalidAccessKeyId</Code><Message>no such key</Message></Error>"

    def rotate(key: str) -> None:
        (tmp_path / "keys").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setattr(S3Response, "put_object", with_the_new_key)
    rotate("old-key")
    codec = PayloadCodec(with_bucket(settings, s3))
    assert codec.bucket is not None
    try:
        with pytest.raises(PayloadUnavailable, match="InvalidAccessKeyId") as caught:
            await codec.bucket.put(new_name(OFFERED), b"text")
        assert not caught.value.is_refusal
        rotate("new-key")
        name = new_name(OFFERED)
        await codec.bucket.put(name, b"text")
        assert await codec.bucket.get(name, 10) == b"text"
    finally:
        await codec.close()


# By the inbound queue


async def test_the_submitter_keeps_large_payloads_and_takes_what_clients_put_there(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    changed = with_bucket(settings, s3)
    async with plant(changed, registry) as pipe:
        await put(pipe.queues["inbound"], request("enqueue", {"action": "echo", "payload": LARGE}))
        offer = InboundClient(
            settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region,
            payloads=changed,
        )  # fmt: skip
        async with offer as client:
            huge = {"text": "h" * 2_000_000}
            await client.enqueue_many(
                [{"action": "echo", "payload": huge}, {"action": "echo", "payload": {"text": ""}}]
            )
        assert any("/offered/" in key for key in s3.objects())
        taken = 0
        while taken < 2:
            taken += await until(pipe.submitter.run_once, "messages")
        rows = await sql.fetch("select id, payload::text as payload from penstock.task order by length(payload::text)")
        assert [row["payload"].startswith('"penstock+object:') for row in rows] == [False, True, True]
        assert "offered" not in "".join(row["payload"] for row in rows)
        await pipe.objects.run_once()
        assert not any("/offered/" in key for key in s3.objects())
        await pipe.work(messages=3)
        results = [(await pipe.status(row["id"]))["result"] for row in rows]
        assert sorted(len(result["echo"]) for result in results) == [0, len(LARGE["text"]), 2_000_000]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("penstock+object:20200101/" + "0" * 32 + ":-:5:" + "0" * 64, "is nothing that a client"),
        ("penstock+object:offered/../secret:-:5:" + "0" * 64, "is nothing that a client"),
        ("s3://other/key", "is nothing that a client"),
        ("penstock+object:offered/20200101/" + "0" * 32 + ":-:5:" + "0" * 64, "is not in s3://"),
        ("penstock+object:offered/20200101/" + "0" * 32 + ":-:999999999999:" + "0" * 64, "is 999999999999 bytes"),
    ],
)
async def test_only_an_object_that_a_client_put_there_is_taken(
    settings: Settings, s3: S3Bucket, registry: Registry, given: str, problem: str
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        error = await pipe.call("enqueue", action="echo", sealed_payload=given)
        assert problem in error["message"]
        await put(pipe.queues["inbound"], request("enqueue", {"action": "echo", "sealed_payload": given}))
        await until(pipe.submitter.run_once, "the message")
        assert problem in (await pipe.call("rejected.list"))["rejected"][0]["reason"]


async def test_what_a_client_put_there_for_a_refused_task_is_there_when_it_is_read_again(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    changed = with_bucket(settings, s3)
    async with plant(changed, registry) as pipe:
        first = await pipe.call("enqueue", action="echo", unique_key="k", delay=3600)
        offer = InboundClient(
            settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region, payloads=changed
        )  # fmt: skip
        async with offer as client:
            await client.enqueue("echo", {"text": "h" * 2_000_000}, unique_key="k", on_duplicate="error")
        await until(pipe.submitter.run_once, "the message")
        (kept,) = (await pipe.call("rejected.list"))["rejected"]
        assert await pipe.objects.run_once() == 1  # the copy
        await pipe.call("cancel", id=first["id"])
        await pipe.call("bulk.delete", all=True)
        jobs = BulkJobs(store=pipe.store, changed=lambda: None)
        while await jobs.run_once():
            pass
        assert (await pipe.call("rejected.retry", ids=[kept["id"]]))["retried"] == 1
        await pipe.objects.run_once()
        assert len(s3.objects()) == 1
        assert not any("/offered/" in key for key in s3.objects())


async def test_of_many_objects_few_are_held_at_once(
    settings: Settings, s3: S3Bucket, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = with_bucket(settings, s3)
    codec = PayloadCodec(given)
    offered = await codec.offer(json.dumps(LARGE), offered_aad("echo", None))
    held, most = 0, 0
    get, put_object = Bucket.get, Bucket.put

    async def counted_get(self: Bucket, name: str, size: int) -> bytes:
        nonlocal held, most
        body = await get(self, name, size)
        held += 1
        most = max(most, held)
        return body

    async def counted_put(self: Bucket, name: str, body: bytes) -> None:
        nonlocal held
        await put_object(self, name, body)
        held -= 1

    async with plant(given, registry) as pipe:
        monkeypatch.setattr(Bucket, "get", counted_get)
        monkeypatch.setattr(Bucket, "put", counted_put)
        tasks = [NewTask("echo", "{}", offered=offered) for _ in range(40)]
        taken = await take_in_tasks(tasks, pipe.store.codec, given, pipe.store.session)
    await codec.close()
    assert all(isinstance(task, NewTask) for task in taken)
    assert most <= 4


async def test_what_a_client_put_there_must_be_a_payload(settings: Settings, s3: S3Bucket, registry: Registry) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        for text, problem in (('"' + "t" * 2000 + '"', "must be an object or an array"), ("{" * 2000, "JSON")):
            named = await pipe.store.codec.offer(text, payload_aad("echo", None))
            error = await pipe.call("enqueue", action="echo", sealed_payload=json.loads(named))
            assert problem in error["message"]


async def test_what_is_no_text_is_refused_and_holds_up_no_neighbour(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    data = "ä".encode("latin-1") * 2000
    async with plant(with_bucket(settings, s3), registry) as pipe:
        bucket = pipe.store.codec.bucket
        assert bucket is not None
        name = new_name(OFFERED)
        await bucket.put(name, data)
        given = json.loads(encode_reference(Reference(name, None, len(data), hashlib.sha256(data).hexdigest())))
        assert "not valid UTF-8" in (await pipe.call("enqueue", action="echo", sealed_payload=given))["message"]
        bad, good = (
            request("enqueue", {"action": "echo", "sealed_payload": given}),
            request("enqueue", {"action": "echo"}),
        )
        await put(pipe.queues["inbound"], bad, good)
        async with asyncio.timeout(60):
            while not (await pipe.call("stats"))["states"]:
                await pipe.submitter.run_once()


async def test_a_result_is_large_by_its_bytes(settings: Settings, s3: S3Bucket, registry: Registry) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="echo", payload={"text": "語" * 500})
        await pipe.work()
        assert (await pipe.status(task["id"]))["state"] == "SUCCESS"
        assert len(s3.objects()) == 2  # its payload and its result


async def test_without_a_bucket_no_object_is_taken(settings: Settings, registry: Registry) -> None:
    async with plant(settings, registry) as pipe:
        name = "penstock+object:offered/20200101/" + "0" * 32 + ":-:5:" + "0" * 64
        error = await pipe.call("enqueue", action="echo", sealed_payload=name)
        assert "PENSTOCK_PAYLOAD_BUCKET" in error["message"]


FORGED = "penstock+object:20200101/" + "0" * 32 + ":-:5:" + "0" * 64


async def test_what_looks_like_a_reference_is_just_a_value(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    @action("same", registry=registry)
    async def same(ctx: Context, value: Any) -> Any:
        return value

    async with plant(with_bucket(settings, s3), registry) as pipe:
        error = await pipe.call("enqueue", action="echo", payload=FORGED)
        assert error["code"] == -32602
        await put(pipe.queues["inbound"], request("submit:echo", FORGED))
        await until(pipe.submitter.run_once, "the message")
        assert len((await pipe.call("rejected.list"))["rejected"]) == 1
        task = await pipe.call("enqueue", action="same", payload={"value": FORGED})
        await pipe.work()
        shown = await pipe.status(task["id"])
        assert (shown["payload"], shown["result"]) == ({"value": FORGED}, FORGED)
        assert (await pipe.call("result", id=task["id"]))["result"] == FORGED


# S3 is unavailable


async def test_while_s3_is_away_callers_are_told_and_plain_tasks_pass(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    away = with_bucket(settings, s3, payload_s3_endpoint_url="http://127.0.0.1:1")
    async with plant(away, registry) as pipe:
        error = await pipe.call("enqueue", action="echo", payload=LARGE)
        assert error["code"] == -32603
        await put(pipe.queues["inbound"], request("enqueue", {"action": "echo", "payload": LARGE}))
        await put(pipe.queues["inbound"], request("enqueue", {"action": "measure", "payload": {"text": "a"}}))
        taken = 0
        while taken < 2:
            taken += await until(pipe.submitter.run_once, "messages")
        assert [task["action"] for task in (await pipe.call("list"))["tasks"]] == ["measure"]
        depth = await pipe.queues["inbound"].depth()
        assert depth.in_flight == 1  # it comes again
        assert (await pipe.call("rejected.list"))["rejected"] == []


async def test_an_attempt_whose_payload_is_away_does_not_count_and_is_made_again(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        tasks = [await pipe.call("enqueue", action=name, payload=LARGE) for name in ("echo", "measure", "each")]
        small = await pipe.call("enqueue", action="each", payload={"text": "s"})
        await pipe.work(messages=4, payload_s3_endpoint_url="http://127.0.0.1:1")
        assert (await pipe.status(small["id"]))["state"] == "SUCCESS"
        for task in tasks:
            shown = await pipe.status(task["id"])
            assert (shown["state"], shown["attempts"], shown["failures"]) == ("SCHEDULED", 0, [])
            assert "S3 is unavailable" in shown["progress"]["note"]
        await sql.execute("update penstock.task set run_at = now()")
        await pipe.work(messages=3)
        assert {(await pipe.status(task["id"]))["state"] for task in tasks} == {"SUCCESS"}


async def test_an_object_that_is_gone_fails_the_attempt_with_its_name(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="echo", payload=LARGE, max_attempts=1)
        (key,) = s3.objects()
        s3.client.delete_object(Bucket=s3.name, Key=key)
        shown = await pipe.status(task["id"])
        assert shown["payload"] is None
        assert key in shown["payload_unread"]
        assert pipe.http is not None
        assert (await pipe.http.get(f"/tasks/{task['id']}/payload")).status_code == 410
        await pipe.work()
        shown = await pipe.status(task["id"])
        assert (shown["state"], shown["error"]["data"]["type"]) == ("CRITICAL_ERROR", "PayloadLost")
        assert key in shown["error"]["message"]


async def test_an_object_that_was_changed_is_not_taken(settings: Settings, s3: S3Bucket, registry: Registry) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="echo", payload=LARGE, max_attempts=1)
        (key,) = s3.objects()
        s3.client.put_object(Bucket=s3.name, Key=key, Body=b'{"text":"another"}')
        await pipe.work()
        assert "it was changed" in (await pipe.status(task["id"]))["error"]["message"]


async def test_a_result_waits_with_its_worker_while_s3_is_away(
    settings: Settings, s3: S3Bucket, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    @action("grow", registry=registry)
    async def grow(ctx: Context) -> str:
        return "g" * 5000

    tries: list[str] = []
    whole = Bucket.put

    async def put_at_last(self: Bucket, name: str, body: bytes) -> None:
        tries.append(name)
        if len(tries) < 3:
            raise PayloadUnavailable("S3 is unavailable")
        await whole(self, name, body)

    monkeypatch.setattr("penstock.worker.payload_io._FIRST_PAUSE_SECONDS", 0.01)
    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="grow", timeout=0.5)
        monkeypatch.setattr(Bucket, "put", put_at_last)
        await pipe.work()
        assert (await pipe.status(task["id"]))["result"] == "g" * 5000
    assert len(tries) == 3


async def test_a_result_that_s3_refuses_is_a_failed_attempt(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    @action("grow", registry=registry)
    async def grow(ctx: Context) -> str:
        return "g" * 5000

    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="grow", max_attempts=1)
        await pipe.work(payload_bucket="s3://no-such-bucket")
        error = (await pipe.status(task["id"]))["error"]
        assert (error["data"]["type"], "NoSuchBucket" in error["message"]) == ("ResultNotKept", True)


# Cleaned with the task


async def test_objects_leave_with_what_named_them_and_not_before(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        live = await pipe.call("enqueue", action="echo", payload=LARGE, delay=3600)
        done = await pipe.call("enqueue", action="echo", payload=LARGE)
        failed = await pipe.call("enqueue", action="fail", payload=LARGE, max_attempts=1)
        await pipe.work(messages=2)
        duplicate = {"action": "echo", "payload": LARGE, "unique_key": "k", "delay": 3600}
        for _ in range(2):
            kept = await pipe.call("enqueue", **duplicate)
        assert len(s3.objects()) == 6
        assert await pipe.objects.run_once() == 1  # the one of the duplicate
        await pipe.call("enqueue", **duplicate, on_duplicate="replace")
        assert await pipe.objects.run_once() == 1  # the one that was replaced
        await pipe.call("retry", id=failed["id"])
        await pipe.work()
        assert await pipe.objects.run_once() == 0
        await sql.execute(
            "update penstock.task_history set result = 'null', result_gone = true where id = $1", done["id"]
        )
        assert await pipe.objects.run_once() == 1
        await sql.execute("delete from penstock.task_history where id = any($1)", [done["id"], failed["id"]])
        assert await pipe.objects.run_once() == 2
        await pipe.call("cancel", id=live["id"])
        assert await pipe.objects.run_once() == 0
        for task in (live, kept):
            assert (await pipe.status(task["id"]))["payload"] == LARGE
        assert len(s3.objects()) == await sql.fetchval("select count(*) from penstock.payload_object") == 2


async def test_retention_and_emptying_take_objects_along(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    changed = with_bucket(settings, s3, payload_retention_seconds=0, retention_success_seconds=3600)
    async with plant(changed, registry) as pipe:
        for _ in range(3):
            await pipe.call("enqueue", action="echo", payload=LARGE)
        await pipe.work(messages=3)
        await sql.execute("update penstock.task_history set finished_at = finished_at - interval '3 days'")
        emptying = PayloadRetention(store=pipe.store, settings=changed)
        assert await emptying.run_once() == 3
        assert await pipe.objects.run_once() == 3
        assert len(s3.objects()) == 3
        await Retention(store=pipe.store, settings=changed).run_once()
        assert await pipe.objects.run_once() == 3
        assert s3.objects() == {}


async def test_a_kill_between_any_two_steps_of_a_deletion_loses_and_leaves_nothing(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    whole = Bucket.delete

    async def before(self: Bucket, names: Any) -> Any:
        raise Killed

    async def after(self: Bucket, names: Any) -> Any:
        await whole(self, names)
        raise Killed

    async def away(self: Bucket, names: Any) -> Any:
        raise PayloadUnavailable("S3 is unavailable")

    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="echo", payload=LARGE, delay=3600)
        other = await pipe.call("enqueue", action="echo", payload=LARGE, delay=3600)
        await sql.execute("delete from penstock.task where id = $1", task["id"])
        for broken, raised in ((before, Killed), (away, None), (after, Killed)):
            monkeypatch.setattr(Bucket, "delete", broken)
            with pytest.raises(raised) if raised else nullcontext():
                assert await pipe.objects.run_once() == 0
            assert await sql.fetchval("select count(*) from penstock.payload_object where doomed") == 1
        monkeypatch.setattr(Bucket, "delete", whole)
        assert await pipe.objects.run_once() == 1
        assert await sql.fetchval("select count(*) from penstock.payload_object") == 1
        assert (await pipe.status(other["id"]))["payload"] == LARGE


async def test_objects_that_s3_does_not_delete_keep_no_others_from_deletion(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Bucket.delete

    async def denied_in_one_folder(self: Bucket, names: Any) -> set[str]:
        allowed = [name for name in names if "/penstock-a/" not in name]
        return await whole(self, allowed) if allowed else set()

    monkeypatch.setattr(Bucket, "delete", denied_in_one_folder)
    monkeypatch.setattr("penstock.supervisor.payloads._DELETED_AT_ONCE", 2)
    monkeypatch.setattr("penstock.supervisor.payloads._DELETIONS_PER_ROUND", 1)
    async with plant(with_bucket(settings, s3), registry) as pipe:
        names = [await pipe.store.codec.store(json.dumps(LARGE), "", queue=f"penstock-{q}") for q in "aaabb"]
        async with pipe.store.session() as session:
            await delete_objects_later(session, names)
        for _ in range(4):
            await pipe.objects.run_once()
        assert {key.split("/20")[0] for key in s3.objects()} == {"pipe/queues/penstock-a"}
        monkeypatch.setattr(Bucket, "delete", whole)
        for _ in range(4):
            await pipe.objects.run_once()
        assert s3.objects() == {}


async def test_what_was_uploaded_for_nothing_is_found_by_its_day(
    settings: Settings, s3: S3Bucket, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.supervisor.payloads._FIRST_DAY", timedelta(days=5))
    async with plant(with_bucket(settings, s3, payload_orphan_seconds=DAY), registry) as pipe:
        task = await pipe.call("enqueue", action="echo", payload=LARGE, delay=3600)
        (own,) = s3.objects()
        codec = pipe.store.codec
        await codec.store(json.dumps(LARGE), payload_aad("echo", None))  # and then it died
        await codec.offer(json.dumps(LARGE), payload_aad("echo", None))
        s3.client.put_object(Bucket=s3.name, Key="pipe/notes.txt", Body=b"somebody else's")
        assert await pipe.objects.run_once() == 0
        later = datetime.now(UTC) + timedelta(days=6)
        deleted = 0
        while deleted < 2:
            deleted += await pipe.objects.run_once(now=later)
        assert set(s3.objects()) == {own, "pipe/notes.txt"}
        assert (await pipe.status(task["id"]))["payload"] == LARGE


async def test_a_page_of_foreign_objects_is_not_the_end_of_a_folder(
    s3: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Bucket._call

    async def two_at_once(self: Bucket, operation: str, then: Any = None, **params: Any) -> Any:
        return await call(self, operation, then, MaxKeys=2, **params)

    monkeypatch.setattr(Bucket, "_call", two_at_once)
    ours = [f"20300131/{character * 32}" for character in "1c"]
    for name in (*(f"20300131/{number}-notes.txt" for number in (*range(100, 105), *range(200, 205))), *ours):
        s3.client.put_object(Bucket=s3.name, Key=f"pipe/{name}", Body=b"x")
    bucket, day = Bucket(s3.url, endpoint_url=s3.endpoint_url, region="us-east-1"), date(2030, 1, 31)
    assert await bucket.list("", day, "") == ours[:1]
    assert await bucket.list("", day, ours[0]) == ours[1:]
    assert await bucket.list("", day, ours[1]) == []
    await bucket.close()


async def test_the_search_for_orphans_lists_every_folder_of_a_day_once_whoever_else_searches(
    settings: Settings, s3: S3Bucket, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.supervisor.payloads._FIRST_DAY", timedelta(days=5))
    monkeypatch.setattr("penstock.supervisor.payloads._PAGES_PER_ROUND", 1)
    listed: list[tuple[str, str, str]] = []
    listing = Bucket.list

    async def noting(self: Bucket, folder: str, day: Any, after: str) -> list[str]:
        listed.append((folder, f"{day:%Y%m%d}", after))
        return await listing(self, folder, day, after)

    monkeypatch.setattr(Bucket, "list", noting)
    now = datetime.now(UTC)
    days = [f"{now - timedelta(days=ago):%Y%m%d}" for ago in (5, 4, 3)]
    places = ["", OFFERED, folder_of("penstock-outbound"), folder_of("penstock-video")]
    async with plant(with_bucket(settings, s3, payload_orphan_seconds=DAY), registry) as pipe:
        for number, (day, folder) in enumerate((day, folder) for day in days for folder in places):
            key = f"pipe/{folder}{day}/{number:032x}"
            s3.client.put_object(Bucket=s3.name, Key=key, Body=b"of nobody")
        seekers = [PayloadObjects(store=pipe.store, settings=pipe.settings) for _ in range(2)]
        while len(listed) < len(days) * len(places) * 2:
            await seekers[0].run_once(now=now)
        looked = [(folder, day) for folder, day, after in listed if not after]
        assert sorted(looked) == sorted((folder, day) for day in days for folder in places)
        await seekers[0].run_once(now=now)
        assert s3.objects() == {}
        assert len(listed) == len(days) * len(places) * 2
        later = now + timedelta(days=3)
        for number, folder in enumerate(places):
            for ago in (2, 1, 0):
                key = f"pipe/{folder}{now - timedelta(days=ago):%Y%m%d}/{number:032x}"
                s3.client.put_object(Bucket=s3.name, Key=key, Body=b"of nobody")
        turn = 0
        while s3.objects():
            turn += 1
            assert turn < 1000
            await seekers[turn % 3 != 0].run_once(now=later)


async def test_several_sweep_at_once(settings: Settings, s3: S3Bucket, registry: Registry, sql: Any) -> None:
    async with plant(with_bucket(settings, s3), registry) as pipe:
        for _ in range(5):
            await pipe.call("enqueue", action="echo", payload=LARGE, delay=3600)
        await sql.execute("delete from penstock.task")
        duties = [PayloadObjects(store=pipe.store, settings=pipe.settings) for _ in range(3)]
        await asyncio.gather(*(duty.run_once() for duty in duties))
        await duties[0].run_once()
        assert s3.objects() == {}
        assert await sql.fetchval("select count(*) from penstock.payload_object") == 0


# Workflows


async def test_large_results_reach_later_steps_and_compensations(
    settings: Settings, s3: S3Bucket, registry: Registry
) -> None:
    seen: list[Any] = []

    @action("join", registry=registry)
    async def join(ctx: Context, parts: dict[str, Any], text: str) -> str:
        seen.append(parts)
        raise Fail("that is enough")

    @action("undo", registry=registry)
    async def undo(ctx: Context, step: str, payload: Any, result: Any) -> None:
        seen.append((step, payload, result))

    @action("spread", registry=registry)
    async def spread(ctx: Context, text: str) -> list[str]:
        ctx.spawn("measure", {"text": MARKER})
        return [text] * 50

    for more in ({}, {"payload_keys": new_key()}):
        seen.clear()
        async with plant(with_bucket(settings, s3, **more), registry) as pipe:
            steps = [
                {"name": "one", "action": "spread", "payload": {"text": MARKER}, "compensate": "undo",
                 "on_failure": "fail"},
                {"name": "two", "action": "join", "payload": {"text": "t"}, "after": ["one"], "results_as": "parts",
                 "on_failure": {"compensate": "undo"}},
            ]  # fmt: skip
            made = await pipe.call("workflow.create", name="w", steps=steps)
            assert "id" in made, made
            while len(seen) < 3:
                await pipe.work()
                await pipe.advance()
            parts, of_child, undone = seen
            assert parts["one"] == [MARKER] * 50
            assert of_child[1:] == ({"text": MARKER}, len(MARKER))
            assert undone == ("one", {"text": MARKER}, [MARKER] * 50)


# Payloads at rest


async def test_nothing_is_in_the_clear_in_tables_queues_and_bucket(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    @action("parent", registry=registry)
    async def parent(ctx: Context, text: str) -> None:
        ctx.spawn("measure", {"text": text})

    @action("patient", registry=registry)
    async def patient(ctx: Context, text: str) -> Any:
        return ctx.wait(token="t-1")

    changed = with_bucket(settings, s3, payload_keys=new_key())
    async with plant(changed, registry) as pipe:
        small = {"text": MARKER}
        echoed = await pipe.call("enqueue", action="echo", payload=small)
        large = await pipe.call("enqueue", action="echo", payload=LARGE)
        failed = await pipe.call("enqueue", action="fail", payload=small)
        await pipe.call("enqueue", action="parent", payload=small)
        waiting = await pipe.call("enqueue", action="patient", payload=small)
        await pipe.call("task.complete", token="t-2", result=MARKER)
        async with InboundClient(
            settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region, payloads=changed
        ) as client:
            await client.enqueue("measure", small)
        await until(pipe.submitter.run_once, "the message")
        mapped = await pipe.call(
            "workflow.create",
            steps=[
                {"action": "echo", "payload": small},
                {"action": "measure", "after": ["echo"], "over": [MARKER], "item_as": "text"},
                {"name": "late", "action": "echo", "after": ["measure"], "over": [1], "payload": small, "delay": 3600},
            ],
        )
        assert MARKER not in await everything(sql)
        await pipe.work(messages=7)
        await pipe.call("task.complete", token="t-1", result=MARKER)
        await pipe.advance()
        assert MARKER not in await everything(sql)
        assert MARKER not in "".join(pipe.seen)
        assert MARKER.encode() not in b"".join(s3.objects().values())
        await pipe.work(messages=2)
        await pipe.advance()
        assert MARKER not in await everything(sql)
        tree = (await pipe.call("workflow.status", id=mapped["id"]))["tree"]
        by_name = {step["name"]: step for step in tree}
        assert (await pipe.status(by_name["measure/0"]["task_id"]))["result"] == len(MARKER)
        assert (await pipe.status(by_name["late/0"]["task_id"]))["payload"] == small | {"item": 1}
        # And yet all of it can be seen with the permission.
        assert (await pipe.status(echoed["id"]))["result"] == {"echo": MARKER}
        assert (await pipe.status(large["id"]))["result"] == {"echo": LARGE["text"]}
        assert (await pipe.status(waiting["id"]))["result"] == MARKER
        shown = await pipe.status(failed["id"])
        assert shown["error"]["message"] == f"ValueError: cannot use {MARKER}"
        assert "Traceback" in shown["failures"][0]["error"]["data"]["traceback"]
        assert shown["payload"] == small
        stored = json.loads((await raw(sql, failed["id"]))["failures"])[0]["error"]
        assert (stored["message"], stored["data"]["type"], stored["data"]["max_attempts"]) == (
            "encrypted",
            "ValueError",
            2,
        )
        results = [task["result"] for task in (await pipe.call("list", action="measure"))["tasks"]]
        assert results == [len(MARKER)] * 3


async def test_what_stays_in_the_clear_is_what_the_page_names(settings: Settings, registry: Registry, sql: Any) -> None:
    changed = load_settings(
        **settings.model_dump() | {"payload_keys": new_key(), "clockwork_api": True, "clockwork_port": 0}
    ).model_copy(update={"scheduler0": True})
    secret, named = {"text": MARKER}, "of a program's own 0815"
    async with plant(changed, registry) as pipe, AsyncExitStack() as stack:
        step = {"action": "echo", "over": [MARKER], "payload": secret}
        await pipe.call(
            "workflow.create", key="w", steps=[{"name": "a", "action": "echo", "delay": 9}, step | {"after": ["a"]}]
        )
        await pipe.call("task.complete", token="t", result=MARKER)
        await pipe.call("enqueue", action="echo", payload=secret, unique_key="k", ordering_key="o")
        assert await columns_with(sql, MARKER) == set()
        await pipe.call("schedule.create", name="s", expression="@yearly", action="echo", payload=secret)
        fired = await pipe.call("schedule.run_now", name="s")
        assert MARKER not in (await raw(sql, fired["task_id"]))["payload"]
        assert await columns_with(sql, MARKER) == {"schedule.payload"}
        await pipe.call("schedule.create_many", schedules=[{"name": "t", "expression": "@yearly", "payload": secret}])
        api = await stack.enter_async_context(running(pipe.store, changed))
        async with pipe.store.session() as session:
            made = await credentials.create_credential(session, readable=False)
        headers = {"x-api-key": made.api_key, "x-secret-key": made.api_secret}
        http = await stack.enter_async_context(httpx.AsyncClient(headers=headers))
        armed = {
            "clientId": "c", "scheduleKey": "k", "orderingKey": "o", "taskData": json.dumps(secret),
            "delivery": {"topic": "out"}, "scheduleTime": 4_000_000_000_000,
        }  # fmt: skip
        assert (await http.post(f"{api.added_urls['clockwork']}/schedule", json=armed)).status_code == 200
        project = (await http.post(f"{api.url}/v1/projects", json={"name": "p", "description": "d"})).json()["data"]
        job = {
            "projectId": project["id"], "spec": "@every 1h", "timezone": "UTC", "executionType": "http",
            "callbackUrl": "http://127.0.0.1:9/", "data": json.dumps(secret),
        }  # fmt: skip
        assert (await http.post(f"{api.url}/v1/jobs", json=[job])).status_code == 202
        await put(pipe.queues["inbound"], request("enqueue", {"payload": secret}))
        await until(pipe.submitter.run_once, "the message")
        named_by_page = {
            "schedule.payload", "schedule_import_part.entries", "armed.record", "scheduler0_job.data",
            "scheduler0_request.input", "scheduler0_request.output", "rejected.body",
        }  # fmt: skip
        assert await columns_with(sql, MARKER) == named_by_page
        while await Imports(store=pipe.store, settings=changed).run_once():
            pass
        assert await columns_with(sql, MARKER) == named_by_page - {"schedule_import_part.entries"}
        await sql.execute("select penstock_enqueue('echo', $1::json)", json.dumps({"text": named}))
        await pipe.call("submit:echo", objectID=named)
        assert await columns_with(sql, named) == {"task.payload", "task.unique_key", "unique_key.key"}


async def test_keys_are_rotated_and_one_that_is_missing_is_named(
    settings: Settings, registry: Registry, sql: Any
) -> None:
    old, new = new_key(), new_key()
    async with plant(load_settings(**settings.model_dump() | {"payload_keys": old}), registry) as pipe:
        first = await pipe.call("enqueue", action="echo", payload={"text": "a"})
        third = await pipe.call("enqueue", action="echo", payload={"text": "c"}, delay=3600)
    async with plant(load_settings(**settings.model_dump() | {"payload_keys": f"{new},{old}"}), registry) as pipe:
        second = await pipe.call("enqueue", action="echo", payload={"text": "b"})
        assert fingerprint(read_key(new)) in (await raw(sql, second["id"]))["payload"]
        await pipe.work(messages=2)
        assert (await pipe.status(first["id"]))["result"] == {"echo": "a"}
        assert (await pipe.status(second["id"]))["result"] == {"echo": "b"}
    for keys in (new, ""):
        async with plant(load_settings(**settings.model_dump() | {"payload_keys": keys}), registry) as pipe:
            plain = await pipe.call("enqueue", action="echo", payload={"text": "d"})
            shown = await pipe.status(third["id"])
            assert shown["payload"] is None
            assert f"key {fingerprint(read_key(old))}" in shown["payload_unread"]
            assert old not in json.dumps(shown)
            await sql.execute("update penstock.task set run_at = now()")
            await pipe.work(messages=2)
            shown = await pipe.status(third["id"])
            assert (shown["state"], shown["attempts"]) == ("SCHEDULED", 0)
            assert fingerprint(read_key(old)) in shown["progress"]["note"]
            assert (await pipe.status(plain["id"]))["state"] == "SUCCESS"


async def test_a_ciphertext_opens_only_where_it_belongs(settings: Settings, registry: Registry, sql: Any) -> None:
    async with plant(load_settings(**settings.model_dump() | {"payload_keys": new_key()}), registry) as pipe:
        one = await pipe.call("enqueue", action="echo", payload={"text": "mine"})
        two = await pipe.call("enqueue", action="measure", payload={"text": "yours"}, max_attempts=1)
        await sql.execute(
            "update penstock.task set payload = (select payload from penstock.task where id = $1) where id = $2",
            one["id"], two["id"],
        )  # fmt: skip
        await pipe.work(messages=2)
        shown = await pipe.status(two["id"])
        assert (shown["state"], shown["error"]["data"]["type"]) == ("CRITICAL_ERROR", "PayloadLost")
        other = await pipe.call("enqueue", action="echo", payload={"text": "another"})
        await pipe.work()
        await sql.execute(
            "update penstock.task_history set result = (select result from penstock.task_history where id = $1) "
            "where id = $2", one["id"], other["id"],
        )  # fmt: skip
        shown = await pipe.status(other["id"])
        assert (shown["result"], "does not open" in shown["result_unread"]) == (None, True)


async def test_what_is_stored_is_no_offer_and_an_offer_is_its_tenants_own(
    settings: Settings, registry: Registry, sql: Any
) -> None:
    """A ciphertext out of a backup is not opened for a tenant, whosever it is."""
    changed = load_settings(**settings.model_dump() | {"payload_keys": new_key()})
    async with plant(changed, registry) as pipe:
        secret = {"text": "salaries"}
        theirs = await pipe.call("enqueue", action="echo", payload=secret, tenant="b", delay=3600)
        stored = json.loads((await raw(sql, theirs["id"]))["payload"])
        for tenant in ("a", "b"):
            error = await pipe.call("enqueue", action="echo", sealed_payload=stored, tenant=tenant)
            assert "does not open" in error["message"]
        offered = json.loads(await pipe.store.codec.offer(json.dumps(secret), offered_aad("echo", "b")))
        for tenant in ("a", None):
            error = await pipe.call("enqueue", action="echo", sealed_payload=offered, tenant=tenant)
            assert "does not open" in error["message"]
        error = await pipe.call("enqueue", action="measure", sealed_payload=offered, tenant="b")
        assert "does not open" in error["message"]
        taken = await pipe.call("enqueue", action="echo", sealed_payload=offered, tenant="b", delay=3600)
        assert (await pipe.status(taken["id"]))["payload"] == secret
        without = json.loads(await pipe.store.codec.offer(json.dumps(secret), payload_aad("echo", None)))
        for tenant in ("a", "b", None):
            error = await pipe.call("enqueue", action="echo", sealed_payload=without, tenant=tenant)
            assert "does not open" in error["message"]


@pytest.mark.parametrize("large", [False, True])
async def test_a_ciphertext_in_the_task_of_another_tenant_is_refused(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any, large: bool
) -> None:
    """To any writer of the database: by a handler, by the api and as a file."""
    changed = with_bucket(settings, s3, payload_keys=new_key())
    async with plant(changed, registry) as pipe:
        secret = {"text": "salaries" * (100_000 if large else 1)}
        theirs = await pipe.call("enqueue", action="measure", payload=secret, tenant="a", delay=3600)
        others = [
            await pipe.call("enqueue", action="measure", payload={"text": ""}, tenant=tenant, max_attempts=1)
            for tenant in ("b", None)
        ]
        stored = (await raw(sql, theirs["id"]))["payload"]
        await sql.execute(
            "update penstock.task set payload = $1::json where id = any($2)", stored, [one["id"] for one in others]
        )
        for one in others:
            shown = await pipe.status(one["id"])
            assert shown["payload"] is None
            assert "belongs to something else" in shown["payload_unread"]
        assert (await pipe.status(theirs["id"]))["payload"] == secret
        await pipe.work()
        for one in others:
            shown = await pipe.status(one["id"])
            assert shown["state"] == "CRITICAL_ERROR"
            assert shown["error"]["data"]["type"] == "PayloadLost"


async def test_workflows_of_tenants_hand_results_over_encrypted(settings: Settings, registry: Registry) -> None:
    @action("join", registry=registry)
    def join(ctx: Context, text: str, done: dict[str, int]) -> Any:
        return [ctx.tenant, text, done]

    changed = load_settings(**settings.model_dump() | {"payload_keys": new_key()})
    async with plant(changed, registry) as pipe:
        flow = await pipe.call("workflow.create", tenant="acme", steps=[
            {"name": "first", "action": "measure", "payload": {"text": "four"}},
            {"name": "then", "action": "join", "payload": {"text": "t"}, "after": ["first"], "results_as": "done"},
        ])  # fmt: skip
        for _ in range(2):
            await pipe.work()
            await pipe.advance()
        shown = await pipe.call("workflow.status", id=flow["id"])
        assert shown["state"] == "SUCCESS"
        (task,) = (await pipe.call("list", action="join"))["tasks"]
        shown = await pipe.status(task["id"])
        assert shown["payload"] == {"text": "t", "done": {"first": 4}}
        assert shown["result"] == ["acme", "t", {"first": 4}]


async def test_results_errors_and_lists_of_steps_count_as_long_as_they_are_in_clear(
    settings: Settings, registry: Registry
) -> None:
    @action("give", registry=registry)
    def give(ctx: Context, fails: bool = False) -> list[str]:
        if fails:
            raise Fail("Q" * 800)
        return ["Q" * 1600]

    @action("take", registry=registry)
    def take(ctx: Context, given: Any) -> int:
        return json.dumps(given).count("Q")

    limits = {"payload_limit_bytes": 2000, "result_limit_bytes": 2000}
    async with plant(load_settings(**settings.model_dump() | limits | {"payload_keys": new_key()}), registry) as pipe:
        await pipe.call("workflow.create", steps=[
            {"name": "result", "action": "give"},
            {"name": "error", "action": "give", "payload": {"fails": True}, "on_failure": "continue"},
            {"name": "a", "action": "take", "after": ["result"], "results_as": "given"},
            {"name": "b", "action": "take", "after": ["result"], "over": "result", "item_as": "given"},
            {"name": "c", "action": "take", "after": ["error"], "errors_as": "given"},
        ])  # fmt: skip
        for messages in (2, 3):
            await pipe.work(messages)
            await pipe.advance()
        tasks = (await pipe.call("list", action="take"))["tasks"]
        assert [task["result"] or task["reason"] for task in tasks] == [1600] * 3


async def test_an_s3_that_does_not_answer_holds_up_no_workflow_without_objects(
    settings: Settings, s3: S3Bucket, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_inputs, "_S3_SECONDS", 0.3)
    changed = with_bucket(settings, s3)
    async with plant(changed, registry) as pipe, AsyncExitStack() as stack:
        for payload in (LARGE, {"text": "small"}):
            first = {"name": "first", "action": "echo", "payload": payload}
            then = {"name": "then", "action": "echo", "after": ["first"], "results_as": "text"}
            await pipe.call("workflow.create", steps=[first, then])
            await pipe.work()
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        stack.callback(silent.close)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        hung = load_settings(**changed.model_dump() | {"payload_s3_endpoint_url": url})
        store = Store(changed.require_database_url, codec=PayloadCodec(hung))
        stack.push_async_callback(store.close)
        advancer = WorkflowAdvancer(store=store, notifier=Notifier(store), settings=hung)
        for _ in range(2):  # together, then alone
            with pytest.raises(PayloadUnavailable, match=r"S3 did not answer within 0\.3 s"):
                await advancer.run_once()
        assert await advancer.run_once() == 1
        assert await advancer.run_once() is None  # the other one is left alone for a while


async def test_payloads_of_before_open_for_their_tenant(settings: Settings, registry: Registry, sql: Any) -> None:
    changed = load_settings(**settings.model_dump() | {"payload_keys": new_key()})
    async with plant(changed, registry) as pipe:
        task = await pipe.call("enqueue", action="measure", payload={"text": "new"}, tenant="acme")
        before = pipe.store.codec.encode('{"text":"four"}', payload_aad("measure", None))
        await sql.execute("update penstock.task set payload = $1::json where id = $2", before, task["id"])
        assert (await pipe.status(task["id"]))["payload"] == {"text": "four"}
        await pipe.work()
        assert (await pipe.status(task["id"]))["result"] == 4


async def test_a_client_of_a_tenant_seals_what_the_tenants_task_is_made_of(
    settings: Settings, registry: Registry, sql: Any
) -> None:
    changed = load_settings(**settings.model_dump() | {"payload_keys": new_key()})
    async with plant(changed, registry) as pipe:
        async with InboundClient(
            settings.inbound_queue, settings.sqs_endpoint_url, settings.aws_region, payloads=changed
        ) as client:
            await client.enqueue("measure", {"text": "four"}, tenant="b")
        await until(pipe.submitter.run_once, "the message")
        await pipe.work()
        (task,) = (await pipe.call("list", action="measure"))["tasks"]
        assert (task["tenant"], task["result"]) == ("b", 4)


async def test_half_a_surrogate_pair_in_an_error_or_a_note_is_replaced_before_it_is_encrypted(
    settings: Settings, registry: Registry, sql: asyncpg.Connection
) -> None:
    """Python reads file names that are no UTF-8 so, and names them in its errors."""

    @action("open", registry=registry, max_attempts=1)
    async def open_(ctx: Context) -> None:
        raise FileNotFoundError("no file caf\udce9.txt")

    async with plant(load_settings(**settings.model_dump() | {"payload_keys": new_key()}), registry) as pipe:
        task = await pipe.call("enqueue", action="open")
        await pipe.work()
        assert (await pipe.status(task["id"]))["error"]["message"] == "FileNotFoundError: no file caf\ufffd.txt"
        task = await pipe.call("enqueue", action="foreign")
        await until(pipe.scheduler.run_once, "something to send")
        claim = await sql.fetchval("select claim from penstock.task")
        note = encrypt_note(pipe.store.codec, task["id"], "reads caf\udce9.txt")
        await put(pipe.queues["results"], encode_progress(claim_id(task["id"], claim), 50, note))
        await until(pipe.resulter.run_once, "progress")
        assert (await pipe.status(task["id"]))["progress"]["note"] == "reads caf\ufffd.txt"


async def test_why_a_task_was_put_off_is_read_and_stored_encrypted(
    settings: Settings, registry: Registry, sql: asyncpg.Connection
) -> None:
    @action("later", registry=registry)
    def later(ctx: Context) -> None:
        raise Snooze(0, MARKER)

    changed = load_settings(**settings.model_dump() | {"payload_keys": new_key(), "snooze_limit": 1})
    async with plant(changed, registry) as pipe:
        task = await pipe.call("enqueue", action="later")
        await pipe.work()
        assert (await pipe.status(task["id"]))["progress"]["note"].endswith(f": Snooze: {MARKER}")
        assert MARKER not in await everything(sql)
        await pipe.work()
        error = (await pipe.status(task["id"]))["error"]
        assert error["data"]["type"] == "PutOffTooOften"
        assert error["message"].endswith(f"(PENSTOCK_SNOOZE_LIMIT): Snooze: {MARKER}")
        assert MARKER not in await everything(sql)


async def test_what_cannot_be_stored_of_a_result_or_a_spawned_task_is_replaced_before_it_is_encrypted(
    settings: Settings, registry: Registry, sql: asyncpg.Connection
) -> None:
    @action("split", registry=registry)
    async def split(ctx: Context) -> str:
        ctx.spawn("echo", {"text": "caf\udce9\0"})
        return "nul \0"

    async with plant(load_settings(**settings.model_dump() | {"payload_keys": new_key()}), registry) as pipe:
        task = await pipe.call("enqueue", action="split")
        await pipe.work()
        assert (await pipe.status(task["id"]))["state"] == "SUCCESS"
        assert (await pipe.status(task["id"]))["result"] == "nul \ufffd"
        child = await sql.fetchval("select id from penstock.task where action = 'echo'")
        assert (await pipe.status(child))["payload"] == {"text": "caf\ufffd\ufffd"}


async def test_the_same_tasks_are_the_same_although_they_are_encrypted(settings: Settings, registry: Registry) -> None:
    async with plant(load_settings(**settings.model_dump() | {"payload_keys": new_key()}), registry) as pipe:
        task = {"action": "echo", "payload": {"text": "a"}, "unique_key": "k", "delay": 3600}
        first = await pipe.call("enqueue", **task)
        again = await pipe.call("enqueue", **task)
        assert (again["id"], again["duplicate"]) == (first["id"], True)
        replaced = await pipe.call("enqueue", **task | {"payload": {"text": "b"}}, on_duplicate="replace")
        assert replaced["replaced"] is True
        assert (await pipe.status(first["id"]))["payload"] == {"text": "b"}
        answers = [await pipe.call("task.complete", token="w", result=1) for _ in range(2)]
        assert [answer["duplicate"] for answer in answers] == [False, True]


async def test_what_a_foreign_worker_answers_is_encrypted_when_it_arrives(
    settings: Settings, registry: Registry, sql: Any
) -> None:
    async with plant(load_settings(**settings.model_dump() | {"payload_keys": new_key()}), registry) as pipe:
        tasks = [await pipe.call("enqueue", action="foreign", max_attempts=1) for _ in range(4)]
        await until(pipe.scheduler.run_once, "something to send")
        claims = {row["id"]: row["claim"] for row in await sql.fetch("select id, claim from penstock.task")}
        first, second, third, fourth = (claim_id(task["id"], claims[task["id"]]) for task in tasks)
        codec = pipe.store.codec
        for note in (MARKER, encrypt_note(codec, tasks[0]["id"], MARKER)):
            await put(pipe.queues["results"], encode_progress(first, 50, note))
            await until(pipe.resulter.run_once, "progress")
            assert MARKER not in await everything(sql)
            assert (await pipe.status(tasks[0]["id"]))["progress"] == {"percent": 50.0, "note": MARKER}
        await put(pipe.queues["results"], encode_progress(first, 50, "penstock+x"))
        await until(pipe.resulter.run_once, "progress")
        assert (await pipe.status(tasks[0]["id"]))["progress"] == {"percent": 50.0, "note": "penstock+x"}
        await put(
            pipe.queues["results"],
            json.dumps({"jsonrpc": "2.0", "id": first, "result": MARKER}),
            json.dumps({"jsonrpc": "2.0", "id": second, "error": {"code": 1, "message": MARKER}}),
            json.dumps({"jsonrpc": "2.0", "id": third, "encoding": "penstock", "result": "penstock+sealed:x:y"}),
            json.dumps(
                {
                    "jsonrpc": "2.0",
                    "id": fourth,
                    "error": {"code": 1, "message": MARKER, "data": {"snooze": True, "retry_after": 60}},
                }
            ),
        )
        taken = 0
        while taken < 4:
            taken += await until(pipe.resulter.run_once, "results")
        assert MARKER not in await everything(sql)
        assert (await pipe.status(tasks[0]["id"]))["result"] == MARKER
        assert (await pipe.status(tasks[1]["id"]))["error"]["message"] == MARKER
        assert (await pipe.status(tasks[2]["id"]))["error"]["data"]["type"] == "BadEncoding"
        assert (await pipe.status(tasks[3]["id"]))["progress"]["note"].endswith(MARKER)


async def test_a_later_attempt_that_is_given_back_keeps_what_was_counted_before(
    settings: Settings, s3: S3Bucket, registry: Registry, sql: Any
) -> None:
    """An attempt has failed, the next does not begin, the last one is still to come: two were counted, none is lost."""
    async with plant(with_bucket(settings, s3), registry) as pipe:
        task = await pipe.call("enqueue", action="fail", payload=LARGE, ordering_key="o")
        behind = await pipe.call("enqueue", action="measure", payload={"text": ""}, ordering_key="o")
        await pipe.work()
        await sql.execute("update penstock.task set run_at = now()")
        await pipe.work(payload_bucket=None)
        shown = await pipe.status(task["id"])
        assert (shown["state"], shown["attempts"], len(shown["failures"])) == ("ERROR", 1, 1)
        assert "PENSTOCK_PAYLOAD_BUCKET" in shown["progress"]["note"]
        assert (await pipe.status(behind["id"]))["state"] == "WAITING"
        await sql.execute("update penstock.task set run_at = now()")
        await pipe.work()
        shown = await pipe.status(task["id"])
        assert (shown["state"], shown["attempts"], len(shown["failures"])) == ("CRITICAL_ERROR", 2, 2)
        assert (await pipe.status(behind["id"]))["state"] == "SCHEDULED"
