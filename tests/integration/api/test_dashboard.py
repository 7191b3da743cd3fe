"""The dashboard without a browser: every page, every form, who may do what, over real HTTP and a real Postgres."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import quote, urlsplit

import asyncpg
import httpx
import pytest

from penstock.api import keys as api_keys
from penstock.api.dashboard import overview
from penstock.api.dashboard.overview import ProcessProbe
from penstock.api.dashboard.pages import PAGES
from penstock.api.dashboard.requests import FORM_ACTIONS
from penstock.api.keys import CreateKey, create_key
from penstock.api.process import Api
from penstock.api.streams import STREAMS_OF_ONE, Streams
from penstock.api.table import METHODS
from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue, SqsTransport
from penstock.db.pool import PLANNING, Store
from penstock.db.statements import SQL
from penstock.local.postgres import EmbeddedPostgres
from penstock.local.service import free_port
from penstock.payloads.codec import PayloadCodec, payload_aad
from penstock.protocol import answers
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import TooManyWaits
from penstock.protocol.reports import decode_reports
from penstock.protocol.task import Failure, NewTask
from penstock.results.apply import apply_reports
from penstock.runtime.health import Health, serve_health
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.supervisor.retention import Retention
from penstock.tasks import bulk, claim, settle
from penstock.tasks import enqueue as enqueuing
from penstock.workflows.advancer import advance_workflows
from tests.integration.apis import running
from tests.integration.doors import postgres_away

HTML = {"Accept": "text/html"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \"'&{{7*7}}"


class Browser:
    """Cookies, and forms as a page has them."""

    def __init__(self, api: Api) -> None:
        self.http = httpx.AsyncClient(base_url=api.url, timeout=60, headers=HTML)
        self.methods = api._methods

    async def get(self, path: str, status: int = 200) -> str:
        answer = await self.http.get(path)
        assert answer.status_code == status, (path, answer.status_code, answer.text[-2000:])
        return answer.text

    async def csrf(self, page: str = "/keys") -> str:
        answer = await self.http.get(page)
        found = re.search(r'name="csrf" value="([0-9a-f]{64})"', answer.text)
        assert found is not None, answer.text
        return found[1]

    async def do(self, method: str, **fields: Any) -> str:
        """Send a form and follow it to its page; what the page says of it."""
        data = {"csrf": await self.csrf(), "method": method, "back": "/audit", **fields}
        answer = await self.http.post("/do", data=data, headers={"Origin": str(self.http.base_url).rstrip("/")})
        assert answer.status_code == 303, (answer.status_code, answer.text[-3000:])
        shown = await self.get(answer.headers["location"])
        flash = re.search(r'class="flash (done|failed)" role="alert">([^<]*)<', shown)
        assert flash is not None
        return f"{flash[1]}: {unescape(flash[2])}"

    async def call(self, method: str, **params: Any) -> Any:
        return await self.methods.call(method, params)


@pytest.fixture(autouse=True)
def patient_overview(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too the first answer is the whole, but where a test is about that."""
    monkeypatch.setattr(overview, "FIRST_WITHIN_SECONDS", 60.0)


@pytest.fixture
async def browser(store: Store, settings: Settings) -> AsyncIterator[Browser]:
    async with running(store, settings) as api:
        made = Browser(api)
        yield made
        await made.http.aclose()


async def enqueue(store: Store, *tasks: NewTask) -> list[int]:
    async with store.session() as session:
        return [accepted.id for accepted in await enqueuing.enqueue(session, tasks)]


async def fail_for_good(store: Store, task_id: int, error: dict[str, Any], *, hold_keys: bool = False) -> None:
    """Have the newest claim of a task fail, as a worker would report it."""
    async with store.transaction() as session:
        batch = await claim.claim(session, 100)
        assert batch is not None
        (task,) = (task for task in batch.tasks if task.id == task_id)
        await claim.confirm(session, batch.id)
        failure = Failure(task.id, task.claim, json.dumps(error), None)
        await settle.fail(session, [failure], hold_keys=hold_keys)


async def fail_all(store: Store, *errors: dict[str, Any]) -> None:
    """Have all tasks fail, each with its error, in the order of their ids."""
    async with store.transaction() as session:
        batch = await claim.claim(session, 100)
        assert batch is not None
        tasks = sorted(batch.tasks, key=lambda task: task.id)
        await settle.fail(
            session,
            [Failure(task.id, task.claim, json.dumps(error), None) for task, error in zip(tasks, errors, strict=True)],
        )


async def history(browser: Browser) -> list[tuple[str, str, str | None]]:
    await browser.methods.audit.drain()
    page = await browser.call("audit.list")
    return [(one.door, one.method, one.outcome) for one in page.audit]


# Pages


async def test_every_page_opens_on_an_empty_database_and_says_what_would_be_there(browser: Browser) -> None:
    for path in ("/", *(page.path for page in PAGES if "{" not in page.path)):
        text = await browser.get(path)
        assert "<h1>" in text
    for path in ("/tasks/1", "/schedules/none", "/workflows/1", "/rejected/1", "/jobs/1"):
        assert "Not found" in await browser.get(path, 404)
    assert "No messages visible" in await browser.get("/queues/inbound/dead")


async def test_a_task_is_shown_whole_with_payload_result_error_and_life(store: Store, browser: Browser) -> None:
    (one,) = await enqueue(store, NewTask("resize", payload='{"objectID":23,"big":12345678901234567890}',
                                          unique_key="k-1", labels='{"tenant":"acme"}'))  # fmt: skip
    error = {"code": -32000, "message": "boom", "data": {"type": "ValueError", "message": "boom at 7",
                                                         "traceback": "Traceback\n  line 7", "hint": 5}}  # fmt: skip
    await fail_for_good(store, one, error)
    text = await browser.get(f"/tasks/{one}")
    for part in ("ValueError: boom at 7", "line 7", "12345678901234567890", "tenant=acme", "k-1", "Attempt 1 failed",
                 "Failed permanently", "Enqueued", '"hint": 5'):  # fmt: skip
        assert part in unescape(text), part
    assert "boom at 7" in await browser.get("/")
    assert f'href="/tasks/{one}"' in await browser.get("/tasks?state=CRITICAL_ERROR&action=resize")


async def why(browser: Browser, task_id: int) -> tuple[str, str | None]:
    """What the page of a task says of why it does not run, and where its link leads."""
    found = re.search(r'<p class="said" id="why">(.*?)</p>', await browser.get(f"/tasks/{task_id}"))
    assert found is not None
    link = re.search(r'href="([^"]*)"', found[1])
    return unescape(re.sub("<[^>]*>", "", found[1])), None if link is None else unescape(link[1])


async def test_each_cause_of_waiting_links_to_the_page_about_it(store: Store, sql: Any, browser: Browser) -> None:
    first, behind = await enqueue(store, NewTask("a", ordering_key="k"), NewTask("a", ordering_key="k"))
    text, link = await why(browser, behind)
    assert text.endswith(f"goes first; it is scheduled. Task {first} scheduled")
    assert link == f"/tasks/{first}"
    await fail_for_good(store, first, {"code": 1, "message": "no"}, hold_keys=True)
    text, link = await why(browser, behind)
    assert text.endswith(f"Task {first} failed")
    assert link == f"/tasks/{first}"
    later, paused, whose, line = await enqueue(
        store, NewTask("b", delay_seconds=3600), NewTask("c/d"), NewTask("e", tenant="acme"), NewTask("f")
    )
    await browser.call("action.pause", action="c/d")
    await browser.call("tenant.pause", tenant="acme")
    assert (await why(browser, later))[1] == "/tasks?state=SCHEDULED&action=b"
    assert (await why(browser, paused))[1] == "/actions/c%2Fd"
    assert (await why(browser, whose))[1] == "/tenants/acme"
    assert (await why(browser, line))[1] == "/tasks?state=ACQUIRED"
    await sql.execute(
        """update penstock.task
           set run_at = run_at - interval '1 min', updated_at = updated_at - interval '1 min' where id = $1""",
        line,
    )
    assert (await why(browser, line))[1] == "/"
    made = await browser.call("workflow.create", chain=[{"action": "a", "name": "one"}, {"action": "b", "name": "two"}])
    last = (await browser.call("workflow.status", id=made.id)).tree[1].task_id
    assert (await why(browser, last))[1] == f"/workflows/{made.id}"
    await sql.execute(
        "update penstock.task set state = 'ACQUIRED', attempts = 1, claim = 1, claimed_at = now(), route = 'gpu' "
        "where id = $1", line,
    )  # fmt: skip
    assert (await why(browser, line))[1] == "/actions"
    for path in ("/actions/c%2Fd", "/tenants/acme", "/tasks?state=SCHEDULED&action=b"):
        await browser.get(path)


async def test_a_task_that_is_not_due_shows_its_time_and_is_run_now(store: Store, sql: Any, browser: Browser) -> None:
    one, two, done = await enqueue(store, *(NewTask("a", delay_seconds=3600) for _ in range(2)), NewTask("a"))
    await browser.call("cancel", id=done)
    run_at = (await browser.call("status", id=one)).run_at[:19]
    rows = (await browser.get("/tasks")).split("<tr ")
    assert [f'data-label="runs"><time datetime="{run_at}' in row for row in rows if f'data-key="t{one}"' in row] == [
        True
    ]
    assert "<th>Runs</th>" not in await browser.get("/tasks?state=CANCELLED")
    assert ">Run now</button>" in await browser.get(f"/tasks/{one}")
    await sql.execute("update penstock.task set state = 'ERROR', attempts = 1 where id = $1", two)
    assert ">Retry now</button>" in await browser.get(f"/tasks/{two}")
    assert await browser.do("reschedule", id=one, delay=0) == f"done: Task {one} is rescheduled"
    assert ">Run now</button>" not in await browser.get(f"/tasks/{one}")
    assert await browser.do("reschedule.selected", ids=[str(two), str(done)]) == (
        f"failed: 1 of 2 tasks due now; Task {done} is CANCELLED; it cannot be rescheduled"
    )
    assert await sql.fetchval("select run_at <= now() from penstock.task where id = $1", two)


