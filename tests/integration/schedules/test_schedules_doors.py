"""Schedules from outside: over HTTP by the client, through the inbound queue, and from the shell."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.brokers.sqs import SqsQueue
from penstock.cli.app import app
from penstock.client.client import Client
from penstock.client.inbound import InboundClient
from penstock.db.pool import Store
from penstock.protocol.errors import (
    InvalidParams,
    PenstockError,
    RateLimited,
    ScheduleNotFound,
    TooLarge,
    Unavailable,
)
from penstock.runtime.periodic import repeat
from penstock.schedules.firing import Imports
from penstock.schedules.store import PART_ENTRIES
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from tests.integration.apis import running
from tests.integration.doors import rejected


async def test_client_calls_every_method_of_schedules(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        with Client(url) as client:
            made = client.schedules.create(
                "nightly", "30 2 * * *", "report", {"for": "{{scheduled_time}}"}, timezone="Europe/Berlin",
                start_at=datetime(2040, 3, 24, tzinfo=UTC), labels={"team": "a", "tier": "1"}, jitter=30,
            )  # fmt: skip
            assert made["state"] == "ACTIVE"
            assert made["upcoming"][:2] == ["2040-03-24T01:30:00.000000Z", "2040-03-25T01:00:00.000000Z"]
            assert made["next_at"] == made["upcoming"][0]
            changed = client.schedules.update("nightly", start_at=None, missed="all", max_attempts=3)
            assert (changed["start_at"], changed["missed"], changed["max_attempts"]) == (None, "all", 3)
            assert changed["payload"] == {"for": "{{scheduled_time}}"}
            client.schedules.create("other", "@every 90s", "report")
            assert [one["name"] for one in client.schedules.list()["schedules"]] == ["other", "nightly"]
            page = client.schedules.list(limit=1)
            assert client.schedules.list(limit=1, cursor=page["cursor"])["schedules"][0]["name"] == "nightly"
            assert [one["name"] for one in client.schedules.list(labels={"team": "a"})["schedules"]] == ["nightly"]
            assert client.schedules.list(labels={"team": "b"})["schedules"] == []
            assert client.schedules.list(labels={})["schedules"] == client.schedules.list()["schedules"]
            assert client.schedules.list(action="nothing")["schedules"] == []
            paused = client.schedules.pause("other")
            assert (paused["state"], paused["next_at"], len(paused["upcoming"])) == ("PAUSED", None, 5)
            assert [one["name"] for one in client.schedules.list(paused=True)["schedules"]] == ["other"]
            assert client.schedules.resume("other")["state"] == "ACTIVE"
            runs = [client.schedules.run_now("nightly") for _ in range(3)]
            assert client.status(runs[0]["task_id"], detail=True)["payload"] == {"for": runs[0]["scheduled_at"]}
            first = client.schedules.runs("nightly", limit=2)
            assert [run["task_id"] for run in first["runs"]] == [runs[2]["task_id"], runs[1]["task_id"]]
            second = client.schedules.runs("nightly", cursor=first["cursor"])
            assert second["runs"] == runs[:1]
            assert second["cursor"] is None
            assert client.schedules.delete("other")["deleted"] is True
            with pytest.raises(ScheduleNotFound) as gone:
                client.schedules.get("other")
            assert gone.value.data == {"name": "other"}

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"expression": "0 0 30 2 *"}, "expression", ["day-of-month '30'", "month '2'"]),
        ({"expression": "61 * * * *"}, "expression", ["minute '61'", "0 to 59"]),
        ({"timezone": "Europe/Berlim"}, "timezone", ["'Europe/Berlim'", "did you mean Europe/Berlin?"]),
        ({"name": ""}, "name", ["1 to 200 characters", "not 0"]),
        ({"action": ""}, "action", ["is empty"]),
        ({"jitter": -1}, "jitter", ["0 to 86400 seconds", "not -1"]),
        ({"max_missed": 1001}, "max_missed", ["1 to 1000", "not 1001"]),
        ({"max_lateness": -5}, "max_lateness", ["not -5"]),
        ({"max_lateness": 0}, "max_lateness", ["must be 1 to", "not 0"]),
        ({"missed": "some"}, "missed", ["'some'"]),
        ({"overlap": "maybe"}, "overlap", ["'maybe'"]),
        ({"start_at": "2030-01-01T00:00:00"}, "start_at", ["needs a zone", "'2030-01-01T00:00:00'"]),
        ({"end_at": "soon"}, "end_at", ["RFC 3339", "'soon'"]),
        ({"start_at": 2e13, "end_at": 0}, "start_at", ["wrong"]),
        ({"start_at": 4000000000000, "end_at": 3000000000000}, "end_at", ["must not be before", "3000000000000"]),
        ({"labels": {"": "x"}}, "labels", ["need names of 1 to"]),
        ({"labels": {"a": "x" * 501}}, "labels.a", ["500 characters"]),
        ({"labels": {str(n): "x" for n in range(33)}}, "labels", ["are 33", "the limit is 32"]),
        ({"timeout": 0}, "timeout", ["above 0", "not 0"]),
        ({"ordering_key": ""}, "ordering_key", ["1 to 500"]),
        ({"payload": "text"}, "payload", ["object or an array"]),
        ({"experssion": 1}, "experssion", ["did you mean expression?"]),
    ],
)
async def test_a_wrong_parameter_is_named_with_what_was_seen_and_what_would_do(
    store: Store, settings: Settings, given: dict[str, Any], field: str, words: list[str]
) -> None:
    params = {"name": "n", "expression": "@daily", "action": "a"} | given

    def use(url: str) -> InvalidParams:
        with Client(url) as client, pytest.raises(InvalidParams) as caught:
            client.call("schedule.create", params)
        return caught.value

    async with running(store, settings) as api:
        error = await asyncio.to_thread(use, api.url)
    assert error.data["field"] == field
    assert [word for word in words if word not in error.data["problem"]] == []


async def test_a_payload_must_have_room_for_what_is_filled_in(store: Store, settings: Settings) -> None:
    small = settings.model_copy(update={"payload_limit_bytes": 1000})

    def use(url: str) -> None:
        with Client(url) as client:
            client.schedules.create("n", "@daily", "a", {"at": ["{{schedule}}"] * 4})
            with pytest.raises(TooLarge):
                client.schedules.create("n" * 200, "@daily", "a", {"at": ["{{schedule}}"] * 6})

    async with running(store, small) as api:
        await asyncio.to_thread(use, api.url)


async def test_fifty_thousand_schedules_are_taken_in_one_call(store: Store, settings: Settings) -> None:
    entries = [
        {"name": f"customer-{n}", "expression": "0 3 * * *", "action": "report", "payload": {"customer": n},
         "timezone": "America/New_York", "labels": {"tier": "small", "region": "us-east-1"}}
        for n in range(50_000)
    ]  # fmt: skip

    def use(url: str) -> tuple[int, dict[str, Any]]:
        with Client(url, timeout=120) as client:
            with pytest.raises(InvalidParams, match="must hold 1 to 50000 schedules, not 50001"):
                client.schedules.create_many([*entries, entries[0]])
            started = client.schedules.create_many(entries)
            assert started["total"] == 50_000
            status = client.schedules.import_status(started["id"])
            with pytest.raises(ScheduleNotFound):
                client.schedules.import_status(999)
            return started["id"], status

    async with running(store, settings) as api:
        import_id, status = await asyncio.to_thread(use, api.url)
        assert (status["state"], status["seen"], status["finished_at"]) == ("RUNNING", 0, None)
        imports = Imports(store=store, settings=settings)
        assert await imports.run_once() == PART_ENTRIES
        with Client(api.url) as client:
            status = await asyncio.to_thread(client.schedules.import_status, import_id)
            page = await asyncio.to_thread(client.schedules.list)
    assert (status["state"], status["seen"], status["created"]) == ("RUNNING", PART_ENTRIES, PART_ENTRIES)
    assert page["schedules"][0]["next_at"] is not None


# The inbound queue


async def test_schedules_are_changed_through_the_inbound_queue(
    store: Store, settings: Settings, inbound: SqsQueue, sql: Any
) -> None:
    submitter = Submitter(store=store, inbound=inbound, settings=settings)

    async def drain() -> None:
        while await submitter.run_once():
            pass

    queue = InboundClient(settings.inbound_queue, endpoint_url=settings.sqs_endpoint_url, region=settings.aws_region)
    async with queue:
        await queue.schedules.create("n", "@hourly", "a", {"x": 1}, labels={"a": "b"})
        await queue.schedules.create("m", "@hourly", "a")
        await drain()
        await queue.schedules.update("n", priority=9)
        await queue.schedules.run_now("n")
        await queue.schedules.pause("m")
        await drain()
        assert [row[0] for row in await sql.fetch("select priority from penstock.schedule where name = 'n'")] == [9]
        assert await sql.fetchval("select paused from penstock.schedule where name = 'm'")
        assert await sql.fetchval("select count(*) from penstock.task") == 1
        await queue.schedules.resume("m")
        await queue.schedules.delete("n")
        await queue.schedules.create("m", "@daily", "a")
        await queue.schedules.create("o", "61 * * * *", "a")
        await queue.send("schedule.get", {"name": "m"})
        await drain()
    assert [tuple(row) for row in await sql.fetch("select name, paused from penstock.schedule")] == [("m", False)]
    reasons = sorted(reason for _, _, reason in await rejected(store))
    assert len(reasons) == 3
    assert "minute '61'" in reasons[0]
    assert "'m' is a schedule's name already" in reasons[1]
    assert reasons[2] == "schedule.get only answers, and a queue has no way back: ask over HTTP"


# The shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(url: str, *arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, ["schedules", *arguments, "--api-url", url], input=stdin)

    return run


async def test_every_command_of_the_shell(store: Store, settings: Settings, shell: Any) -> None:
    def use(url: str) -> None:
        made = shell(
            url, "create", "nightly", "30 2 * * *", "report", '{"a": 1}', "--tz", "Europe/Berlin", "--label", "team=a",
            "--start-at", "2040-03-24T00:00:00Z", "--overlap", "skip", "--missed", "all",
        )  # fmt: skip
        assert made.exit_code == 0, made.output
        assert "2040-03-24T01:30:00.000000Z, 2040-03-25T01:00:00.000000Z" in made.output
        updated = json.loads(shell(url, "update", "nightly", "--priority", "3", "--clear", "start-at", "--json").output)
        assert (updated["priority"], updated["start_at"], updated["overlap"]) == (3, None, "skip")
        assert json.loads(shell(url, "show", "nightly", "--json").output)["payload"] == {"a": 1}
        assert "Europe/Berlin" in shell(url, "list", "--label", "team=a").output
        assert shell(url, "list", "--label", "team=b").output == "No schedules.\n"
        assert shell(url, "run-now", "nightly").output.startswith("task 1 SCHEDULED")
        assert shell(url, "run-now", "nightly").output.startswith("SKIPPED: the previous task has not settled")
        assert [line.split()[1] for line in shell(url, "runs", "nightly").output.splitlines()[1:]] == [
            "SKIPPED", "SCHEDULED",
        ]  # fmt: skip
        assert "PAUSED" in shell(url, "pause", "nightly").output
        assert "ACTIVE" in shell(url, "resume", "nightly").output
        assert shell(url, "delete", "nightly").output.endswith("schedule nightly is deleted\n")
        failed = shell(url, "show", "nightly")
        assert isinstance(failed.exception, ScheduleNotFound)
        assert shell(url, "create", "n", "@daily", "a", "{").exit_code == 2
        refused = shell(url, "create", "n", "@daily", "a", "--label", "team")
        assert (refused.exit_code, "is not NAME=TEXT" in refused.output) == (2, True)

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


async def test_a_file_is_imported_and_what_is_wrong_in_it_is_told(
    store: Store, settings: Settings, shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The api is started again, and limits the rate, while the supervisor reads the first file.
    troubles: list[Exception] = [RateLimited(0.1), Unavailable("cannot be reached")]
    step = Client._step

    def step_through_troubles(client: Client, body: str | None, seconds: float) -> Any:
        if troubles and "import_status" in (body or ""):
            raise troubles.pop()
        return step(client, body, seconds)

    monkeypatch.setattr(Client, "_step", step_through_troubles)
    lines = [{"name": f"s{n}", "expression": "@daily", "action": "a"} for n in range(3)]
    (tmp_path / "good.json").write_text(json.dumps(lines))
    (tmp_path / "lines").write_text("\n\n".join(map(json.dumps, [lines[0], {"name": "x", "expression": "@dayly"}])))
    (tmp_path / "torn").write_text('{"name": 1}\n{')
    (tmp_path / "number").write_text('{"name": 1}\n5')
    (tmp_path / "no-number").write_text("[NaN]")
    (tmp_path / "deep").write_text("[" * 100_000)
    separated = {"name": "separated", "expression": "@daily", "action": "a", "payload": ["a\u2028b\u2029c\x85d"]}
    (tmp_path / "separators").write_text(json.dumps(separated, ensure_ascii=False))
    # More than one request may hold.
    large = [lines[0] | {"name": f"large{n}", "payload": {"text": "x" * 200_000}} for n in range(90)]
    (tmp_path / "large").write_text("\n".join(map(json.dumps, [*large, {"name": "x", "expression": "@dayly"}])))

    def use(url: str) -> None:
        good = shell(url, "import", "good.json")
        assert good.exit_code == 0, good.output
        # The supervisor's log lines come from this process too.
        counts = dict(line.split() for line in good.output.splitlines() if line[0] in "cr")
        assert counts == {"created": "3", "replaced": "0", "refused": "0"}
        assert (troubles, good.output.count("cannot be reached; still trying")) == ([], 1)
        bad = shell(url, "import", "lines", "--replace")
        assert isinstance(bad.exception, PenstockError)
        assert str(bad.exception).startswith("1 of 2 schedules were refused")
        assert "entry 1 (x): action is missing" in bad.output
        large = shell(url, "import", "large")
        assert str(large.exception).startswith("1 of 91 schedules were refused")
        assert "entry 90 (x): action is missing" in large.output
        torn = shell(url, "import", "torn")
        assert "torn, line 2, is not valid JSON" in str(torn.exception)
        assert "number, line 2, holds 5 where a schedule must be" in str(shell(url, "import", "number").exception)
        for wrong in ("no-number", "deep"):
            assert "is not valid JSON" in str(shell(url, "import", wrong).exception)
        assert shell(url, "import", "separators").exit_code == 0
        assert "contains no schedule" in str(shell(url, "import", "-", stdin="").exception)

    imports = asyncio.create_task(repeat("imports", Imports(store=store, settings=settings).work_or_wait))
    try:
        async with running(store, settings) as api:
            await asyncio.to_thread(use, api.url)
    finally:
        imports.cancel()
