"""The frame of deliveries, and deliveries through the whole pipeline."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from penstock.cli import run as wiring
from penstock.db.pool import Store
from penstock.protocol.errors import SettingsError
from penstock.settings.model import Settings, load_settings
from penstock.worker.deliveries import registry as frame
from penstock.worker.deliveries.registry import EXTRAS, Deliveries
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Context
from penstock.worker.responses import failure_answer, unknown_action
from tests.integration.http_servers import answer, serving
from tests.integration.lines import running

HTTP = {"deliveries": ("http.request",), "http_allow": ("127.0.0.1",)}


def test_none_is_on_unless_the_operator_names_it() -> None:
    registry = Registry()
    Deliveries(load_settings(), registry)
    assert len(registry) == 0


def test_those_that_are_named_are_registered_and_a_name_that_stands_twice_once() -> None:
    registry = Registry()
    Deliveries(load_settings(deliveries="http.request, sqs.send,http.request"), registry)
    assert set(registry) == {"http.request", "sqs.send"}


def test_a_misspelt_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"no delivery 'http.requests'; did you mean http.request\?"):
        Deliveries(load_settings(deliveries="http.requests"), Registry())


def test_an_action_of_the_operators_own_is_not_replaced() -> None:
    registry = Registry()

    @action("http.request", registry=registry)
    async def mine(ctx: Context) -> None: ...

    with pytest.raises(SettingsError, match=r"--app registers an action of that name"):
        Deliveries(load_settings(deliveries="http.request"), registry)


def test_a_library_that_is_missing_is_told_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ModuleNotFoundError("No module named 'some_broker'", name="some_broker")

    monkeypatch.setattr(frame, "BUILT_IN_ACTIONS", {"some.publish"})
    monkeypatch.setitem(EXTRAS, "some.publish", "some")
    monkeypatch.setattr(frame.importlib, "import_module", gone)
    with pytest.raises(SettingsError, match=r"needs some_broker: pip install 'penstock\[some\]'"):
        Deliveries(load_settings(deliveries="some.publish"), Registry())


async def test_what_was_opened_is_closed_the_newest_first_though_one_fails() -> None:
    deliveries = Deliveries(load_settings(), Registry())
    closed: list[str] = []

    def closing(name: str, error: Exception | None = None) -> None:
        async def close() -> None:
            closed.append(name)
            if error is not None:
                raise error

        deliveries.at_close(close)

    closing("first")
    closing("second", RuntimeError("stuck"))
    closing("third")
    with pytest.raises(RuntimeError, match="stuck"):
        await deliveries.close()
    await deliveries.close()
    assert closed == ["third", "second", "first"]


def test_a_worker_without_it_says_where_a_delivery_comes_from() -> None:
    answered = json.loads(failure_answer("1:1", None, unknown_action("http.request", Registry()))[0])
    assert "run by workers whose PENSTOCK_DELIVERIES names it" in answered["error"]["message"]


def test_a_worker_that_cannot_start_says_why_and_exits_with_2() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "penstock", "worker"],
        capture_output=True, text=True, timeout=120,
        env={"PENSTOCK_DELIVERIES": "sql.execute", "PATH": "/usr/bin:/bin", "PYTHONPATH": "services"},
    )  # fmt: skip
    assert run.returncode == 2
    assert "PENSTOCK_SQL_STATEMENTS names no statement" in run.stderr


async def test_a_worker_is_given_its_deliveries_and_closes_what_they_opened(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    closed: list[Deliveries] = []
    monkeypatch.setattr("penstock.worker.handlers.actions.REGISTRY", registry)
    monkeypatch.setattr(Deliveries, "close", lambda self: noted(closed, self))
    make = wiring._maker("worker", settings.model_copy(update={"deliveries": ("http.request", "sqs.send")}), (), None)
    assert set(registry) == {"http.request", "sqs.send"}
    async with AsyncExitStack() as stack:
        service = make(stack)
        assert (service.name, closed) == ("worker", [])
    await service.close()
    assert len(closed) == 1


async def noted(closed: list[Deliveries], one: Deliveries) -> None:
    closed.append(one)


async def test_a_delivery_has_the_pipelines_retries_and_its_answer_is_the_tasks_result(
    store: Store, settings: Settings
) -> None:
    bodies = [answer(500, b"broken"), answer(200, b"nul \x00 and umlaut \xc3\xbc")]
    async with serving(bodies) as server, running(store, settings, **HTTP) as line:
        (task_id,) = await line.enqueue("http.request", {"url": server.url + "/hook", "json": {"order": 1}})
        failed = await line.until(task_id, "ERROR")
        assert "answered 500: broken" in failed["error"]["message"]
        done = await line.until(task_id, "SUCCESS")
    assert done["result"]["status"] == 200
    assert done["result"]["body"].endswith("umlaut ü")
    assert done["attempts"] == 2
    keys = {request.headers["idempotency-key"] for request in server.requests}
    assert keys == {f"penstock-{task_id}"}


async def test_retry_after_puts_the_attempt_off_and_a_final_status_ends_the_task(
    store: Store, settings: Settings
) -> None:
    async with (
        running(store, settings, **HTTP, retry_cap_seconds=3600) as line,
        serving([answer(429, Retry_After="900")]) as busy,
        serving([answer(410)]) as gone,
    ):
        late, dead = await line.enqueue("http.request", {"url": busy.url}, {"url": gone.url})
        async with asyncio.timeout(60):
            while (waiting := await line.read(late))["run_at"] <= waiting["updated_at"]:
                await line.run_once()
        buried = await line.until(dead, "CRITICAL_ERROR")
    assert timedelta(seconds=890) < waiting["run_at"] - waiting["updated_at"] < timedelta(seconds=1100)
    assert waiting["attempts"] == 0
    assert buried["attempts"] == 1
    assert "answered 410" in buried["error"]["message"]


async def test_a_task_that_asks_for_an_inner_address_harms_no_other(store: Store, settings: Settings) -> None:
    async with serving([answer()]) as server, running(store, settings, **HTTP) as line:
        inner, outer, wrong = await line.enqueue(
            "http.request", {"url": "http://169.254.169.254/latest/meta-data/"}, {"url": server.url}, {"uri": "x"}
        )
        assert (await line.until(outer, "SUCCESS"))["result"]["status"] == 200
        refused = await line.until(inner, "CRITICAL_ERROR")
        assert "169.254.169.254 is link-local" in refused["error"]["message"]
        await line.until(wrong, "ERROR", "CRITICAL_ERROR")