async def test_json_is_folded_and_its_text_is_unchanged(store: Store, browser: Browser) -> None:
    payload = {
        "big": 12345678901234567890,
        "in": {"a": [1, {"b": "} {"}], "empty": {}},
        "long": list(range(60)),
        "x": "[",
    }
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    for given in (payload, [], "text", deep):
        (one,) = await enqueue(store, NewTask("a", payload=json.dumps(given)))
        shown = re.search(
            r'<pre class="json" id="payload" tabindex="0">(.*?)</pre>', await browser.get(f"/tasks/{one}"), re.DOTALL
        )
        assert shown is not None
        assert json.loads(unescape(re.sub("<[^>]*>", "", shown[1]))) == given
        assert shown[1].count("<details") == shown[1].count("</details>") <= 20
        if given is payload:
            assert shown[1].count("<details") == 5
            assert shown[1].count("<details open>") == 4


async def test_long_names_are_cut_and_whole_in_their_title(store: Store, browser: Browser) -> None:
    name = "export." * 8
    await enqueue(store, NewTask(name))
    await browser.call("schedule.create", name=name + "s", expression="@daily", action="a")
    for path, shown in (("/tasks", name), ("/actions", name), ("/schedules", name + "s")):
        assert f'<span class="cut" title="{shown}">{shown}</span>' in await browser.get(path), path


async def test_a_traced_task_leads_to_its_trace(store: Store, settings: Settings) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced, plain = await enqueue(store, NewTask("resize"), NewTask("resize"))
    async with store.session() as session:
        await session.fetch("note_traces", [traced], [f"00-{trace_id}-00f067aa0ba902b7-01"])
    linking = settings.model_copy(update={"trace_url": "https://jaeger.example.org/trace/{trace_id}?a=1&b"})
    for given, shown in ((linking, f'href="https://jaeger.example.org/trace/{trace_id}?a=1&b"'), (settings, trace_id)):
        async with running(store, given) as api:
            browser = Browser(api)
            text = unescape(await browser.get(f"/tasks/{traced}"))
            assert shown in text
            assert ("jaeger" in text) == (given is linking)
            assert "<dt>Trace</dt>" not in await browser.get(f"/tasks/{plain}")
            await browser.http.aclose()


async def test_tasks_are_found_by_state_action_label_key_and_time(store: Store, sql: Any, browser: Browser) -> None:
    one, two, three = await enqueue(
        store, NewTask("a", labels='{"tenant":"acme"}', unique_key="u"), NewTask("b", ordering_key="o"), NewTask("b")
    )
    await sql.execute("update penstock.task set created_at = now() - interval '3 days' where id = $1", one)

    async def found(query: str) -> set[int]:
        return {int(number) for number in re.findall(r'data-key="t(\d+)"', await browser.get(f"/tasks?{query}"))}

    assert await found("") == {one, two, three}
    assert await found("action=b&state=SCHEDULED") == {two, three}
    assert await found("labels=tenant%3Dacme") == {one}
    assert await found("labels=tenant%3Dother") == set()
    assert await found("key=u") == {one}
    assert await found("key=o") == {two}
    assert await found("key=o&action=a") == set()
    everything = await browser.call("list")
    newest = max(task.created_at for task in everything.tasks)
    assert await found(f"until={newest[:10]}T00:00") == {one}
    assert await found(f"since={newest[:10]}T00:00") == {two, three}


async def test_tasks_are_found_by_a_text_in_payload_or_errors_within_a_window(
    store: Store, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tasks.methods.TEXT_TASKS", 60)
    monkeypatch.setattr("penstock.api.dashboard.pages.TEXT_TASKS", 60)
    failed, plain, percent = await enqueue(
        store, NewTask("a", payload='{"order": "no 77"}'), NewTask("a", payload='{"say":"\\"Hi\\""}', tenant="acme"),
        NewTask("b", payload='{"share":"100%_"}'),
    )  # fmt: skip
    await fail_for_good(store, failed, {"code": 1, "message": "No cover", "data": {"traceback": "in charge_card"}})

    async def found(text: str, **more: str) -> tuple[list[int], str]:
        shown = await browser.get("/tasks?" + str(httpx.QueryParams({"text": text, **more})))
        return [int(number) for number in re.findall(r'data-key="t(\d+)"', shown)], shown

    assert (await found("NO 77"))[0] == [failed]
    assert (await found("charge_card", state="CRITICAL_ERROR"))[0] == [failed]
    assert (await found("charge_card", action="b"))[0] == []
    assert (await found('"order": "no'))[0] == [failed]
    assert (await found('"hi"', state="ACQUIRED"))[0] == [plain]
    assert (await found("hi", tenant="acme", key="none"))[0] == []
    assert (await found("100%_"))[0] == [percent]
    assert (await found("0_%"))[0] == []
    await enqueue(store, *(NewTask("c") for _ in range(60)))
    ids, shown = await found("no 77")
    assert ids == []
    assert "None among 60 tasks" in shown
    older = re.search(r'href="(/tasks\?[^"]*cursor=\d+)"', shown)
    assert older is not None
    assert f'data-key="t{failed}"' in await browser.get(unescape(older[1]))
    monkeypatch.setattr("penstock.tasks.methods.TEXT_SECONDS", 0)
    assert "was looked for in 60 tasks for 0 s" in await browser.get("/tasks?text=x", 400)
    assert (await found(""))[0]


async def test_the_header_finds_ids_keys_labels_and_names(store: Store, browser: Browser) -> None:
    one, two, three = await enqueue(
        store, NewTask("send-mail", unique_key="order 7"), NewTask("b", ordering_key="order 7"),
        NewTask("b", labels='{"shop":"north"}', unique_key="123456789"),
    )  # fmt: skip
    await browser.call("schedule.create", name="nightly Mail/1", expression="@daily", action="b")
    flow = await browser.call("workflow.create", name="mailing", key="w-7", chain=[{"action": "b"}])

    async def found(text: str) -> set[str]:
        shown = await browser.get("/search?" + str(httpx.QueryParams({"q": text})))
        return {unescape(link) for link in re.findall(r'<li><a href="([^"]+)"', shown)}

    assert await found("order 7") == {f"/tasks/{one}", f"/tasks/{two}"}
    assert await found("shop=north") == {f"/tasks/{three}"}
    assert await found("123456789") == {f"/tasks/{three}"}
    assert await found("MAIL") == {"/tasks?action=send-mail", "/schedules/nightly%20Mail%2F1", f"/workflows/{flow.id}"}
    assert await found("w-7") == {f"/workflows/{flow.id}"}
    assert await found("nothing") == set()
    for none_has in ("a = b", "=", "x=" + 300 * "y", 500 * "\U0001f426"):
        assert await found(none_has) == set()
    assert (await browser.http.get(f"/search?q={two}")).headers["location"] == f"/tasks/{two}"
    assert 'action="/search"' in await browser.get("/audit")


async def test_failures_are_grouped_by_fingerprint_with_first_and_last_occurrence(
    store: Store, sql: Any, browser: Browser
) -> None:
    ids = await enqueue(store, *(NewTask("a") for _ in range(3)), NewTask("b"))
    messages = ["order 7 of 0f3a77c1b2 lost", "order 12 of 0f3a77c1b3 lost", "other", "order 7 of 0f3a77c1b2 lost"]
    await fail_all(
        store, *({"code": 1, "message": "x", "data": {"type": "Lost", "message": text}} for text in messages)
    )
    await sql.execute(
        "update penstock.task_history set finished_at = finished_at - interval '1 hour' where id = $1", ids[0]
    )
    first, last = [
        await sql.fetchval("select finished_at from penstock.task_history where id = $1", one) for one in ids[:2]
    ]
    page = await browser.get("/failures")
    rows = page.split("<tr ")[1:]
    assert len(rows) == 3
    assert re.findall(r'datetime="([^"]{19})', rows[0]) == [f"{at:%Y-%m-%dT%H:%M:%S}" for at in (first, last)]
    assert f'href="/tasks/{ids[1]}"' in rows[0]
    group = re.search(r'href="(/failures\?fingerprint=\w+)">2<', rows[0])
    assert group is not None
    alone = await browser.get(group[1])
    assert [f'href="/tasks/{one}"' in alone for one in ids] == [True, True, False, False]
    assert group[1] in await browser.get("/")


async def test_failures_that_differ_in_numbers_alone_are_one_group(store: Store, sql: Any) -> None:
    errors = [
        {"message": "card 7 declined", "data": {"type": "E", "message": "E: card 7 declined"}},
        {"message": "E: card 12 declined", "data": {"type": "E"}},
        {"message": ""},
        {},
    ]
    ids = await enqueue(store, NewTask("a"), NewTask("a"), NewTask("b"), NewTask("b"))
    await fail_all(store, *({"code": 1} | error for error in errors))
    rows = await sql.fetch(SQL["read_failure_groups"], 100, None)
    assert [(row["action"], row["kind"], row["message"], row["ids"]) for row in rows] == [
        ("b", None, "no message", [ids[3], ids[2]]), ("a", "E", "card 12 declined", [ids[1], ids[0]]),
    ]  # fmt: skip


async def test_processes_are_told_apart_by_machine_and_number(database_url: str, sql: Any) -> None:
    names = ("api@web-1:7", "api@web-1:7-listen", "api@web-1:8", "scheduler", "?", "kafka-source@web-1:9")
    opened = [
        await asyncpg.connect(database_url, server_settings={"application_name": f"penstock-{name}"}) for name in names
    ]
    try:
        rows = await sql.fetch(SQL["read_connections"])
        began = "select backend_start from pg_stat_activity where pid = pg_backend_pid()"
        starts = [await connection.fetchval(began) for connection in opened]
    finally:
        for connection in opened:
            await connection.close()
    assert [(row["process"], row["host"], row["pid"], row["since"]) for row in rows if row["host"] == "web-1"] == [
        ("api", "web-1", "7", min(starts[:2])), ("api", "web-1", "8", starts[2]),
        ("kafka-source", "web-1", "9", starts[-1]),
    ]  # fmt: skip
    assert [(row["pid"], row["since"]) for row in rows if row["process"] == "scheduler"] == [("", starts[3])]
    assert "?" not in {row["process"] for row in rows}


async def test_pages_of_tasks_go_on_where_the_one_before_ended(store: Store, browser: Browser) -> None:
    ids = await enqueue(store, *(NewTask("a") for _ in range(60)))
    first = await browser.get("/tasks")
    cursor = re.search(r'href="/tasks\?cursor=(\d+)"', first)
    assert cursor is not None
    second = await browser.get(f"/tasks?cursor={cursor[1]}")
    seen = [int(number) for text in (first, second) for number in re.findall(r'data-key="t(\d+)"', text)]
    assert seen == sorted(ids, reverse=True)


@pytest.mark.parametrize("query", [
    "state=NONE", "cursor=x", "cursor=-1", "key=%00", "action=%00", "labels=%00%3D%00", "since=yesterday", "id=%FF",
    "q=%00", "q=0", "q=%3D", "q=%3Cscript%3E%3D1", "q=" + "7" * 30, "text=%00%25_", "fingerprint=%3Cscript%3E",
    "since=9999-99-99T00:00", "until=0001-01-01T00:00", "state=SUCCESS&state=ERROR", "%00=%00", "key=" + "x" * 5000,
    "id=99999999999999999999999", "cursor=9223372036854775808", "limit=" + "9" * 310,
    "operation=%3Cscript%3E&count=yes",
])  # fmt: skip
async def test_junk_in_a_query_is_answered_by_a_page(browser: Browser, query: str) -> None:
    for path in ("/", "/tasks", "/schedules", "/workflows", "/rejected", "/bulk", "/keys", "/audit", "/queues",
                 "/failures", "/search"):  # fmt: skip
        answer = await browser.http.get(f"{path}?{query}")
        assert answer.status_code in (200, 303, 400), (path, answer.status_code, answer.text[-500:])
        assert "<script>" not in answer.text
    assert (await browser.http.get("/tasks/99999999999999999999999999")).status_code == 400
    assert (await browser.http.get("/tasks/%00")).status_code == 400


async def test_hostile_values_are_shown_and_never_run(store: Store, browser: Browser) -> None:
    payload = json.dumps({"x": HOSTILE})
    (one,) = await enqueue(
        store,
        NewTask(
            HOSTILE,
            payload=payload,
            unique_key=HOSTILE,
            ordering_key=HOSTILE,
            labels=json.dumps({HOSTILE: HOSTILE}),
        ),
    )
    error = {"code": 1, "message": HOSTILE, "data": {"type": HOSTILE, "traceback": HOSTILE, HOSTILE: [HOSTILE]}}
    await fail_for_good(store, one, error)
    await store_rejected(store, HOSTILE)
    await browser.call("schedule.create", name=HOSTILE, expression="@daily", action=HOSTILE, payload={"x": HOSTILE})
    made = await browser.call(
        "workflow.create", name=HOSTILE, steps=[{"name": HOSTILE.replace("/", ""), "action": HOSTILE}]
    )
    await browser.call("action.pause", action=HOSTILE)
    await browser.call("keys.create", name=HOSTILE, permissions=["read"])
    schedule = re.search(r'href="(/schedules/[^"]+)"', await browser.get("/schedules"))
    assert schedule is not None
    for path in ("/", "/tasks", f"/tasks/{one}", f"/tasks/{one}/edit", "/schedules", schedule[1], "/workflows",
                 f"/workflows/{made.id}", "/actions", "/keys", "/audit", "/queues", "/rejected", "/rejected/1",
                 "/bulk?operation=bulk.retry&count=yes&action=" + httpx.QueryParams({"a": HOSTILE})["a"]):  # fmt: skip
        text = await browser.get(path)
        assert "<script>" not in text, path
        assert "<img src=x" not in text, path
        assert "&amp;49" not in text, path
    assert HOSTILE in unescape(await browser.get(f"/tasks/{one}"))


async def store_rejected(store: Store, body: str) -> None:
    async with store.session() as session:
        await enqueuing.insert_rejected(session, "inbound", [(body, f"no JSON: {body}")])


# What keeps a page a page


async def test_every_answer_forbids_what_is_not_ours_and_holds_no_inline_script_or_style(
    store: Store, browser: Browser
) -> None:
    (one,) = await enqueue(store, NewTask("a"))
    for path in ("/", "/tasks", f"/tasks/{one}", f"/tasks/{one}/edit", "/keys", "/nothing-there", "/tasks/0",
                 "/assets/app.js", "/assets/none"):  # fmt: skip
        answer = await browser.http.get(path)
        if path != "/nothing-there":
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        if "html" in answer.headers.get("content-type", ""):
            assert answer.headers["cache-control"] == "no-store"
            assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! src=\"/assets/)", answer.text)


