"""Output of tasks: from the handler through results queue and resulter to the events of the api."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from _pytest.logging import LogCaptureHandler

from penstock.api.keys import CreateKey, create_key, revoke_key
from penstock.api.task_routes import TaskRoutes
from penstock.brokers.sqs import SqsQueue
from penstock.client.async_client import AsyncClient
from penstock.db.pool import Store
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import TaskNotFound
from penstock.protocol.output import Seen, Shown, encode_output
from penstock.protocol.reports import encode_result
from penstock.protocol.task import NewTask
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.supervisor.retention import Retention
from penstock.tasks import output
from penstock.worker.handlers.actions import REGISTRY, Registry, action
from penstock.worker.handlers.context import Call, Context
from penstock.worker.output import _Prints
from penstock.worker.process import Worker
from tests.docs_blocks import all_blocks
from tests.integration.apis import running as serving
from tests.integration.cli.test_task_commands import run
from tests.integration.test_resulter import drained, name
from tests.integration.test_results import entries
from tests.integration.test_steps import Line
from tests.integration.worker.test_worker import running, take

log = logging.getLogger("shop.orders")
log.setLevel(logging.INFO)


@pytest.fixture(autouse=True)
def _level(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker's process."""
    monkeypatch.setattr(logging.getLogger("penstock"), "level", logging.INFO)


@pytest.fixture
def line(store: Store, outbound: SqsQueue, results: SqsQueue, settings: Settings) -> Line:
    return Line(store, outbound, results, settings.model_copy(update={"task_output": "logs"}))


async def parts_of(store: Store, task_id: int, seen: str = "") -> list[Shown]:
    async with store.session() as session:
        parts, _ = await output.read(session, task_id, Seen(seen), room_bytes=10**6)
    return parts


async def texts_of(store: Store, task_id: int) -> list[Any]:
    return [
        json.loads(bytes(entry.chunk)) if entry.is_chunk else (entry.level, entry.text)
        for part in await parts_of(store, task_id)
        for entry in part.entries
    ]


def part(task: Any, number: int, *texts: str, dropped: int = 0) -> str:
    """As a worker in another language may report it."""
    given = json.dumps([{"at": 1.5, "level": "info", "text": text} for text in texts])
    return encode_output(name(task), number, given, dropped)


async def test_what_a_handler_logs_and_emits_is_kept(line: Line) -> None:
    async def order(ctx: Context) -> None:
        log.info("charging %s", "card")
        await ctx.emit({"token": "é"})
        ctx.log.info("charged", amount=3)
        log.debug("below the level of its logger")
        await asyncio.to_thread(log.warning, "from a thread")
        print("not asked for")

    (task_id,) = await line.enqueue()
    await line.attempt(order)
    assert await texts_of(line.store, task_id) == [
        ("info", "charging card"), {"token": "é"}, ("info", "charged amount=3"), ("warning", "from a thread"),
    ]  # fmt: skip


async def test_a_plain_function_prints_and_its_error_is_logged_with_its_traceback(line: Line) -> None:
    def order(ctx: Context) -> None:
        print("one", "two")
        print("no end of line", end="")
        ctx.emit_sync("chunk")
        try:
            raise LookupError("gone")
        except LookupError:
            log.exception("looking")
        raise RuntimeError("failed")

    (task_id,) = await line.enqueue()
    await line.attempt(order, task_output="prints")
    printed, chunk, failed, rest = await texts_of(line.store, task_id)
    assert (printed, chunk, rest) == (("print", "one two"), "chunk", ("print", "no end of line"))
    assert failed[1].startswith("looking\nTraceback")
    assert failed[1].endswith("LookupError: gone")


