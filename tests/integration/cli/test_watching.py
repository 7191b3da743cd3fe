"""`penstock top` and `penstock task show --follow` against a running api, as a person and as a script have them."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import common, top
from penstock.cli.app import app
from penstock.db.pool import Store
from penstock.protocol.errors import RateLimited, Unavailable
from penstock.protocol.task import NewTask
from penstock.runtime.health import Health, serve_health
from penstock.settings.model import Settings
from penstock.tasks import claim, enqueue
from penstock.worker.handlers.actions import action
from penstock.worker.handlers.context import Context
from penstock.worker.handlers.outcomes import Fail
from penstock.worker.result_sender import name_of_process
from tests.integration import lines
from tests.integration.apis import running

ROOT = Path(__file__).parents[3]
PATIENCE_SECONDS = 60


@pytest.fixture
async def tasks(store: Store) -> None:
    async with store.session() as session:
        await enqueue.enqueue(session, [NewTask("export") for _ in range(5)])
        await enqueue.enqueue(session, [NewTask("mail", delay_seconds=3600)])
        batch = await claim.claim(session, 2)
        assert batch is not None
        await claim.confirm(session, batch.id)


@pytest.mark.usefixtures("tasks")
async def test_one_look_is_printed_for_a_person_and_as_json_for_a_script(store: Store, settings: Settings) -> None:
    def use(url: str) -> None:
        done = CliRunner().invoke(app, ["top", "--once", "--json", "--api-url", url])
        assert done.exit_code == 0, done.output
        seen = json.loads(done.stdout)
        assert seen["states"]["ACQUIRED"] == 2
        assert seen["lag"]["due"] == 3
        assert seen["actions"][0] == {
            "action": "export", "waiting": 3, "retrying": 0, "in_flight": 2, "max_in_flight": None, "paused": False,
            "succeeded": 0, "failed": 0,
        }  # fmt: skip
        assert seen["processes"] == []
        done = CliRunner().invoke(app, ["top", "--once", "--api-url", url])
        assert done.exit_code == 0
        rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
        assert rows["ACQUIRED"] == ["2"]
        assert rows["export"] == ["3", "0", "2", "0", "0"]
        assert "3 due" in done.stdout

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


@pytest.mark.usefixtures("tasks")
async def test_limits_pauses_and_the_health_of_processes_are_shown(store: Store, settings: Settings) -> None:
    well, ill = Health("well"), Health("ill")
    well.succeeded()
    ill.failed("Postgres is unavailable")

    def use(url: str) -> None:
        for words in (["actions", "set", "export", "--max-in-flight", "9"], ["actions", "pause", "export"]):
            assert CliRunner().invoke(app, [*words, "--api-url", url]).exit_code == 0
        with closing(serve_health([well], "127.0.0.1", 0)) as one, closing(serve_health([ill], "127.0.0.1", 0)) as two:
            urls = [one.url, two.url, "http://127.0.0.1:1"]
            named = [word for process in urls for word in ("--metrics", process)]
            page = CliRunner().invoke(app, ["top", "--once", "--api-url", url, *named]).stdout
            seen = json.loads(CliRunner().invoke(app, ["top", "--once", "--json", "--api-url", url, *named]).stdout)
        assert "1 of 3 ready" in page
        assert f"{two.url}: Postgres is unavailable" in page
        assert "2 of 9" in page
        assert "export (paused)" in page
        assert [process["ready"] for process in seen["processes"]] == [True, False, False]
        assert seen["processes"][2]["reason"].startswith("unavailable: ")

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


@pytest.mark.usefixtures("tasks")
async def test_on_a_terminal_it_is_redrawn_until_q_and_leaves_the_terminal_as_it_was(
    store: Store, settings: Settings
) -> None:
    def use(url: str) -> None:
        leader, follower = pty.openpty()
        before = termios.tcgetattr(follower)
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "top", "--interval", "0.2", "--api-url", url],
            stdin=follower, stdout=follower, stderr=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "services"), "TERM": "xterm", "COLUMNS": "120",
                 "LINES": "40"},
        )  # fmt: skip
        try:
            drawn = read_until(leader, b"export", times=3)
            assert b"\x1b[?1049h" in drawn, "it has a screen of its own"
            os.write(leader, b"s")
            read_until(leader, b"by waiting")
            os.write(leader, b"q")
            read_until(leader, b"\x1b[?1049l")
            assert process.wait(PATIENCE_SECONDS) == 0
            assert termios.tcgetattr(follower) == before
        finally:
            process.kill()
            process.communicate()
            os.close(leader)
            os.close(follower)

    async with running(store, settings) as api:
        await asyncio.to_thread(use, api.url)


def read_until(descriptor: int, text: bytes, *, times: int = 1) -> bytes:
    """What a terminal was sent up to so many occurrences of a text."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    seen = b""
    while seen.count(text) < times:
        assert time.monotonic() < deadline, seen[-2000:]
        if select.select([descriptor], [], [], 1)[0]:
            seen += os.read(descriptor, 65_536)
    return seen