async def test_assets_are_kept_by_the_browser_as_long_as_they_are_the_same(browser: Browser) -> None:
    text = await browser.get("/")
    for path in re.findall(r'(?:href|src)="(/assets/[^"]+)"', text):
        answer = await browser.http.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert (await browser.http.get("/assets/app.js?v=old")).headers["cache-control"] == "no-cache"
    assert not re.search(r"(?:src|href)=\"https?:", text)


async def test_programs_are_still_answered_by_the_card_at_the_root(browser: Browser) -> None:
    card = await browser.http.get("/", headers={"Accept": "*/*"})
    assert card.json()["rpc"] == "/rpc"


async def test_without_the_dashboard_there_is_none(store: Store, settings: Settings) -> None:
    async with (
        running(store, settings.model_copy(update={"dashboard": False})) as api,
        httpx.AsyncClient(base_url=api.url, headers=HTML) as http,
    ):
        assert (await http.get("/")).json()["name"] == "penstock"
        assert (await http.get("/tasks")).status_code == 404


# What a form must be


async def test_a_form_of_another_origin_or_without_the_token_changes_nothing(store: Store, browser: Browser) -> None:
    (one,) = await enqueue(store, NewTask("a"))
    csrf = await browser.csrf()
    good = {"csrf": csrf, "method": "cancel", "id": str(one), "back": "/"}
    own = str(browser.http.base_url).rstrip("/")
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for data, headers, status in (
        ({**good, "csrf": ""}, {"Origin": own}, 403),
        ({**good, "csrf": "0" * 64}, {"Origin": own}, 403),
        ({**good, "csrf": "é"}, {"Origin": own}, 403),
        (good, {"Origin": "http://evil.example"}, 403),
        (good, {"Origin": "null"}, 403),
        (good, {"Sec-Fetch-Site": "cross-site"}, 403),
        (good, {"Sec-Fetch-Site": "same-site"}, 403),
        (good, {"Host": "evil.example"}, 403),
    ):
        answer = await browser.http.post("/do", data=data, headers={**form, **headers})
        assert answer.status_code == status, (headers, answer.status_code)
    stranger = httpx.AsyncClient(base_url=browser.http.base_url)
    assert (await stranger.post("/do", data=good, headers={"Origin": own})).status_code == 403
    await stranger.aclose()
    assert (await browser.http.post("/do", json=good)).status_code == 400
    assert (await browser.http.get("/do")).status_code == 405
    assert (await browser.call("status", id=one)).state == "SCHEDULED"
    assert await browser.do("cancel", id=one) == f"done: Task {one} is cancelled"


async def test_a_page_is_left_for_none_but_our_own(browser: Browser) -> None:
    csrf = await browser.csrf()
    for back in (
        "//evil.example/",
        "https://evil.example/",
        "/\\evil.example",
        "\\\\evil",
        "/a\r\nSet-Cookie: x=1",
        "",
    ):
        answer = await browser.http.post("/do", data={"csrf": csrf, "method": "cancel", "id": "1", "back": back})
        assert answer.headers["location"] == "/", back


async def test_the_dashboard_of_an_open_api_is_for_this_machine_alone(browser: Browser) -> None:
    answer = await browser.http.get("/", headers={"Host": "rebound.example"})
    assert answer.status_code == 403
    assert "Only loopback hosts" in answer.text


# What is done


async def test_everything_that_a_form_can_ask_for_is_a_method_that_is_audited() -> None:
    assert all(METHODS[name].audited for name in FORM_ACTIONS)


async def test_a_task_is_cancelled_retried_rescheduled_and_told_where_that_cannot_be(
    store: Store, browser: Browser
) -> None:
    (one,) = await enqueue(store, NewTask("a"))
    assert (await browser.do("retry", id=one)).startswith(f"failed: Task {one} is SCHEDULED")
    assert await browser.do("reschedule", id=one, delay=60, priority=7) == f"done: Task {one} is rescheduled"
    task = await browser.call("status", id=one)
    assert task.priority == 7
    assert (await browser.do("reschedule", id=one, delay="soon")).startswith(
        "failed: Invalid params: delay must be a n"
    )
    assert (await browser.do("reschedule", id=one, delay="nan")).startswith("failed: Invalid params: delay")
    assert await browser.do("cancel", id=one, reason="not needed") == f"done: Task {one} is cancelled"
    assert "not needed" in await browser.get(f"/tasks/{one}")
    assert await browser.do("retry", id=one) == f"done: Task {one} runs again"
    assert (await browser.do("cancel", id="7" * 18)).startswith("failed: No such task: 7777")
    assert (await browser.do("no.such.thing")).startswith("failed: Unknown form method")
    assert (await browser.do("rpc.discover")).startswith("failed: Unknown form method")
    assert (await history(browser))[:2] == [
        ("dashboard", "cancel", "No such task: 777777777777777777"), ("dashboard", "retry", "ok"),
    ]  # fmt: skip


async def test_ticked_tasks_are_changed_one_by_one(store: Store, browser: Browser) -> None:
    ids = await enqueue(store, *(NewTask("a") for _ in range(3)))
    assert await browser.do("cancel.selected", ids=[str(task_id) for task_id in ids]) == "done: 3 of 3 tasks cancelled"
    said = await browser.do("retry.selected", ids=[str(ids[0]), "0"])
    assert said.startswith("failed: 1 of 2 tasks retried; No such task: 0")
    assert (await browser.do("cancel.selected")).startswith("failed: Invalid params: ids must not be empty")