def test_a_stream_whose_lines_are_kept_is_as_it_was_for_all_else(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as file:
        stream = _Prints(file)
        assert (stream.encoding, stream.writable(), stream.fileno()) == ("utf-8", True, file.fileno())
        stream.writelines(["a\n", "b\n"])
        stream.flush()
    assert (tmp_path / "out").read_text("utf-8") == "a\nb\n"


async def test_the_page_shows_the_newest_of_much_output(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.dashboard.pages._OUTPUT_BYTES", 1500)
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    await line.apply(part(task, 1, "x" * 1500), part(task, 2, "y" * 1500), part(task, 3, "the last line"))
    async with serving(line.store, line.settings) as api, httpx.AsyncClient(headers={"Accept": "text/html"}) as http:
        text = (await http.get(f"{api.url}/tasks/{task_id}")).text
    assert "the last line" in text
    assert "xxx" not in text


async def test_a_stop_that_meets_a_stream_at_work_is_not_lost(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.task_routes._ADMITTED_SECONDS", 0.2)
    (task_id,) = await line.enqueue()
    async with serving(line.store, line.settings) as api, reading(api.url, task_id) as event:
        assert (await event())[1] == "state"
        again = TaskRoutes._admit_again

        async def stopped_meanwhile(self: Any, request: Any, stream: Any) -> None:
            api.stop()
            await again(self, request, stream)

        monkeypatch.setattr(TaskRoutes, "_admit_again", stopped_meanwhile)
        assert (await asyncio.wait_for(event(), 10))[1] == "closed"


async def test_no_line_of_the_worker_or_of_another_task_is_among_them(
    line: Line, outbound: SqsQueue, results: SqsQueue
) -> None:
    async def order(ctx: Context) -> None:
        for _ in range(3):
            log.info("task %s", ctx.task_id)
            await asyncio.sleep(0.01)
        raise RuntimeError("which the worker logs")

    ids = await line.enqueue(*[NewTask("order") for _ in range(3)])
    await line.send()
    await line.work(order)
    await drained(line.resulter)
    for task_id in ids:
        assert await texts_of(line.store, task_id) == [("info", f"task {task_id}")] * 3


async def test_off_is_nothing_at_all_and_an_action_has_the_last_word(line: Line, sql: Any) -> None:
    outputs = []

    async def order(ctx: Context) -> None:
        log.info("a line")
        await ctx.emit("a chunk")
        outputs.append(ctx.emitter)

    registry = Registry()
    action("order", registry=registry, output="off")(order)
    await line.enqueue()
    worker = Worker(outbound=line.outbound, results=line.results, settings=line.settings, registry=registry)
    await line.send()
    await line.work(worker)
    await drained(line.resulter)
    await line.enqueue()
    await line.attempt(order, task_output="off")
    assert await sql.fetchval("select count(*) from penstock.task_output") == 0
    assert outputs == [None, None]
    (task_id,) = await line.enqueue()
    await line.attempt(order, task_output="chunks")
    assert await texts_of(line.store, task_id) == ["a chunk"]


async def test_tasks_of_a_batch_emit_chunks_of_their_own(line: Line) -> None:
    async def orders(calls: list[Call[Any]]) -> list[Any]:
        log.info("of no task alone")
        for call in calls:
            await call.ctx.emit(call.ctx.task_id)
        return [None] * len(calls)

    ids = await line.enqueue(*[NewTask("order") for _ in range(3)])
    await line.send()
    await line.work(orders, batch=3)
    await drained(line.resulter)
    assert [await texts_of(line.store, task_id) for task_id in ids] == [[task_id] for task_id in ids]


async def test_what_is_above_the_cap_is_dropped_and_counted(line: Line) -> None:
    async def order(ctx: Context) -> None:
        for number in range(100):
            log.info("%s %s", number, "x" * 100)
        log.info("y" * 100_000)

    (task_id,) = await line.enqueue()
    await line.attempt(order, output_limit_bytes=2000)
    (found,) = await parts_of(line.store, task_id)
    assert 5 <= len(found.entries) <= 20
    assert found.dropped == 101 - len(found.entries)


async def test_chunks_that_are_no_json_or_too_large_raise(line: Line) -> None:
    problems: list[str] = []

    async def order(ctx: Context) -> None:
        for chunk in (object(), "x" * 200_000, float("nan")):
            try:
                await ctx.emit(chunk)
            except ValueError as exc:
                problems.append(str(exc))

    await line.enqueue()
    await line.attempt(order)
    assert ["cannot be written as JSON" in one for one in problems] == [True, False, True]
    assert "at most 131072 bytes" in problems[1]


@contextmanager
def unreported() -> Iterator[None]:
    """Without the handlers of pytest, whose reports cannot be sent to a parallel run with half a pair in them."""
    root = logging.getLogger()
    reporting = [handler for handler in root.handlers if isinstance(handler, LogCaptureHandler)]
    for handler in reporting:
        root.removeHandler(handler)
    try:
        yield
    finally:
        for handler in reporting:
            root.addHandler(handler)


async def test_a_lot_of_output_is_several_parts_and_unstorable_characters_are_replaced(line: Line) -> None:
    async def order(ctx: Context) -> None:
        log.info('NUL \0, half a pair \ud800, \ufffe, quote " and \x1b[1m')
        for _ in range(10):
            log.info("\0" + "x" * 5000)
        await ctx.emit("\0\udc00")

    (task_id,) = await line.enqueue()
    with unreported():
        await line.attempt(order)
    parts = await parts_of(line.store, task_id)
    assert [one.number % 1_000_000 for one in parts] == [1, 2]
    first, *zeros, chunk = await texts_of(line.store, task_id)
    assert first[1].replace("?", "\ufffd") == 'NUL \ufffd, half a pair \ufffd, \ufffe, quote " and \x1b[1m'
    assert zeros == [("info", "\ufffd" + "x" * 5000)] * 10
    assert chunk == "\ufffd\ufffd"


async def test_a_report_counts_once_and_a_foreign_worker_is_limited_too(line: Line) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    line.settings = line.settings.model_copy(update={"output_limit_bytes": 1024})
    assert (await line.apply(part(task, 1, "one"), part(task, 2, "two"))).output == 2
    assert (await line.apply(part(task, 1, "again"), part(task, 3, "x" * 3000), part(task, 4, "four"))).output == 2
    assert await texts_of(line.store, task_id) == [("info", "one"), ("info", "two")]
    assert [one.dropped for one in await parts_of(line.store, task_id)] == [0, 0, 1, 1]
    long = "l" * 30
    wrongs = ['"at":1', '"at":1,"text":"a","chunk":1', '"at":-1,"text":"a"', f'"at":1,"text":"a","level":"{long}"']
    for wrong in wrongs:
        summary = await line.apply(encode_output(name(task), 9, f"[{{{wrong}}}]", 0))
        assert (len(summary.unreadable), summary.output) == (1, 0)
    later = await line.apply(encode_output(f"{task_id}:{task.claim + 1}", 1, '[{"at":1,"text":"not claimed yet"}]', 0))
    assert (later.output, len(later.unreadable)) in ((0, 0), (0, 1))


async def test_a_task_keeps_the_output_of_its_newest_attempts(line: Line, sql: Any) -> None:
    (task_id,) = await line.enqueue()
    line.settings = line.settings.model_copy(update={"output_limit_bytes": 1024})
    for _ in range(14):
        (task,) = await line.claim()
        await line.apply(part(task, 1, "x" * 1900))
        await sql.execute(
            "update penstock.task set state = 'SCHEDULED', attempts = 0, claimed_at = null, run_at = now()"
        )
    claims = [one.claim for one in await parts_of(line.store, task_id)]
    assert claims == sorted(claims)
    assert claims[-1] == task.claim
    assert 10 <= len(claims) <= 12


async def test_output_comes_behind_the_outcome_too_and_goes_with_its_task(line: Line, sql: Any) -> None:
    ids = await line.enqueue(*[NewTask("order") for _ in range(2)])
    for task in await line.claim():
        await line.apply(encode_result(name(task), "1"))
        await line.apply(part(task, 1, "late"))
    retention = Retention(store=line.store, settings=line.settings)
    assert await retention._delete_gone("output") == 0
    await sql.execute("delete from penstock.task_history where id = $1", ids[0])
    assert await retention._delete_gone("output") == 1
    assert [await texts_of(line.store, one) for one in ids] == [[], [("info", "late")]]


async def test_output_is_encrypted_where_payloads_are(
    database_url: str, outbound: SqsQueue, results: SqsQueue, settings: Settings, sql: Any
) -> None:
    settings = load_settings(**settings.model_dump() | {"payload_keys": new_key(), "task_output": "logs"})
    sealed = Store(database_url, application_name="penstock-test", codec=PayloadCodec(settings))
    line = Line(sealed, outbound, results, settings)

    async def order(ctx: Context) -> None:
        log.info("a secret")

    (task_id,) = await line.enqueue()
    (task,) = await line.send()
    await line.work(order)
    messages = await line.take_reports()
    assert any("output" in one.body for one in messages)
    assert not any("a secret" in one.body for one in messages)
    await line.apply(part(task, 7, "a secret of a worker without keys"))
    assert "secret" not in str(await sql.fetch("select entries from penstock.task_output"))
    assert await texts_of(sealed, task_id) == [("info", "a secret of a worker without keys")]
    keyless = Store(database_url, application_name="penstock-test")
    assert "key" in str((await parts_of(keyless, task_id))[0].unread)
    await sealed.close()
    await keyless.close()


async def test_a_chunk_that_cannot_be_stored_can_be_read_where_it_is_encrypted(
    database_url: str, outbound: SqsQueue, results: SqsQueue, settings: Settings
) -> None:
    settings = load_settings(**settings.model_dump() | {"payload_keys": new_key(), "task_output": "chunks"})
    sealed = Store(database_url, application_name="penstock-test", codec=PayloadCodec(settings))

    async def order(ctx: Context) -> None:
        await ctx.emit({"name": "caf\udce9\0"})

    line = Line(sealed, outbound, results, settings)
    (task_id,) = await line.enqueue()
    await line.attempt(order)
    assert [one.unread for one in await parts_of(sealed, task_id)] == [None]
    assert await texts_of(sealed, task_id) == [{"name": "caf\ufffd\ufffd"}]
    await sealed.close()


# Events


@asynccontextmanager
async def reading(url: str, task_id: int, last: str = "", **headers: str) -> AsyncIterator[Any]:
    """A function that reads the next event: id, kind and data."""
    given = {"Last-Event-ID": last, **headers} if last else headers
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream("GET", f"{url}/tasks/{task_id}/events", headers=given) as response,
    ):
        assert response.status_code == 200, await response.aread()
        lines = response.aiter_lines()

        async def event() -> tuple[str, str, Any]:
            found: dict[str, str] = {}
            async for one in lines:
                if one.startswith("data: "):
                    return found.get("id", ""), found.get("event", ""), json.loads(one[6:])
                if ": " in one and not one.startswith(":"):
                    key, _, value = one.partition(": ")
                    found[key] = value
            return "", "closed", None

        yield event


async def test_a_task_is_followed_from_its_first_line_to_its_end(line: Line) -> None:
    go_on = asyncio.Event()

    async def order(ctx: Context) -> str:
        log.info("first")
        await ctx.progress(50, "half")
        await ctx.emit([1])
        await go_on.wait()
        await ctx.step("charge", lambda: "charged")
        log.info("last")
        return "done"

    (task_id,) = await line.enqueue()
    async with serving(line.store, line.settings) as api, reading(api.url, task_id) as event:
        _, kind, state = await event()
        assert (kind, state["state"]) == ("state", "SCHEDULED")
        await line.send()
        work = asyncio.create_task(line.work(order, durable=True) if False else line.work(order))
        resulting = asyncio.create_task(_apply_until(line, work))
        kinds: list[str] = []
        texts: list[Any] = []
        while "end" not in kinds and "closed" not in kinds:
            _, kind, data = await asyncio.wait_for(event(), 20)
            kinds.append(kind)
            texts += [data["text"]] if kind == "log" else [data["chunk"]] if kind == "chunk" else []
            if kind == "chunk":
                go_on.set()
        await resulting
    assert texts == ["first", [1], "last"]
    assert data["state"] == "SUCCESS"
    assert data["result"] == "done"
    assert kinds[-1] == "end"
    assert {"progress", "state", "log", "chunk"} <= set(kinds)
    assert kinds.index("chunk") < len(kinds) - 3


async def _apply_until(line: Line, work: asyncio.Task[None]) -> None:
    """The resulter, with its wake-ups, until the worker is done."""
    notifying = [asyncio.create_task(run()) for key, run in line.resulter.side_tasks().items() if "notify" in key]
    while not work.done():
        await line.resulter.run_once()
        await asyncio.sleep(0.02)
    await work
    await drained(line.resulter)
    for task in notifying:
        task.cancel()


async def test_no_character_of_a_text_ends_the_line_of_its_event(line: Line) -> None:
    """Python's splitlines and httpx end lines at more characters than the protocol does."""
    text = "".join(map(chr, (*range(1, 32), 0x7F, 0x85, 0x2028, 0x2029))) + "end"
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    logged = json.dumps(text, ensure_ascii=False)
    spread = json.dumps({"text": text}, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    entries = f'[{{"at":1,"level":"info","text":{logged}}},{{"at":1,"chunk":{spread}}}]'
    await line.apply(encode_output(name(task), 1, entries, 0), encode_result(name(task), spread))
    async with serving(line.store, line.settings) as api, AsyncClient(api.url) as client:
        async with asyncio.timeout(20):
            data = {kind: data async for kind, data in client.events(task_id)}
        shown = await asyncio.to_thread(run, api.url, "task", "logs", str(task_id), "--json")
    assert (data["log"]["text"], data["chunk"]["chunk"]["text"], data["end"]["result"]["text"]) == (text, text, text)
    assert json.loads(shown.split("\n")[0])["text"] == text


async def test_a_reader_goes_on_behind_the_last_event_that_it_has(line: Line) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    await line.apply(part(task, 1, "1a", "1b"), part(task, 3, "3a", "3b", "3c"))
    everything = ["1a", "1b", "3a", "3b", "3c"]
    async with serving(line.store, line.settings) as api:
        ids = []
        async with reading(api.url, task_id) as event:
            for _ in everything:
                id_, _, data = await event()
                ids.append((id_, data["text"]))
        assert [text for _, text in ids] == everything
        await line.apply(part(task, 2, "2 comes late"))
        for place, (id_, _) in enumerate(ids, 1):
            async with reading(api.url, task_id, id_) as event:
                left = sorted([*everything[place:], "2 comes late"])
                assert sorted([(await event())[2]["text"] for _ in left]) == left
                assert (await event())[1] == "state"
        await line.apply(encode_result(name(task), "1"))
        async with reading(api.url, task_id) as event:
            while (await event())[:2] != ("end", "end"):
                pass
        async with httpx.AsyncClient() as http:
            url = f"{api.url}/tasks/{task_id}/events"
            assert (await http.get(url, headers={"Last-Event-ID": "end"})).status_code == 204
            for beyond in ("7.x", "[[[1,1,3000000000]],[]]", f"[[[{2**63},1,2]],[]]", "[[[1,-1,2]],[]]", "[[1,1,2]]"):
                wrong = await http.get(url, headers={"Last-Event-ID": beyond})
                assert "is none of this stream" in wrong.text


async def test_only_callers_who_may_read_the_task_get_its_events(line: Line, monkeypatch: Any) -> None:
    one, eve, writer = "key-of-one-12345", "key-of-eve-12345", "key-of-writer-12"
    keys = f"{entries(reader=one)},eve:read:{_digest(eve)}:eve,writer:enqueue:{_digest(writer)}"
    (task_id,) = await line.enqueue(NewTask("order", tenant="acme"))
    settings = load_settings(**line.settings.model_dump() | {"api_keys": keys})
    async with serving(line.store, settings) as api, httpx.AsyncClient() as http:
        url = f"{api.url}/tasks/{task_id}/events?follow=false"

        async def status(key: str | None, url: str = url) -> int:
            return (await http.get(url, headers={} if key is None else {"X-API-Key": key})).status_code

        assert [await status(key) for key in (one, eve, writer, None)] == [200, 404, 403, 401]
        assert await status(one, f"{api.url}/tasks/999999/events") == 404
        monkeypatch.setattr("penstock.api.streams.STREAMS", 0)
        assert await status(one) == 503


async def test_a_stream_of_a_busy_task_ends_with_its_key(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.task_routes._ADMITTED_SECONDS", 0.05)
    async with line.store.session() as session:
        made = await create_key(session, CreateKey("reader", [Permission.READ]))
    assert made is not None
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    settings = line.settings.model_copy(update={"api_require_keys": True})
    async with serving(line.store, settings) as api, reading(api.url, task_id, **{"X-API-Key": made.key}) as event:
        assert (await event())[1] == "state"
        await line.apply(part(task, 1, "before"))
        assert (await asyncio.wait_for(event(), 10))[2]["text"] == "before"
        async with line.store.session() as session:
            await revoke_key(session, made.id)
        assert api._key_cache is not None
        await api._key_cache.renew()
        await asyncio.sleep(0.1)

        async def be_busy() -> None:
            for number in range(2, 1000):
                await line.apply(part(task, number, "after"))
                await asyncio.sleep(0.02)

        busy = asyncio.create_task(be_busy())
        assert (await asyncio.wait_for(event(), 10))[1] == "closed"
        busy.cancel()


async def test_a_burst_of_readers_does_not_pass_the_limit(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.streams.STREAMS", 2)
    (task_id,) = await line.enqueue()
    async with serving(line.store, line.settings) as api, httpx.AsyncClient(base_url=api.url, timeout=30) as http:

        async def begun() -> httpx.Response:
            return await http.send(http.build_request("GET", f"/tasks/{task_id}/events"), stream=True)

        responses = await asyncio.gather(*(begun() for _ in range(10)))
        assert sorted(response.status_code for response in responses) == [200] * 2 + [503] * 8
        assert (await http.get("/tasks/999999/events")).status_code == 503
        for response in responses:
            await response.aclose()
        async with asyncio.timeout(10):
            while (again := await begun()).status_code != 200:
                await again.aclose()
                await asyncio.sleep(0.05)
        await again.aclose()


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def test_streams_end_with_the_api_and_the_client_goes_on(line: Line) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    await line.apply(part(task, 1, "one"))
    async with serving(line.store, line.settings) as api, reading(api.url, task_id) as event:
        url = api.url
        assert (await event())[2]["text"] == "one"
        api.stop()
        while (await asyncio.wait_for(event(), 10))[1] != "closed":
            pass
    settings = line.settings.model_copy(update={"http_port": int(url.rpartition(":")[2])})
    client = AsyncClient(url)
    seen: list[Any] = []

    async def read() -> None:
        async for kind, data in client.events(task_id):
            seen.append((kind, data.get("text")))

    reader = asyncio.create_task(read())  # while there is no api
    async with serving(line.store, settings):
        while ("log", "one") not in seen:
            await asyncio.sleep(0.05)
    async with serving(line.store, settings):
        await line.apply(part(task, 2, "two"), encode_result(name(task), "1"))
        await asyncio.wait_for(reader, 20)
        with pytest.raises(TaskNotFound):
            async for _ in client.events(999_999):
                pass
    assert [text for kind, text in seen if kind == "log"] == ["one", "two"]
    assert seen[-1][0] == "end"
    await client.close()


async def test_the_command_line_and_the_page_show_it(line: Line) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    await line.apply(part(task, 1, "charging", dropped=2), encode_result(name(task), "1"))

    def use(url: str) -> None:
        told = run(url, "task", "logs", str(task_id))
        assert "info charging" in told
        assert "2 entries dropped" in told
        (first, _) = map(json.loads, run(url, "task", "logs", str(task_id), "--json").splitlines())
        assert (first["event"], first["text"], first["id"]) == ("log", "charging", task_id)
        followed = run(url, "task", "show", str(task_id), "--follow")
        assert "charging" in followed
        assert "SUCCESS" in followed
        assert run(url, "task", "logs", "999999", fails=True) == "No such task: 999999"

    async with serving(line.store, line.settings) as api:
        await asyncio.to_thread(use, api.url)
        async with httpx.AsyncClient(headers={"Accept": "text/html"}) as http:
            page = (await http.get(f"{api.url}/tasks/{task_id}")).text
    assert "charging" in page
    assert "2 more dropped" in page


async def test_the_examples_of_the_page_run(line: Line) -> None:
    before, names = dict(REGISTRY), {"__name__": "shop.answers"}
    logging.getLogger("shop.answers").setLevel(logging.INFO)
    try:
        for block in all_blocks():
            if block.page == "docs/output.md":
                exec(block.text, names)
        worker = Worker(
            outbound=line.outbound, results=line.results, settings=line.settings, registry=Registry(REGISTRY)
        )
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)
    (task_id,) = await line.enqueue(NewTask("answer", payload='{"question":"why?"}'))
    await line.send()
    await line.work(worker)
    await drained(line.resulter)
    async with serving(line.store, line.settings) as api:
        client = AsyncClient(api.url)
        assert await names["follow"](client, task_id) == "forty two "  # type: ignore[operator]
        await client.close()
    assert (await texts_of(line.store, task_id))[0] == ("info", "asking about 4 characters")


async def test_parts_without_room_are_counted_in_bytes(line: Line) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    entries = json.dumps([{"at": 1.5, "level": "info", "text": "я" * 500}], ensure_ascii=False)
    await line.apply(*(encode_output(name(task), number, entries, 0) for number in (1, 2, 3)))
    async with line.store.session() as session:
        parts, is_full = await output.read(session, task_id, Seen(""), room_bytes=1000)
    assert (len(parts), is_full) == (1, True)


async def test_a_slow_reader_gets_the_last_lines_and_the_outcome(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    (task_id,) = await line.enqueue()
    (task,) = await line.claim()
    await line.apply(part(task, 1, "first"))
    again = TaskRoutes._admit_again

    async def settled_meanwhile(self: Any, request: Any, stream: Any) -> None:
        monkeypatch.setattr(TaskRoutes, "_admit_again", again)
        await line.apply(part(task, 2, "last"), encode_result(name(task), '"done"'))
        await asyncio.sleep(4)  # as a send to a reader that takes nothing
        await again(self, request, stream)

    monkeypatch.setattr(TaskRoutes, "_admit_again", settled_meanwhile)
    seen: list[tuple[str, Any]] = [("", None)]
    async with serving(line.store, line.settings) as api, reading(api.url, task_id) as event:
        while seen[-1][0] not in ("end", "closed"):
            seen.append((await asyncio.wait_for(event(), 20))[1:])
    assert [data["text"] for kind, data in seen if kind == "log"] == ["first", "last"]
    kind, outcome = seen[-1]
    assert (kind, outcome["state"], outcome["result"]) == ("end", "SUCCESS", "done")


async def test_a_running_worker_reports_before_its_handler_ends(line: Line) -> None:
    go_on = asyncio.Event()

    async def order(ctx: Context) -> None:
        await ctx.emit("early")
        await go_on.wait()

    (task_id,) = await line.enqueue()
    await line.send()
    worker = line.worker(order)
    async with running(worker):
        await take(worker, 1)
        async with asyncio.timeout(20):
            while not await texts_of(line.store, task_id):
                await line.resulter.run_once()
                await asyncio.sleep(0.02)
        go_on.set()
        await asyncio.wait_for(worker.settle(), 20)
