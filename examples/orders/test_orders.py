"""The shop survives its workers: one reservation, one charge and one shipment, wherever they die."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.orders import actions, providers
from examples.orders.app import app
from examples.orders.database import Order, Stock
from penstock.testing.faults import WorkerCrash
from penstock.testing.pipeline import Pipeline

LARGE = actions.APPROVAL_CENTS + 1


class Services:
    """Counts what card processor and carrier are asked. dies: the calls in which the worker dies, once each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: Counter[str] = Counter()
        self.dies: set[str] = set()
        for module, name in (
            (actions, "reserve"), (providers, "charge_card"), (providers, "order_shipment"), (actions, "close"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name: str, function: Any) -> Any:
        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.asked[name] += 1
            answer = await function(*args, **kwargs)
            self._die(name)
            return answer

        return counted

    def _die(self, place: str) -> None:
        if place in self.dies:
            self.dies.remove(place)
            raise WorkerCrash


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Services:
    return Services(monkeypatch)


@pytest.fixture
async def http(penstock_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setenv("DATABASE_URL", penstock_pipeline.database_url)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client,
    ):
        yield client


async def order(http: httpx.AsyncClient, cents: int) -> str:
    """Order a kettle; returns the path of the order."""
    answer = await http.post("/orders", params={"item": "kettle", "cents": cents})
    assert answer.status_code == 201
    return f"/orders/{answer.json()['order']}"


async def finish(pipeline: Pipeline) -> None:
    """Run what is due, and what follows the death of a worker after its message's visibility timeout."""
    await pipeline.drain()
    pipeline.clock.advance(minutes=5)
    await pipeline.drain()


ONE_EACH = {"reserve": 1, "charge_card": 1, "order_shipment": 1, "close": 1}
BETWEEN = [None, {"after_step": "reserve"}, {"after_step": "charge"}, {"after_step": "ship"}, {"before_answer": True}]


@pytest.mark.parametrize("place", BETWEEN)
async def test_an_order_is_charged_once_wherever_its_worker_dies_between_two_steps(
    place: dict[str, Any] | None, http: httpx.AsyncClient, penstock_pipeline: Pipeline, services: Services
) -> None:
    path = await order(http, LARGE)
    await http.post(f"{path}/approval", params={"approved": True, "by": "ann"})
    if place is not None:
        penstock_pipeline.crash("fulfil", **place)
    await finish(penstock_pipeline)
    assert (await http.get(path)).json() == {
        "state": "shipped", "payment": "payment-order-1", "shipment": "shipment-order-1",
    }  # fmt: skip
    assert services.asked == ONE_EACH
    (task,) = penstock_pipeline.enqueued("fulfil")
    assert (task.state, task.attempts) == ("SUCCESS", 1)


@pytest.mark.parametrize("place", ["reserve", "charge_card", "order_shipment"])
async def test_a_worker_that_dies_within_a_step_asks_again_by_the_same_reference(
    place: str, http: httpx.AsyncClient, penstock_pipeline: Pipeline, services: Services
) -> None:
    path = await order(http, 1999)
    services.dies = {place}
    await finish(penstock_pipeline)
    assert (await http.get(path)).json()["payment"] == "payment-order-1"
    assert services.asked == {**ONE_EACH, place: 2}
    async with app.state.sessions() as session:
        assert (await session.get(Stock, 1)).item == "kettle"


async def test_a_large_order_waits_for_its_approval_and_spends_no_attempt(
    http: httpx.AsyncClient, penstock_pipeline: Pipeline, services: Services
) -> None:
    path = await order(http, LARGE)
    await penstock_pipeline.drain()
    assert services.asked == {"reserve": 1}
    assert (await http.get(path)).json()["state"] == "new"
    penstock_pipeline.clock.advance(days=2)
    await http.post(f"{path}/approval", params={"approved": False, "by": "ann"})
    await penstock_pipeline.drain()
    assert (await http.get(path)).json() == {"state": "declined", "payment": None, "shipment": None}
    assert services.asked == {"reserve": 1, "close": 1}
    assert (await http.post(f"{path}/approval", params={"approved": True, "by": "bob"})).status_code == 409
    (task,) = penstock_pipeline.enqueued("fulfil")
    assert (task.state, task.attempts) == ("SUCCESS", 1)


async def test_an_order_that_nobody_approves_is_declined_after_three_days(
    http: httpx.AsyncClient, penstock_pipeline: Pipeline, services: Services
) -> None:
    path = await order(http, LARGE)
    await penstock_pipeline.drain()
    penstock_pipeline.clock.advance(days=3, seconds=1)
    await penstock_pipeline.drain()
    assert (await http.get(path)).json()["state"] == "declined"


async def test_a_declined_card_closes_the_order_without_another_try(
    http: httpx.AsyncClient, penstock_pipeline: Pipeline, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "APPROVAL_CENTS", 10_000_000)
    path = await order(http, 2_000_000)
    await penstock_pipeline.drain()
    assert (await http.get(path)).json()["state"] == "declined"
    assert services.asked == {"reserve": 1, "charge_card": 1, "close": 1}


async def test_the_requests_of_the_page_are_answered_and_its_commands_are_there(
    http: httpx.AsyncClient, penstock_pipeline: Pipeline
) -> None:
    from tests.command_lines import find_command, options_of

    page = Path(__file__).with_name("README.md").read_text("utf-8")
    requests = re.findall(r"^curl (-X POST )?'?http://127.0.0.1:8001([^'\s]+)'?$", page, re.MULTILINE)
    assert len(requests) == page.count("\ncurl ") == 4
    for posted, path in requests:
        answer = await http.request("POST" if posted else "GET", path)
        assert answer.is_success, answer.text
        await penstock_pipeline.drain()
    assert (await http.get("/orders/2")).json()["state"] == "shipped"
    commands = re.findall(r"(?:^|\()penstock ([^)&\n\"]+)", page, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        found, _ = find_command(command.split())
        assert set(re.findall(r"--[\w-]+", command)) <= options_of(found), command


async def test_an_order_that_is_not_stored_has_no_task(
    http: httpx.AsyncClient, penstock_pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with app.state.sessions.begin() as session:
        await actions.fulfil.with_options(unique_key="order-1").enqueue_in(session, 1, "kettle", 1)
        session.add(Order(item="kettle", cents=1))
        await session.flush()
        await session.rollback()
    assert not penstock_pipeline.enqueued()
    assert (await http.get("/orders/1")).status_code == 404