async def test_an_edited_task_is_a_new_one_and_takes_over_the_key(store: Store, browser: Browser) -> None:
    (one,) = await enqueue(store, NewTask("a", payload='{"n":1}', unique_key="k", labels='{"x":"y"}', priority=3))
    page = await browser.get(f"/tasks/{one}/edit")
    assert "&#34;n&#34;: 1" in page
    fields = {"id": one, "action": "a", "payload": '{"n": 18446744073709551617}', "priority": "3", "unique_key": "k",
              "labels": '{"x":"y"}', "max_attempts": "10"}  # fmt: skip
    assert (await browser.do("enqueue", **fields)).startswith(f"failed: Task {one} already has this unique key")
    said = await browser.do("enqueue", **fields, cancel="yes")
    made = int(said.rsplit(" ", 1)[1])
    task = await browser.call("status", id=made, detail=True)
    assert (bytes(task.payload), task.unique_key, task.priority) == (b'{"n":18446744073709551617}', "k", 3)
    assert (await browser.call("status", id=one)).state == "CANCELLED"


async def test_a_task_whose_payload_cannot_be_shown_is_not_edited(store: Store, sql: Any, browser: Browser) -> None:
    gone, unread = await enqueue(store, NewTask("a", payload='{"n":1}'), NewTask("a"))
    await browser.call("cancel", id=gone)
    await sql.execute("update penstock.task_history set payload = '{}', payload_gone = true where id = $1", gone)
    sealed = PayloadCodec(load_settings(payload_keys=new_key())).encode('{"n":1}', payload_aad("a", None))
    await sql.execute("update penstock.task set payload = $2 where id = $1", unread, sealed)
    for task, why in ((gone, "gone (PENSTOCK_PAYLOAD_RETENTION_SECONDS)"), (unread, "unavailable (not shown: ")):
        assert "/edit" not in await browser.get(f"/tasks/{task}")
        page = await browser.get(f"/tasks/{task}/edit", 409)
        assert f"it cannot be edited, as its payload is {why}" in unescape(page)
        assert "<textarea" not in page


@pytest.mark.parametrize(("field", "value", "said"), [
    ("payload", "{", "payload is not JSON"), ("payload", "[1,2", "payload is not JSON"), ("labels", "no", "labels"),
    ("labels", '{"a":1e999}', "labels"),
    ("action", "", "action"), ("priority", "x", "priority must be a whole number"),
    ("max_attempts", "0", "max_attempts"),
])  # fmt: skip
async def test_an_edit_that_is_wrong_is_shown_again_with_what_was_typed(
    store: Store, browser: Browser, field: str, value: str, said: str
) -> None:
    (one,) = await enqueue(store, NewTask("a"))
    data = {"csrf": await browser.csrf(), "method": "enqueue", "back": "/", "id": str(one), "action": "a",
            "payload": '{"kept": "yes"}', "labels": "{}", "cancel": "yes", field: value}  # fmt: skip
    answer = await browser.http.post("/do", data=data)
    assert answer.status_code == 422
    assert said in answer.text
    if field != "payload":
        assert "kept" in answer.text
    assert (await browser.call("status", id=one)).state == "SCHEDULED"


async def test_an_edit_that_would_be_refused_leaves_the_old_task_alone(store: Store, settings: Settings) -> None:
    admin = [Permission.ADMIN]
    async with store.session() as session:
        anyone = await create_key(session, CreateKey("anyone", admin))
        limited = await create_key(session, CreateKey("limited", admin, actions=("a",)))
        bound = await create_key(session, CreateKey("bound", admin, tenant="acme"))
    params = {"action": "a", "worker": "w:1", "params": {"type": "object", "required": ["url"]}}
    announced = json.dumps({"jsonrpc": "2.0", "method": "announce", "params": params})
    async with store.transaction() as session:
        await apply_reports(session, decode_reports(announced, batch_limit=1), settings)
    async with running(store, settings.model_copy(update={"api_require_keys": True, "check_payloads": True})) as api:
        for key, tenant, edit, said in (
            (limited, None, {"action": "b"}, "may not enqueue"),
            (bound, "acme", {"tenant": "other"}, "to which this API key is bound"),
            (anyone, None, {"payload": "{}"}, "payload.url is missing"),
        ):
            (one,) = await enqueue(store, NewTask("a", tenant=tenant))
            browser = Browser(api)
            assert key is not None
            await sign_in(browser, key.key)
            data = {"csrf": await browser.csrf("/tasks"), "method": "enqueue", "back": "/", "id": str(one),
                    "action": "a", "payload": '{"url":"u"}', "labels": "{}", "cancel": "yes", **edit}  # fmt: skip
            answer = await browser.http.post("/do", data=data)
            assert (answer.status_code, said in unescape(answer.text)) == (422, True)
            assert (await browser.call("status", id=one)).state == "SCHEDULED"
            await browser.http.aclose()


async def test_a_schedule_that_was_stopped_is_started_again(browser: Browser, store: Store) -> None:
    await browser.call("schedule.create", name="s", expression="@daily", action="a")
    async with store.session() as session:
        (row,) = await session.fetch("read_schedules", ["s"], None)
        await session.fetch("stop_clock", row["id"], "the zone is gone")
    for path in ("/schedules", "/schedules/s"):
        page = await browser.get(path)
        assert ("schedule.resume" in page, "schedule.pause" in page) == (True, False)
    assert await browser.do("schedule.resume", name="s") == "done: Schedule s is resumed"
    assert "schedule.pause" in await browser.get("/schedules/s")


async def test_schedules_are_paused_resumed_run_and_deleted(browser: Browser) -> None:
    await browser.call("schedule.create", name="a/b c", expression="@daily", action="a")
    assert await browser.do("schedule.pause", name="a/b c") == "done: Schedule a/b c is paused"
    assert "paused" in await browser.get("/schedules/a%2Fb%20c")
    assert await browser.do("schedule.resume", name="a/b c") == "done: Schedule a/b c is resumed"
    assert (await browser.do("schedule.run_now", name="a/b c")).startswith("done: Task ")
    assert "by hand" in await browser.get("/schedules/a%2Fb%20c")
    assert await browser.do("schedule.delete", name="a/b c") == "done: Schedule a/b c is deleted"
    await browser.call("schedule.create", name="one", expression="@daily", action="a", overlap="skip")
    assert (await browser.do("schedule.run_now", name="one")).startswith("done: Task ")
    assert await browser.do("schedule.run_now", name="one") == "done: Skipped: its last task is not settled"


async def test_names_that_differ_in_a_blank_are_two(browser: Browser) -> None:
    for name in ("x", "x "):
        await browser.call("schedule.create", name=name, expression="@daily", action="a")
    assert await browser.do("schedule.pause", name="x ") == "done: Schedule x  is paused"
    assert (await browser.call("schedule.get", name="x")).paused is False
    assert "Resume" in await browser.get("/schedules/x%20")


async def test_a_form_leads_back_to_the_page_of_any_name(browser: Browser) -> None:
    page = "/tenants/" + quote("Müller 100%41?#", safe="")
    text = await browser.get(page)
    back, csrf = (re.search(f'name="{name}" value="([^"]+)"', text) for name in ("back", "csrf"))
    assert back is not None
    assert csrf is not None
    form = {"csrf": csrf[1], "method": "tenant.pause", "tenant": "Müller 100%41?#", "back": unescape(back[1])}
    answer = await browser.http.post("/do", data=form)
    assert 'Müller 100%41?#</h1><span class="badge s-paused">' in await browser.get(answer.headers["location"])


async def test_a_process_with_an_impossible_url_hides_no_other() -> None:
    probe = ProcessProbe(["one=http://1.2.3.999", f"two=http://127.0.0.1:{free_port()}"])
    await probe.probe()
    assert [(one.ready, one.text) for one in probe.latest()] == [(False, "InvalidURL"), (False, "ConnectError")]


async def test_workflows_are_drawn_cancelled_and_retried(browser: Browser) -> None:
    made = await browser.call("workflow.create", chain=[{"action": "a", "name": "one"}, {"action": "b", "name": "two"}])
    page = await browser.get(f"/workflows/{made.id}")
    assert page.count('<g class="node s-') == 2
    assert page.count('class="edge"') == 1
    assert await browser.do("workflow.cancel", id=made.id) == f"done: Workflow {made.id} is cancelled"
    assert (await browser.do("workflow.retry", id=made.id)).startswith(f"done: Workflow {made.id}:")


async def test_a_wide_fan_out_is_one_node_that_opens_and_the_graph_is_zoomed(browser: Browser) -> None:
    fan = [{"action": "resize", "name": f"part-{number}"} for number in range(30)]
    made = await browser.call(
        "workflow.create", chain=[{"action": "a", "name": "one"}, fan, {"action": "b", "name": "two"}]
    )

    async def shown(query: str = "") -> tuple[str, int, float]:
        page = await browser.get(f"/workflows/{made.id}{query}")
        width = re.search(r'<svg class="graph[^"]*" width="(\d+)"', page)
        assert width is not None
        return page, page.count('<g class="node'), float(width[1])

    page, nodes, width = await shown()
    assert nodes == 3
    assert page.count('class="edge"') == 2
    assert "30 × resize: 30 waiting" in page
    assert page.count('data-key="n') == 32
    opening = re.search(r'<a href="(\?open=\d+)"><g class="node fan', page)
    assert opening is not None
    assert (await shown(opening[1]))[1] == (await shown("?open=all"))[1] == 32
    assert "Collapse alike steps" in (await shown("?open=all"))[0]
    assert (await shown("?zoom=200"))[1:] == (3, 2 * width)
    assert (await shown("?zoom=7&open=x"))[1:] == (3, width)


async def test_a_failed_workflow_shows_the_errors_of_its_steps(
    store: Store, settings: Settings, browser: Browser
) -> None:
    made = await browser.call(
        "workflow.create", steps=[{"action": "a", "name": name, "max_attempts": 1} for name in ("one", "two")]
    )
    assert 'id="errors"' not in await browser.get(f"/workflows/{made.id}")
    task_id = (await browser.call("workflow.status", id=made.id)).tree[1].task_id
    error = {"code": 1, "message": "no", "data": {"type": "CardDeclined", "message": "no cover", "traceback": "line 7"}}
    await fail_for_good(store, task_id, error)
    async with store.transaction() as session:
        await advance_workflows(session, [made.id], settings)
    page = await browser.get(f"/workflows/{made.id}")
    errors = page[page.index('id="errors"') : page.index('class="graphbox"')]
    for part in ("of 1 failed step<", "two", "CardDeclined: no cover", "line 7", f'href="/tasks/{task_id}"'):
        assert part in errors, part