STATE = {"api": "http://127.0.0.1:1", "processes": [{"name": "api", "metrics": "http://127.0.0.1:2/metrics"},
                                                    {"name": "new", "metrics": None}]}  # fmt: skip


def test_the_processes_of_the_stack_that_runs_here_are_known() -> None:
    assert top._processes([], "http://127.0.0.1:1", STATE) == [("api", "http://127.0.0.1:2")]


async def test_processes_of_the_stack_here_are_not_shown_beside_another_api(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.local.state.DataDir.read_state", lambda self: STATE)
    async with running(store, settings) as api:
        monkeypatch.setenv("PENSTOCK_API_URL", api.url)
        done = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--once", "--json"])
    assert json.loads(done.stdout)["processes"] == []


def test_what_a_process_says_is_no_command_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    watch = top.Watch(None, [])  # type: ignore[arg-type]
    watch.health = [{"name": "worker-1", "ready": False, "reason": "boom \x1b]52;c;Y3VybCBldmls\x07"}]
    common.wide_console(120).print(top._page(watch, rows=None))
    assert "worker-1: boom \\x1b]52;c;Y3VybCBldmls\\x07" in capsys.readouterr().out


def test_rates_are_counted_from_one_look_to_the_next_and_an_api_that_goes_away_is_told() -> None:
    class Client:
        seen = 0
        is_away = False
        is_limited = False

        def call(self, method: str, params: Any) -> Any:
            if self.is_away:
                raise Unavailable("no answer")
            if self.is_limited:
                raise RateLimited(1)
            if method == "action.list":
                return {"actions": []}
            self.seen += 100
            return {
                "states": {"SUCCESS": self.seen, "ACQUIRED": 0}, "actions": {"a": {"SUCCESS": self.seen}},
                "rates": {"enqueued_per_second": 1.0, "succeeded_per_second": 1.0, "failed_per_second": 0.0},
                "lag": {"due": 0, "oldest_due_seconds": 0.0},
            }  # fmt: skip

    client = Client()
    watch = top.Watch(client, [])  # type: ignore[arg-type]
    watch.look()
    assert watch.per_second == {}
    watch.look()
    assert watch.per_second["SUCCESS"] > 0
    assert watch.per_second["ACQUIRED"] == 0
    client.is_away = True
    watch.look()
    assert watch.problem == "no answer"
    assert watch.as_json() == {"problem": "no answer", "processes": []}
    with pytest.raises(Unavailable):
        watch.look(must=True)
    client.is_away, client.is_limited = False, True
    watch.look()
    assert watch.problem == "Too many requests: try again in 1 s"
    client.is_limited = False
    watch.look()
    assert watch.problem is None


async def test_a_task_is_followed_to_its_end_with_every_failed_attempt(store: Store, settings: Settings) -> None:
    """`--follow` runs beside a line that fails twice and then succeeds."""

    async def follow(url: str, task_id: int) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock", "task", "show", str(task_id), "--follow", "--api-url", url,
            stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "services")},
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_SECONDS)
        return process.returncode, out.decode()

    async with running(store, settings) as api, lines.running(store, settings) as line:
        runs: list[int] = []

        @action("flaky", registry=line.registry)
        async def flaky(ctx: Context) -> dict[str, int]:
            runs.append(ctx.claim)
            if len(runs) < 3:
                raise ValueError(f"failure {len(runs)}")
            return {"runs": len(runs)}

        @action("hopeless", registry=line.registry)
        async def hopeless(ctx: Context) -> None:
            raise Fail("no way")

        (good,) = await line.enqueue("flaky", {})
        (bad,) = await line.enqueue("hopeless", {})
        following = [asyncio.create_task(follow(api.url, task_id)) for task_id in (good, bad)]
        await line.until(good, "SUCCESS")
        await line.until(bad, "CRITICAL_ERROR")
        (code, out), (bad_code, bad_out) = await asyncio.gather(*following)
    texts = [text.split(f"  task {good}  ")[1] for text in out.splitlines()]
    assert code == 0
    here = name_of_process()
    assert [text for text in texts if "failed" in text] == [
        f"attempt {number} failed on {here}: ValueError: failure {number}" for number in (1, 2)
    ]
    assert texts[-1] == f'SUCCESS on {here}: {{"runs": 3}}'
    assert bad_code == 3
    assert f"attempt 1 failed on {here}: Fail: no way" in bad_out
    assert bad_out.splitlines()[-1].endswith("  failed")
