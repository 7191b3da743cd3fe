"""What a worker asks the api about its claims, and how it bears an api that does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.client.async_client import AsyncClient
from penstock.protocol.requests import ClaimId, parse_claim_id
from penstock.settings.model import load_settings
from penstock.worker.cancellation_poll import CancellationPoll
from penstock.worker.handlers.context import Cancellation, Context, TaskCancelled


class Api:
    """Answers as configured, and notes what it is asked."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.status = 200
        self.text: str | None = None
        self.asked: list[Any] = []
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((await request.json())["params"]["claims"])
        self.keys.append(request.headers.get("Authorization"))
        if self.text is not None:
            return web.Response(status=self.status, text=self.text)
        return web.json_response({"jsonrpc": "2.0", "result": {"lost": self.lost}, "id": 1})


def attempt(claim_id: str, ran_seconds: float) -> Any:
    claim = parse_claim_id(claim_id)
    return SimpleNamespace(claim=claim, started_at=monotonic() - ran_seconds, is_lost=False)


@asynccontextmanager
async def asking(api: Api, attempts: list[Any]) -> AsyncIterator[tuple[Any, list[Any]]]:
    """A function that asks once, and what was found lost."""
    app = web.Application()
    app.router.add_post("/rpc", api.answer)
    server = TestServer(app)
    await server.start_server()
    lost: list[Any] = []
    settings = load_settings(control_api_key="secret", cancel_poll_seconds=5.0)
    control = CancellationPoll(settings, str(server.make_url("/")), lambda: iter(attempts), lost.append)
    try:
        async with AsyncClient(str(server.make_url("/")), "secret") as client:
            yield lambda: control.poll_once(client), lost
    finally:
        await server.close()


async def test_one_call_asks_about_all_that_ran_for_long_enough() -> None:
    api = Api()
    attempts = [
        attempt("1:1", 6),
        attempt("2:1", 1),
        attempt("3:1:0123456789abcdef0123", 60),
        SimpleNamespace(claim=ClaimId(4, 1), started_at=0.0, is_lost=False),
    ]
    api.lost = ["3:1", "99:9"]
    async with asking(api, attempts) as (ask, lost):
        await ask()
        assert lost == [attempts[2]]
        attempts[2].is_lost = True
        api.lost = []
        await ask()
        assert lost == [attempts[2]]
    assert api.asked == [["1:1", "3:1"], ["1:1"]]
    assert api.keys == ["Bearer secret"] * 2


async def test_nothing_is_asked_while_nothing_runs_long() -> None:
    api = Api()
    async with asking(api, [attempt("1:1", 1)]) as (ask, _):
        assert 4.5 <= await ask() <= 5.5
    assert api.asked == []


async def test_more_claims_than_the_api_takes_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.cancellation_poll._MAX_CLAIMS", 2)
    api = Api()
    async with asking(api, [attempt(f"{n}:1", 9) for n in range(5)]) as (ask, _):
        await ask()
    assert [len(claims) for claims in api.asked] == [2, 2, 1]


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        (
            401,
            '{"jsonrpc":"2.0","error":{"code":-32003,"message":"A valid API key is needed"},"id":null}',
            "valid API key",
        ),
        (502, "<html>bad gateway</html>", "502"),
        (200, '{"result":{"lost":[1]}}', "not as a Penstock api"),
    ],
)
async def test_an_api_that_does_not_answer_costs_one_line_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch, status: int, text: str, reason: str
) -> None:
    capture = structlog.testing.LogCapture()
    monkeypatch.setattr("penstock.worker.cancellation_poll.log", structlog.wrap_logger(None, processors=[capture]))
    api = Api()
    api.status, api.text = status, text
    attempts = [attempt("1:1", 9)]
    async with asking(api, attempts) as (ask, lost):
        for _ in range(3):
            await ask()
        assert lost == []
        assert [entry["event"] for entry in capture.entries] == ["control_away"]
        assert reason in capture.entries[0]["reason"]
        assert "secret" not in str(capture.entries)
        api.text, api.lost = None, ["1:1"]
        await ask()
        assert lost == attempts
    assert [entry["event"] for entry in capture.entries] == ["control_away", "control_back"]


async def test_an_api_that_cannot_be_reached_is_asked_ever_more_seldom() -> None:
    settings = load_settings(cancel_poll_seconds=5.0)
    running = [attempt("1:1", 9)]
    control = CancellationPoll(settings, "http://127.0.0.1:1/rpc", lambda: iter(running), lambda lost: None)
    async with AsyncClient("http://127.0.0.1:1/rpc") as client:
        seconds = [await control.poll_once(client) for _ in range(4)]
    assert 5 <= seconds[0] <= 10
    assert 30 <= seconds[-1] <= 60


# The handler's side


def test_a_context_without_a_worker_is_never_cancelled() -> None:
    ctx = Context(1, 2, "act")
    assert ctx.cancelled is False
    ctx.raise_if_cancelled()


async def test_a_cancelled_handler_sees_it_waits_for_it_and_may_raise() -> None:
    cancellation = Cancellation()
    ctx = Context(1, 2, "act", cancellation=cancellation)
    waiting = asyncio.create_task(ctx.wait_cancelled())
    given_up = asyncio.create_task(ctx.wait_cancelled())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    cancellation.set()
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(ctx.wait_cancelled(), 5)
    assert ctx.cancelled
    with pytest.raises(TaskCancelled, match="task 1 is no longer claim 2's"):
        ctx.raise_if_cancelled()


def test_a_loop_of_a_thread_of_its_own_is_woken_too() -> None:
    cancellation = Cancellation()
    ctx = Context(1, 2, "act", cancellation=cancellation)
    thread = threading.Thread(target=lambda: asyncio.run(ctx.wait_cancelled()))
    thread.start()
    while not cancellation._waiting:
        thread.join(0.01)
    cancellation.set()
    thread.join(10)
    assert not thread.is_alive()