async def test_actions_are_limited_and_paused(browser: Browser) -> None:
    assert await browser.do("action.pause", action="a") == "done: Action a is paused"
    assert "paused" in await browser.get("/actions")
    assert await browser.do("action.resume", action="a") == "done: Action a is resumed"
    assert await browser.do("action.set", action="a", max_in_flight="3", rate="0.5") == "done: Limits of a are set"
    limits = await browser.call("action.get", action="a")
    assert (limits.max_in_flight, limits.rate) == (3, 0.5)
    assert await browser.do("action.set", action="a", max_in_flight="", rate="0.5") == "done: Limits of a are set"
    assert (await browser.call("action.get", action="a")).max_in_flight is None


async def test_a_bulk_operation_is_counted_before_it_is_made_a_job(store: Store, browser: Browser) -> None:
    await enqueue(store, *(NewTask("a") for _ in range(7)), NewTask("b"))
    page = await browser.get("/bulk?operation=bulk.cancel&action=a&count=yes")
    assert "7 tasks would be cancelled" in page
    assert (await browser.call("job.list")).jobs == []
    assert (await browser.do("bulk.cancel", action="a")).startswith("done: Job ")
    (job,) = (await browser.call("job.list")).jobs
    assert job.params["action"] == "a"
    assert "running" in await browser.get(f"/jobs/{job.id}")
    assert await browser.do("job.cancel", id=job.id) == f"done: Job {job.id} is cancelled"
    assert "give at least one filter" in unescape(await browser.get("/bulk?operation=bulk.cancel&count=yes"))


async def test_a_bulk_operation_is_not_counted_again_by_each_update_of_its_page(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[object] = []
    preview = bulk.preview

    async def noting(*args: Any) -> answers.BulkPreview:
        counts.append(args)
        return await preview(*args)

    monkeypatch.setattr(bulk, "preview", noting)
    path = "/bulk?operation=bulk.cancel&action=a&count=yes"
    await browser.get(path)
    async with browser.http.stream("GET", path, headers={"Accept": "text/event-stream"}) as response:
        assert "No jobs." in await anext(events(response))
    assert len(counts) == 1


async def test_rejected_messages_are_read_again_and_deleted(store: Store, browser: Browser) -> None:
    await store_rejected(store, '{"jsonrpc":"2.0","method":"submit:a","params":{}}')
    await store_rejected(store, "junk")
    assert (await browser.do("rejected.retry", id=1)) == "done: 1 messages accepted"
    assert (await browser.do("rejected.retry", limit=10)).startswith("done: 0 messages accepted; 1 still rejected")
    assert (await browser.do("rejected.purge", limit=10)) == "done: 1 messages deleted"


async def test_dead_letters_are_looked_at_sent_again_and_deleted(
    browser: Browser, transport: SqsTransport, settings: Settings
) -> None:
    dead: SqsQueue = transport.queue(settings.inbound_queue + DEAD_LETTER_SUFFIX, label="inbound" + DEAD_LETTER_SUFFIX)
    await dead.send([Outgoing('{"jsonrpc":"2.0","method":"submit:a","params":{}}'), Outgoing("junk")])
    page = await browser.get("/queues/inbound/dead")
    ids = re.findall(r'href="/queues/inbound/dead/([^"]+)"', page)
    assert len(ids) == 2
    assert "Body" in await browser.get(f"/queues/inbound/dead/{ids[0]}")
    assert (await browser.do("dlq.replay", queue="inbound", limit=10, force="yes")).startswith("done: ")
    assert "deleted" in await browser.do("dlq.purge", queue="inbound", limit=10)
    assert (await browser.http.get("/queues/none/dead")).status_code == 400


async def test_a_key_is_shown_once_and_revoked(browser: Browser) -> None:
    data = {"csrf": await browser.csrf(), "method": "keys.create", "name": "one", "permission": ["read", "enqueue"]}
    answer = await browser.http.post("/do", data=data)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    secret = re.search(r"pstk_[\w-]+", answer.text)
    assert secret is not None
    (key,) = (await browser.call("keys.list")).keys
    assert set(key.permissions) == {"read", "enqueue"}
    assert secret[0] not in await browser.get("/keys")
    assert secret[0] not in await browser.get("/audit")
    assert await browser.do("keys.revoke", id=key.id) == "done: Key one is revoked"
    assert "revoked" in await browser.get("/keys?revoked=yes")


# Who did what


async def test_what_is_done_over_rpc_is_noted_with_the_key_and_without_payloads(
    store: Store, settings: Settings
) -> None:
    keyed = settings.model_copy(update={"api_require_keys": True})
    async with store.session() as session:
        made = await create_key(session, CreateKey("ada", [Permission.ADMIN]))
    assert made is not None
    (one,) = await enqueue(store, NewTask("a"))
    async with running(store, keyed) as api:
        calls = [
            {"jsonrpc": "2.0", "method": "cancel", "params": {"id": one}, "id": 1},
            {"jsonrpc": "2.0", "method": "cancel", "params": {"id": one}, "id": 2},
            {"jsonrpc": "2.0", "method": "enqueue", "params": {"action": "a"}, "id": 3},
            {"jsonrpc": "2.0", "method": "bulk.cancel", "params": {"all": True, "dry_run": True}, "id": 4},
            {"jsonrpc": "2.0", "method": "schedule.create", "id": 5,
             "params": {"name": "s", "expression": "@daily", "action": "a", "payload": {"secret": "hush"}}},
            {"jsonrpc": "2.0", "method": "schedule.create", "id": 6,
             "params": ["t", "@daily", "a", {"secret": "hush"}]},
        ]  # fmt: skip
        async with httpx.AsyncClient(base_url=api.url, headers={"X-API-Key": made.key}) as http:
            answers = (await http.post("/rpc", json=calls)).json()
            assert [("error" in answer) for answer in answers].count(True) == 1
            await api._methods.audit.drain()
            listed = (await http.post("/rpc", json={"jsonrpc": "2.0", "method": "audit.list", "id": 1})).json()
    entries = listed["result"]["audit"]
    assert sorted((one["method"], one["who"], one["door"]) for one in entries) == [
        ("cancel", "ada", "http"), ("cancel", "ada", "http"), *[("schedule.create", "ada", "http")] * 2,
    ]  # fmt: skip
    assert sorted(one["outcome"] == "ok" for one in entries) == [False, True, True, True]
    assert "hush" not in json.dumps(entries)


async def test_nothing_is_done_that_cannot_be_noted(store: Store, sql: Any, browser: Browser) -> None:
    (one,) = await enqueue(store, NewTask("a"))
    csrf = await browser.csrf()
    await sql.execute("alter table penstock.audit rename to audit_gone")
    answer = await browser.http.post("/do", data={"csrf": csrf, "method": "cancel", "id": str(one), "back": "/"})
    assert answer.status_code == 503
    await sql.execute("alter table penstock.audit_gone rename to audit")
    assert (await browser.call("status", id=one)).state == "SCHEDULED"


# Signing in


@pytest.fixture
async def keyed(store: Store, settings: Settings) -> AsyncIterator[tuple[Browser, dict[str, str]]]:
    """The dashboard of an api that asks for keys, and a key of each permission; and one that is bound to a tenant."""
    secrets = {}
    async with store.session() as session:
        permissions = [Permission.ADMIN, Permission.ENQUEUE, Permission.READ]
        bound = await create_key(session, CreateKey("bound", permissions, tenant="acme"))
    assert bound is not None
    secrets["bound"] = bound.key
    for permission in Permission:
        async with store.session() as session:
            made = await create_key(session, CreateKey(permission.value, [permission]))
        assert made is not None
        secrets[permission.value] = made.key
    async with running(store, settings.model_copy(update={"api_require_keys": True})) as api:
        made_browser = Browser(api)
        yield made_browser, secrets
        await made_browser.http.aclose()


async def sign_in(browser: Browser, key: str, there: str = "/") -> httpx.Response:
    csrf = await browser.csrf("/login")
    return await browser.http.post("/login", data={"csrf": csrf, "key": key, "next": there})


async def test_where_keys_are_asked_for_every_page_leads_to_the_sign_in(
    keyed: tuple[Browser, dict[str, str]],
) -> None:
    browser, secrets = keyed
    for path in ("/", *(page.path for page in PAGES)):
        answer = await browser.http.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=")
    refused = await sign_in(browser, "pstk_wrong")
    assert refused.status_code == 401
    assert "This key is not valid" in refused.text
    assert (await sign_in(browser, secrets["enqueue"])).status_code == 401
    assert (await browser.http.get("/", headers={"Accept": "text/event-stream"})).status_code == 401
    entered = await sign_in(browser, secrets["admin"], "/tasks?state=ERROR")
    assert (entered.status_code, entered.headers["location"]) == (303, "/tasks?state=ERROR")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert secrets["admin"] not in entered.headers["set-cookie"]
    await browser.get("/tasks")


async def test_a_session_is_new_at_each_sign_in_and_over_after_the_sign_out(
    keyed: tuple[Browser, dict[str, str]], sql: Any
) -> None:
    browser, secrets = keyed
    await browser.http.get("/login")
    before = browser.http.cookies["penstock_session"]
    await sign_in(browser, secrets["admin"])
    token = browser.http.cookies["penstock_session"]
    assert token != before
    assert token.encode() not in (await sql.fetchval("select token_hash from penstock.dashboard_session"))
    csrf = await browser.csrf()
    assert (await browser.http.post("/logout", data={"csrf": csrf})).headers["location"] == "/login"
    browser.http.cookies.set("penstock_session", token)
    assert (await browser.http.get("/")).status_code == 303
    assert await sql.fetchval("select count(*) from penstock.dashboard_session") == 0


async def test_a_session_that_is_over_hides_no_key(keyed: tuple[Browser, dict[str, str]]) -> None:
    browser, secrets = keyed
    browser.http.cookies.set("penstock_session", "x" * 43)
    assert (await browser.http.get("/tasks/1/payload")).status_code == 401
    assert (await browser.http.get("/tasks/1/payload", headers={"X-API-Key": secrets["read"]})).status_code == 404


async def test_a_session_ends_with_its_time_and_with_its_key(
    keyed: tuple[Browser, dict[str, str]], sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser, secrets = keyed
    await sign_in(browser, secrets["admin"])
    await browser.get("/")
    await sql.execute("update penstock.dashboard_session set expires_at = now() - interval '1 second'")
    assert (await browser.http.get("/")).status_code == 303
    await sign_in(browser, secrets["read"])
    await browser.get("/")
    await sql.execute("update penstock.api_key set revoked_at = now() where name = 'read'")
    async with asyncio.timeout(60):
        while (await browser.http.get("/")).status_code == 200:
            await asyncio.sleep(api_keys.REFRESH_SECONDS / 4)


async def test_who_may_read_sees_no_buttons_and_is_refused_what_changes_things(
    keyed: tuple[Browser, dict[str, str]], store: Store
) -> None:
    browser, secrets = keyed
    (one,) = await enqueue(store, NewTask("a"))
    await sign_in(browser, secrets["read"])
    for path in ("/", "/tasks", f"/tasks/{one}", "/actions", "/schedules", "/queues", "/bulk", "/rejected", "/tenants",
                 "/tenants/acme"):  # fmt: skip
        assert 'action="/do"' not in await browser.get(path), path
    for path in ("/keys", "/audit", f"/tasks/{one}/edit"):
        await browser.get(path, 403)
    csrf = await browser.csrf("/")
    for method in (*FORM_ACTIONS, "enqueue", "keys.create", "cancel.selected"):
        fields = {"id": str(one), "name": "s", "action": "a", "queue": "inbound", "key": "k", "payload": "{}",
                  "permission": "read", "tenant": "t", "ids": str(one), "all": "yes", "delay": "1"}  # fmt: skip
        answer = await browser.http.post("/do", data={"csrf": csrf, "method": method, "back": "/", **fields})
        assert answer.status_code in (303, 422), method
        if answer.status_code == 303:
            assert "may not" in unescape(await browser.get(answer.headers["location"])), method
    assert (await browser.call("status", id=one)).state == "SCHEDULED"
    assert (await browser.call("job.list")).jobs == []


# Live


async def events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: ")).get("html", "")


async def test_a_page_that_is_open_is_sent_what_has_changed(store: Store, browser: Browser) -> None:
    await enqueue(store, NewTask("a"))
    async with asyncio.timeout(60):
        async with browser.http.stream("GET", "/tasks", headers={"Accept": "text/event-stream"}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-accel-buffering"] == "no"
            found = events(response)
            first = await anext(found)
            assert first.count('data-key="t') == 1
            assert "<html" not in first
            await enqueue(store, NewTask("a"))
            assert (await anext(found)).count('data-key="t') == 2


async def test_an_overview_that_takes_long_to_count_is_shown_in_part_and_its_rest_follows(
    store: Store, browser: Browser, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "FIRST_WITHIN_SECONDS", 0.05)
    await enqueue(store, NewTask("a"))
    async with sql.transaction():
        await sql.execute("lock table penstock.action in access exclusive mode")  # of which the lag is read
        first = await browser.get("/")
        assert "The rest is being counted" in first
        assert "The last hour" not in first
        assert "badge s-active" in first  # the processes, all the same
    async with browser.http.stream("GET", "/", headers={"Accept": "text/event-stream"}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                whole = json.loads(line.removeprefix("data: "))["html"]
                break
    assert "The rest is being counted" not in whole
    assert "The last hour" in whole
    assert "The last hour" in await browser.get("/")


async def test_an_overview_that_is_read_while_the_api_stops_is_said_to_be_unavailable(
    store: Store, settings: Settings, sql: Any
) -> None:
    async with (
        running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=HTML) as http, sql.transaction(),
    ):  # fmt: skip
        await sql.execute("lock table penstock.action in access exclusive mode")
        page = asyncio.create_task(http.get("/"))
        while not await sql.fetchval("select count(*) from pg_locks where not granted"):
            await asyncio.sleep(0.01)
        api.stop()
        assert (await page).status_code == 503
        while any(task.get_name() == "http" for task in asyncio.all_tasks()):  # the end of its server is no failure
            await asyncio.sleep(0.05)


async def test_an_overview_that_could_not_be_counted_is_counted_anew(browser: Browser, sql: Any) -> None:
    await sql.execute("alter table penstock.tally rename to elsewhere")
    await browser.get("/", 503)
    await sql.execute("alter table penstock.elsewhere rename to tally")
    assert "The last hour" in await browser.get("/")


async def test_processes_without_a_database_are_asked_whether_they_are_ready(store: Store, settings: Settings) -> None:
    health = Health("worker")
    server = serve_health([health], "127.0.0.1", 0)
    gone = f"http://127.0.0.1:{free_port()}"
    asked = settings.model_copy(
        update={"dashboard_processes": (f"worker-1={server.url}", f"worker-2={gone}", server.url)}
    )
    probe = ProcessProbe(asked.dashboard_processes)
    try:
        assert [one.ready for one in probe.latest()] == [None] * 3
        await probe.probe()
        assert [tuple(one) for one in probe.latest()] == [
            ("worker-1", server.url, False, "starting"), ("worker-2", gone, False, "ConnectError"),
            ("", server.url, False, "starting"),
        ]  # fmt: skip
        health.succeeded()
        async with running(store, asked) as api, httpx.AsyncClient(base_url=api.url, headers=HTML, timeout=60) as http:
            deadline = time.monotonic() + 60
            while (found := re.findall(r'badge s-(\w+)">(worker-1|worker-2|process)<', (await http.get("/")).text)) != [
                ("active", "worker-1"), ("failed", "worker-2"), ("active", "process"),
            ]:  # fmt: skip
                assert time.monotonic() < deadline, found
                await asyncio.sleep(0.2)
    finally:
        assert probe.probing is not None
        probe.probing.cancel()
        server.close()


async def test_a_count_that_is_not_exact_says_so(
    store: Store, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "COUNTED", 5)
    await enqueue(store, *(NewTask("a") for _ in range(20)))
    text = await browser.get("/bulk?operation=bulk.cancel&action=a&count=yes")
    assert "About 20 tasks would be cancelled" in text
    assert "At least 5: an exact count" in text


async def test_streams_end_with_the_api_and_keep_it_from_nothing(store: Store, settings: Settings) -> None:
    async with running(store, settings.model_copy(update={"grace_seconds": 55.0})) as api:
        http = httpx.AsyncClient(base_url=api.url, timeout=60)
        stream = http.stream("GET", "/", headers={"Accept": "text/event-stream"})
        response = await stream.__aenter__()
        found = events(response)
        await anext(found)
        api.stop()
        async with asyncio.timeout(50):
            async for _ in found:
                pass
        await stream.__aexit__(None, None, None)
        await http.aclose()


async def test_what_is_read_of_a_stranger_is_small(store: Store, settings: Settings) -> None:
    settings = settings.model_copy(update={"api_require_keys": True})
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    async with running(store, settings) as api, httpx.AsyncClient(base_url=api.url, headers=HTML | form) as http:
        for path in ("/login", "/logout"):
            assert (await http.post(path, content=b"key=" + b"x" * 20_000)).status_code == 413
        parts = urlsplit(api.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(
            f"POST /do HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/x-www-form-urlencoded\r\n"
            "Content-Length: 5000\r\n\r\n".encode()
        )
        async with asyncio.timeout(20):  # answered before the body has come
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert b"303" in head
        assert b"location: /login\r\n" in head


async def test_made_up_sessions_are_looked_up_at_a_rate_and_keep_no_visitor_out(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.api.access._MISSES_AT_ONCE", 5.0)
    settings = settings.model_copy(update={"api_require_keys": True})
    async with store.session() as session:
        made_key = await create_key(session, CreateKey("looker", [Permission.READ]))
        assert made_key is not None
    async with running(store, settings) as api:
        made = Browser(api)
        data = {"csrf": await made.csrf("/login"), "key": made_key.key, "next": "/"}
        assert (await made.http.post("/login", data=data)).status_code == 303
        await made.get("/tasks")
        async with httpx.AsyncClient(base_url=api.url, headers=HTML) as http:
            told = [
                (await http.get("/tasks", headers={"Cookie": f"penstock_session={n:043d}"})).status_code
                for n in range(30)
            ]
        assert told[:4] == [303] * 4  # the fifth was the token of the form to sign in, which is no session yet
        assert 429 in told
        await made.get("/tasks")
        await made.http.aclose()


async def test_one_caller_leaves_streams_to_the_others() -> None:
    streams = Streams()
    opened = [streams.admit("ada") for _ in range(STREAMS_OF_ONE)]
    with pytest.raises(TooManyWaits, match="the limit is 20 at once"):
        streams.admit("ada")
    streams.admit("eve").close()
    opened[0].close()
    streams.admit("ada")


async def test_a_session_has_the_streams_of_its_key_and_no_more(
    keyed: tuple[Browser, dict[str, str]], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.api.streams.STREAMS_OF_ONE", 1)
    browser, secrets = keyed
    (one,) = await enqueue(store, NewTask("a"))
    await sign_in(browser, secrets["read"])
    for path in (f"/tasks/{one}/events", "/tasks"):
        opening = [browser.http.stream("GET", path, headers={"Accept": "text/event-stream"}) for _ in range(2)]
        async with opening[0] as first, opening[1] as second:
            assert (first.status_code, second.status_code) == (200, 503)


async def test_a_head_of_a_stream_holds_none(
    keyed: tuple[Browser, dict[str, str]], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.api.streams.STREAMS_OF_ONE", 1)
    browser, secrets = keyed
    (one,) = await enqueue(store, NewTask("a"))
    await sign_in(browser, secrets["read"])
    for path in (f"/tasks/{one}/events", "/tasks"):
        for _ in range(2):  # the connection of the first stays open
            answer = await browser.http.head(path, headers={"Accept": "text/event-stream"})
            assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


async def test_streams_are_bounded(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.streams.STREAMS", 0)
    assert (await browser.http.get("/", headers={"Accept": "text/event-stream"})).status_code == 503


# What it stands on


async def test_a_postgres_that_is_away_is_told_and_the_page_comes_back_with_it(
    store: Store, browser: Browser, postgres: EmbeddedPostgres, database_url: str
) -> None:
    await browser.get("/")
    csrf = await browser.csrf()
    async with postgres_away(postgres, database_url):
        for path in ("/tasks", "/keys"):
            answer = await browser.http.get(path)
            assert answer.status_code == 503
            assert 'http-equiv="refresh"' in answer.text
            assert "password" not in answer.text
        answer = await browser.http.post("/do", data={"csrf": csrf, "method": "action.pause", "action": "a"})
        assert (answer.status_code, 'http-equiv="refresh"' in answer.text) == (503, False)
    async with asyncio.timeout(60):
        while (await browser.http.get("/tasks")).status_code != 200:
            await asyncio.sleep(0.2)


async def test_the_audit_is_kept_for_its_time(store: Store, sql: Any, settings: Settings) -> None:
    await sql.execute(
        "insert into penstock.audit (at, who, address, door, method, params) "
        "select now() - make_interval(days => d), 'ada', '', 'http', 'cancel', '{}' from unnest(array[0, 89, 91]) d"
    )
    await Retention(store=store, settings=settings).run_once()
    assert await sql.fetchval("select count(*) from penstock.audit") == 2


async def test_the_tally_is_kept_by_the_minute_for_an_hour_and_its_sums_stay(store: Store, sql: Any) -> None:
    await sql.execute(
        "insert into penstock.tally (at, action, event, count, seconds) "
        "select now() - make_interval(secs => s), 'a', 'SUCCESS', 1, 0.5 from generate_series(0, 9000, 10) s"
    )
    await sql.execute("insert into penstock.tally (at, action, event, count) "
                      "values (now() - interval '10 minutes', 'a', 'SUCCESS', -400)")  # fmt: skip
    before = await sql.fetchrow("select sum(count), sum(seconds) from penstock.tally")
    async with store.session() as session:
        for _ in range(3):  # what was folded is left alone
            await session.fetch("compact_tally", 180.0, 3700.0, 1000, 500, "other")
        steps = await session.fetch("read_tally_steps", 59, 60.0)
    assert await sql.fetchrow("select sum(count), sum(seconds) from penstock.tally") == before
    # One in ten seconds, whatever was taken back.
    assert [(row["enqueued"], row["succeeded"], row["failed"]) for row in steps] == [(0, 6, 0)] * 59
    old, folded = await sql.fetchrow(
        "select count(*) filter (where at < now() - interval '3700 s'), "
        "count(*) filter (where at >= now() - interval '3700 s' and at < now() - interval '240 s') from penstock.tally"
    )
    assert old == 1
    assert folded <= 60


async def test_the_first_id_of_an_instant_is_found_in_both_tables_and_beyond_them(sql: Any) -> None:
    assert await sql.fetchval(SQL["find_first_id"], datetime(2030, 1, 1, tzinfo=UTC)) >= 1
    base = datetime(2030, 1, 1, tzinfo=UTC)
    ids = []
    for hour in range(20):
        at = base + timedelta(hours=hour)
        into = "task (state, " if hour % 3 else "task_history (finished_at, state, "
        given = "'SCHEDULED'" if hour % 3 else "$1, 'CANCELLED'"
        statement = (
            f"insert into penstock.{into} id, action, payload, priority, run_at, max_attempts, created_at, updated_at) "
            f"values ({given}, nextval('penstock.task_id_seq'), 'a', '{{}}', 0, $1, 10, $1, $1) returning id"
        )
        ids.append(await sql.fetchval(statement, at))
        await sql.execute("select nextval('penstock.task_id_seq') from generate_series(1, 3)")  # ids without a task
    for hour, task_id in enumerate(ids):
        found = await sql.fetchval(SQL["find_first_id"], base + timedelta(hours=hour))
        assert (ids[hour - 1] if hour else 0) < found <= task_id
    assert await sql.fetchval(SQL["find_first_id"], base + timedelta(days=9)) > ids[-1]


async def test_latency_is_told_by_percentiles_of_the_newest_successes(store: Store, sql: Any) -> None:
    assert await sql.fetch(SQL["read_latency"], 1000, 12) == []
    ids = await enqueue(store, *(NewTask("a") for _ in range(100)), NewTask("b"))
    async with store.transaction() as session:
        batch = await claim.claim(session, 200)
        assert batch is not None
        assert await settle.finish(session, {(task.id, task.claim): "1" for task in batch.tasks}) == 101
    await sql.execute(
        "update penstock.task_history set claimed_at = finished_at - make_interval(secs => id - $1), "
        "run_at = finished_at - make_interval(secs => id - $1 + 7), created_at = finished_at - interval '1 day'",
        ids[0],
    )
    rows = await sql.fetch(SQL["read_latency"], 1000, 12)
    assert [(row["action"], row["count"], row["took"], row["waited"]) for row in rows] == [
        (None, 101, [50, 95, 99], [7, 7, 7]), ("a", 100, [49, 94, 98], [7, 7, 7]), ("b", 1, [100, 100, 100], [7, 7, 7]),
    ]  # fmt: skip
    assert [row["count"] for row in await sql.fetch(SQL["read_latency"], 10, 2)] == [10, 9]


@pytest.mark.parametrize("name", [
    "list_audit", "read_session", "read_tally_steps", "read_attempts_by_action", "read_latency", "read_failure_groups",
    "read_in_flight",
    "read_life", "read_failed_steps", "find_first_id", "list_tasks", "list_settled_tasks", "list_live_tasks",
    "keep_fitting", "count_live_of_tenant", "count_settled_of_tenant",
])  # fmt: skip
async def test_a_statement_of_the_dashboard_goes_by_an_index(sql: Any, name: str) -> None:
    """Whatever its arguments, and over tables that are empty, for which a scan would look cheaper."""
    for setting, value in PLANNING.items():
        await sql.execute(f"set {setting} = '{value}'")
    await sql.execute("set plan_cache_mode = force_generic_plan")
    await sql.execute(f"prepare generic as {SQL[name]}")
    count = await sql.fetchval("select cardinality(parameter_types) from pg_prepared_statements where name = 'generic'")
    text = await sql.fetchval(f"explain (format json) execute generic ({', '.join(['null'] * count)})")
    scanned = re.findall(r'"Node Type": "Seq Scan",.*?"Relation Name": "(\w+)"', text, re.DOTALL)
    assert set(scanned) <= {"dispatch", "task_id_seq"}, text


# Tenants


async def test_tasks_of_a_tenant_are_found_shown_and_run_again_as_its_own(browser: Browser, store: Store) -> None:
    one, two = await enqueue(store, NewTask("a", tenant="acme", unique_key="k"), NewTask("a", unique_key="k"))
    found = await browser.get("/tasks?tenant=acme")
    assert f'href="/tasks/{one}"' in found
    assert f'href="/tasks/{two}"' not in found
    shown = await browser.get(f"/tasks/{one}")
    assert "<dt>Tenant</dt>" in shown
    assert "key=k&amp;tenant=acme" in shown or "tenant=acme&amp;key=k" in shown
    assert "<dt>Tenant</dt>" not in await browser.get(f"/tasks/{two}")
    await browser.do("enqueue", id=one, action="a", payload="{}", tenant="acme", unique_key="k2", labels="{}")
    (made,) = [task for task in (await browser.call("list", tenant="acme")).tasks if task.id != one]
    assert made.tenant == "acme"
    counted = await browser.get("/bulk?operation=bulk.cancel&tenant=acme&count=yes")
    assert "2 tasks would be cancelled" in counted


async def test_rows_tell_their_tenant_where_any_has_one_and_are_found_by_it(browser: Browser, store: Store) -> None:
    await enqueue(store, NewTask("a"))
    await browser.call("schedule.create", name="nobodys", expression="@daily", action="a")
    flow = await browser.call("workflow.create", chain=[{"action": "a"}])
    nobodys = {"/tasks": "/tasks/1", "/schedules": "/schedules/nobodys", "/workflows": f"/workflows/{flow.id}"}
    for page in nobodys:
        assert "<th>Tenant</th>" not in await browser.get(page)
    (task,) = await enqueue(store, NewTask("a", tenant="acme"))
    await browser.call("schedule.create", name="theirs", expression="@daily", action="a", tenant="acme")
    flow = await browser.call("workflow.create", chain=[{"action": "a"}], tenant="acme")
    acmes = {"/tasks": f"/tasks/{task}", "/schedules": "/schedules/theirs", "/workflows": f"/workflows/{flow.id}"}
    for page, theirs in acmes.items():
        everything, found = await browser.get(page), await browser.get(f"{page}?tenant=acme")
        for text in (everything, found):
            assert "<th>Tenant</th>" in text
            assert 'data-label="of">acme</td>' in text
            assert f'href="{theirs}"' in text
        assert f'href="{nobodys[page]}"' in everything
        assert f'href="{nobodys[page]}"' not in found
        assert f'href="{theirs}"' not in await browser.get(f"{page}?tenant=other")
        assert 'href="/tasks?tenant=acme"' in await browser.get(theirs)
        assert 'href="/tasks?tenant=' not in await browser.get(nobodys[page])


async def test_tenants_are_limited_paused_and_their_rules_removed(browser: Browser, store: Store) -> None:
    await enqueue(store, NewTask("a", tenant="acme/eu"), NewTask("b", tenant="acme/eu"), NewTask("a", tenant="other"))
    assert (await browser.http.get("/tenants?name=acme%2Feu")).headers["location"] == "/tenants/acme%2Feu"
    page = await browser.get("/tenants/acme%2Feu")
    assert '<span class="dot s-scheduled soft">scheduled</span><b>2</b>' in page
    assert 'href="/tasks?tenant=acme%2Feu&amp;action=b"' in page
    assert "Remove" not in page
    assert await browser.do("tenant.pause", tenant="acme/eu") == "done: Tenant acme/eu is paused"
    assert "paused" in await browser.get("/tenants")
    assert "Remove" in await browser.get("/tenants/acme%2Feu")
    assert await browser.do("tenant.resume", tenant="acme/eu") == "done: Tenant acme/eu is resumed"
    said = await browser.do("tenant.set", tenant="acme/eu", max_in_flight="3", rate="0.5", burst="")
    assert said == "done: Limits of acme/eu are set"
    assert "3 in flight" in await browser.get("/tenants")
    assert await browser.do("tenant.set", tenant="*", max_in_flight="50") == (
        "done: Limits of tenants without their own are set"
    )
    assert "every other tenant" in await browser.get("/tenants")
    rule = await browser.call("tenant.get", tenant="acme/eu")
    assert (rule.max_in_flight, rule.rate, rule.burst) == (3, 0.5, None)
    assert await browser.do("tenant.set", tenant="acme/eu", rate="0.5") == "done: Limits of acme/eu are set"
    assert (await browser.call("tenant.get", tenant="acme/eu")).max_in_flight is None
    assert (await browser.do("tenant.set", tenant="acme/eu", rate="0")).startswith("failed: Invalid params: rate must")
    assert (await browser.do("tenant.pause", tenant="*")).startswith("failed: Invalid params: tenant must be one")
    assert await browser.do("tenant.delete", tenant="acme/eu") == "done: The rule of acme/eu is removed"
    assert (await browser.do("tenant.delete", tenant="acme/eu")).startswith(
        "failed: Invalid params: tenant has no rule"
    )
    assert (await browser.call("tenant.get", tenant="acme/eu")).max_in_flight == 50
    assert "Every tenant without limits of its own" in await browser.get("/tenants/%2A")
    assert [method for _, method, outcome in await history(browser) if outcome == "ok"] == [
        "tenant.delete", "tenant.set", "tenant.set", "tenant.set", "tenant.resume", "tenant.pause",
    ]  # fmt: skip
    own, form = str(browser.http.base_url).rstrip("/"), {"method": "tenant.pause", "tenant": "acme/eu", "back": "/"}
    for csrf, origin in (("0" * 64, own), (await browser.csrf(), "http://evil.example")):
        answer = await browser.http.post("/do", data=form | {"csrf": csrf}, headers={"Origin": origin})
        assert answer.status_code == 403
    assert (await browser.call("tenant.get", tenant="acme/eu")).paused is False


NOT_OURS = "ours-and-nobody-elses"  # in all that is another tenant's or of no tenant


async def furnish(store: Store, browser: Browser, tenant: str | None) -> dict[str, list[Any]]:
    """Tasks in many states, a schedule, a workflow and a job, all named NOT_OURS; their ids."""
    whose = {} if tenant is None else {"tenant": tenant}
    name = f"{NOT_OURS}-{tenant}"
    payload, labels = json.dumps({"n": NOT_OURS}), json.dumps({"l": NOT_OURS})
    ids = await enqueue(
        store, *(NewTask(name, payload=payload, labels=labels, ordering_key=key, unique_key=key, tenant=tenant)
                 for key in (None, None, None, NOT_OURS)),
    )  # fmt: skip
    async with store.transaction() as session:
        batch = await claim.claim(session, 100)
        assert batch is not None
        claims = {task.id: task.claim for task in batch.tasks}
        await settle.finish(session, {(ids[0], claims[ids[0]]): payload})
        error = {"code": 1, "message": NOT_OURS, "data": {"traceback": NOT_OURS}}
        await settle.fail(session, [Failure(ids[1], claims[ids[1]], json.dumps(error), None)])
    await browser.call("cancel", id=ids[2], reason=NOT_OURS)
    await browser.call("schedule.create", name=name, expression="@daily", action=name, **whose)
    flow = await browser.call("workflow.create", name=NOT_OURS, key=NOT_OURS, chain=[{"action": name}], **whose)
    job = await browser.call("bulk.retry", action=name, **whose)
    return {"tasks": ids, "schedules": [name], "workflows": [flow.id], "jobs": [job.job]}


async def test_a_session_of_a_bound_key_sees_and_changes_what_is_its_tenants_alone(
    keyed: tuple[Browser, dict[str, str]], store: Store
) -> None:
    browser, secrets = keyed
    made = [await furnish(store, browser, tenant) for tenant in ("other", None)]
    await browser.call("tenant.pause", tenant="other")
    mine, _ = await enqueue(store, NewTask("mine", tenant="acme"), NewTask("mine", tenant="acme", payload='{"n": 77}'))
    await browser.call("schedule.create", name="my-schedule", expression="@daily", action="mine", tenant="acme")
    flow = await browser.call("workflow.create", name="my-flow", chain=[{"action": "mine"}], tenant="acme")
    entered = await sign_in(browser, secrets["bound"])
    assert (entered.status_code, entered.headers["location"]) == (303, "/")

    # Every page there is: what it may see is its own, the rest is refused.
    seen: dict[str, str] = {}
    ids = {"id": mine, "name:path": "my-schedule", "queue": "inbound"}
    for path in ("/", *(page.path for page in PAGES), "/tenants/acme", f"/workflows/{flow.id}"):
        for name, value in ids.items():
            path = path.replace(f"{{{name}}}", str(value))
        answer = await browser.http.get(path)
        assert NOT_OURS not in unescape(answer.text), path
        if answer.status_code == 200:
            seen[path] = answer.text
            assert "only acme" in answer.text
            assert "<th>Tenant</th>" not in answer.text
        else:
            assert answer.status_code in (400, 403, 404), path
    assert set(seen) == {
        "/", "/tasks", f"/tasks/{mine}", f"/tasks/{mine}/edit", "/schedules", "/schedules/my-schedule", "/workflows",
        f"/workflows/{flow.id}", "/bulk", "/tenants/acme", "/failures", "/search",
    }  # fmt: skip
    assert set(re.findall(r'<a href="(/[a-z]*)"', seen["/"])) == {
        "/", "/tasks", "/failures", "/schedules", "/workflows", "/bulk",
    }  # fmt: skip

    # Totals and graphs: three tasks of its own, whatever others have; none of the charts of the whole installation.
    for page in (seen["/"], seen["/tenants/acme"]):
        assert [int(count) for count in re.findall(r"soft\">[a-z ]+</span><b>(\d+)</b>", page)] == [0, 3, 0, 0, 0, 0, 0]
        assert "<svg" not in page
        assert "Processes" not in page
        assert "tenant.set" not in page
    assert seen["/tasks"].count('data-key="t') == 3
    offered = seen["/tasks"].partition("<datalist")[2].partition("</datalist>")[0]
    assert re.findall(r'value="([^"]+)"', offered) == ["mine"]
    counted = await browser.get("/bulk?operation=bulk.cancel&all=yes&count=yes")
    assert "3 tasks would be cancelled" in counted
    assert NOT_OURS not in counted

    # What is open is kept up to date with no more than that.
    for path in ("/", "/tasks", "/schedules", "/workflows", "/bulk"):
        async with asyncio.timeout(60):
            async with browser.http.stream("GET", path, headers={"Accept": "text/event-stream"}) as response:
                first = await anext(events(response))
        assert first
        assert NOT_OURS not in unescape(first), path

    # Others' by name: as what there is not, also as a filter, a form or a file.
    before = {task: (await browser.call("status", id=task)).state for one in made for task in one["tasks"]}
    for one in made:
        for kind, names in one.items():
            for name in names:
                text = await browser.get(f"/{kind}/{name}", 404)
                assert NOT_OURS not in unescape(text).replace(f"{name}", "")
        for task in one["tasks"]:
            await browser.get(f"/tasks/{task}/edit", 404)
            for what in ("payload", "result"):
                assert (await browser.http.get(f"/tasks/{task}/{what}")).status_code == 404
    assert (await browser.http.get(f"/tasks/{mine}/payload")).status_code == 200
    for path in ("/tasks", "/schedules", "/workflows"):
        await browser.get(f"{path}?tenant=other", 400)
    await browser.get("/tenants/other", 400)
    assert "No tasks match" in await browser.get(f"/tasks?key={NOT_OURS}")
    assert "No tasks match" in await browser.get(f"/tasks?text={NOT_OURS}")
    assert "Nothing found" in await browser.get(f"/search?q={NOT_OURS}")
    assert "No permanent failures" in seen["/failures"]
    csrf = await browser.csrf("/tasks")
    for one in made:
        for method in (*FORM_ACTIONS, "keys.create", "cancel.selected", "retry.selected"):
            kind = method.partition(".")[0]
            target = one["jobs"] if kind == "job" else one["workflows"] if kind == "workflow" else one["tasks"]
            fields = {"id": str(target[-1]), "ids": [str(task) for task in one["tasks"]], "name": one["schedules"][0],
                      "action": one["schedules"][0], "queue": "inbound", "key": NOT_OURS, "tenant": "other",
                      "permission": "read", "delay": "1", "rate": "1", "limit": "5"}  # fmt: skip
            answer = await browser.http.post("/do", data={"csrf": csrf, "method": method, "back": "/tasks", **fields})
            assert answer.status_code == 303, method
            shown = await browser.get(answer.headers["location"])
            assert 'class="flash failed"' in shown, method
    assert {task: (await browser.call("status", id=task)).state for task in before} == before
    for one in made:
        assert (await browser.call("schedule.get", name=one["schedules"][0])).paused is False
    assert len((await browser.call("job.list")).jobs) == 2

    # And with what is its own it does all that its key may.
    for method, fields, said in (
        ("cancel", {"id": mine}, f"done: Task {mine} is cancelled"),
        ("retry", {"id": mine}, f"done: Task {mine} runs again"),
        ("schedule.pause", {"name": "my-schedule"}, "done: Schedule my-schedule is paused"),
        ("workflow.cancel", {"id": flow.id}, f"done: Workflow {flow.id} is cancelled"),
    ):
        data = {"csrf": csrf, "method": method, "back": "/tasks", **fields}
        answer = await browser.http.post("/do", data=data)
        flash = re.search(
            r'class="flash (done|failed)" role="alert">([^<]*)<', await browser.get(answer.headers["location"])
        )
        assert flash is not None
        assert f"{flash[1]}: {flash[2]}" == said


async def test_a_session_is_bound_as_soon_as_its_key_is(
    keyed: tuple[Browser, dict[str, str]], store: Store, sql: Any
) -> None:
    browser, secrets = keyed
    (one,) = await enqueue(store, NewTask("a"))
    await sign_in(browser, secrets["read"])
    await browser.get(f"/tasks/{one}")
    await sql.execute("update penstock.api_key set tenant = 'acme' where name = 'read'")
    async with asyncio.timeout(60):
        while (await browser.http.get(f"/tasks/{one}")).status_code == 200:
            await asyncio.sleep(api_keys.REFRESH_SECONDS / 4)
    await browser.get("/queues", 403)
    assert "only acme" in await browser.get("/")
