"""The signal for scaling: counted over a real Postgres, exported by the supervisor, answered by the api."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api import scaling
from penstock.api.keys import CreateKey, create_key
from penstock.api.process import Api
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.limits.model import RouteSetParams
from penstock.limits.scaling import OUTBOUND, RouteLoad, read_route_loads
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.api_key import Permission
from penstock.protocol.task import NewTask
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.supervisor.gauges import Gauges
from penstock.tasks import enqueue as enqueuing
from penstock.tasks import settle
from tests.integration.apis import running
from tests.integration.doors import postgres_away, sample
from tests.integration.rules import delete_route, set_limits, set_route

PAGE = (Path(__file__).parents[3] / "docs" / "autoscaling.md").read_text("utf-8")


async def enqueue(store: Store, *tasks: NewTask) -> None:
    async with store.transaction() as session:
        await enqueuing.enqueue(session, tasks)


async def route(store: Store, name: str, *actions: str, position: int = 0, **labels: str) -> None:
    async with store.transaction() as session:
        await set_route(session, RouteSetParams(name, f"queue-{name}", actions, labels, position))


async def limit(store: Store, action: str, **change: Any) -> None:
    async with store.transaction() as session:
        await set_limits(session, action, change)


async def loads(store: Store) -> dict[str, RouteLoad]:
    async with store.session() as session:
        return {load.name: load for load in await read_route_loads(session)}


async def counts(store: Store) -> dict[str, tuple[int, int]]:
    """(waiting, in flight) by load."""
    return {name: (load.waiting, load.in_flight) for name, load in (await loads(store)).items()}


async def tell(store: Store, **times: tuple[int, float]) -> None:
    async with store.session() as session:
        await settle.note_run_times(session, times)


@pytest.fixture
def scheduler(store: Store, outbound: SqsQueue, settings: Settings) -> Scheduler:
    # Every route leads to the one queue there is; which it is does not matter here.
    settings = settings.model_copy(update={"in_flight_floor": 3, "in_flight_limit": 3})
    return Scheduler(store=store, outbound=outbound, settings=settings, open_queue=lambda _name, _label: outbound)


# Counting


async def test_an_empty_pipeline_has_one_lane_with_nothing_in_it(store: Store) -> None:
    assert await loads(store) == {OUTBOUND: RouteLoad(OUTBOUND, [])}


async def test_what_is_due_waits_and_what_is_not_due_expired_or_held_back_does_not(store: Store, sql: Any) -> None:
    await limit(store, "paused", paused=True)
    await enqueue(
        store, NewTask("a"), NewTask("a", priority=9), NewTask("b", priority=-9), NewTask("a", delay_seconds=3600),
        NewTask("gone"), NewTask("paused"), NewTask("a", ordering_key="k"), NewTask("a", ordering_key="k"),
    )  # fmt: skip
    await sql.execute("update penstock.task set expires_at = now() - interval '1 second' where action = 'gone'")
    await sql.execute("update penstock.task set run_at = now() - interval '90 seconds' where action = 'b'")
    (load,) = (await loads(store)).values()
    assert {work.action: work.waiting for work in load.actions} == {"a": 3, "b": 1}
    assert (load.waiting, load.in_flight) == (4, 0)
    assert 90 <= load.oldest_seconds < 600


async def test_each_task_counts_in_the_lane_that_it_will_go_by_before_and_after_it_is_put_aside(
    store: Store, scheduler: Scheduler
) -> None:
    await route(store, "video", "video.*")
    await route(store, "urgent", "*", position=-1, tier="gold")
    await enqueue(
        store, *(NewTask("video.cut") for _ in range(5)),
        *(NewTask("video.cut", labels='{"tier":"gold","for":"x"}') for _ in range(6)),
        *(NewTask("mail") for _ in range(4)),
    )  # fmt: skip
    found = await counts(store)
    assert found == {OUTBOUND: (4, 0), "urgent": (6, 0), "video": (5, 0)}
    async with asyncio.timeout(60):
        # Each has a window of three: the backlog and the tasks in flight change, the sum does not.
        while found != {OUTBOUND: (1, 3), "urgent": (3, 3), "video": (2, 3)}:
            assert {name: sum(of) for name, of in found.items()} == {OUTBOUND: 4, "urgent": 6, "video": 5}
            if not await scheduler.run_once():
                await asyncio.sleep(0.01)
            found = await counts(store)


async def test_what_waits_for_a_limit_does_not_wait_for_workers(store: Store, scheduler: Scheduler) -> None:
    await limit(store, "slow", max_in_flight=2)
    await enqueue(store, *(NewTask("slow") for _ in range(10)))
    assert await counts(store) == {OUTBOUND: (0, 0)}
    async with asyncio.timeout(60):
        while await counts(store) != {OUTBOUND: (0, 2)}:
            if not await scheduler.run_once():
                await asyncio.sleep(0.01)


async def test_counting_stops_at_its_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.limits.scaling.COUNTED", 7)
    await enqueue(store, *(NewTask("a", priority=n % 3) for n in range(30)))
    assert await counts(store) == {OUTBOUND: (7, 0)}


# Run times


async def test_slots_follow_the_run_times_that_workers_told(store: Store, sql: Any) -> None:
    await enqueue(store, *(NewTask("a") for _ in range(100)))
    assert (await loads(store))[OUTBOUND].slots() == 1, "to learn how long they run"
    await tell(store, a=(60, 120.0))  # two of two seconds ran at once during the last minute
    load = (await loads(store))[OUTBOUND]
    assert (load.actions[0].running, load.actions[0].run_seconds) == (2.0, 2.0)
    assert load.slots() == pytest.approx(2 + 98 * 2 / 60)
    await sql.execute("update penstock.tally set at = at - interval '1 hour' where event = 'RAN'")
    load = (await loads(store))[OUTBOUND]
    assert (load.actions[0].running, load.actions[0].run_seconds) == (0.0, 2.0), "the run time is remembered"
    assert load.slots() == pytest.approx(100 * 2 / 60)


async def test_what_ran_counts_for_its_lane_though_none_of_it_is_there_at_this_instant(store: Store) -> None:
    await route(store, "video", "video.*")
    await tell(store, **{"video.cut": (600, 30.0), "mail": (10, 6.0)})
    found = await loads(store)
    assert {name: load.slots() for name, load in found.items()} == {OUTBOUND: 0.1, "video": 0.5}


async def test_an_action_split_by_labels_is_shared_out_by_what_is_there(store: Store) -> None:
    await route(store, "gold", "*", tier="gold")
    await tell(store, a=(240, 240.0))
    await enqueue(
        store, *(NewTask("a", labels='{"tier":"gold"}') for _ in range(30)), *(NewTask("a") for _ in range(10))
    )
    found = await loads(store)
    assert {name: load.actions[0].running for name, load in found.items()} == {OUTBOUND: 1.0, "gold": 3.0}


async def test_of_long_handlers_no_more_run_than_are_in_flight(store: Store, scheduler: Scheduler) -> None:
    await tell(store, a=(3, 1800.0))  # three ended within the minute, by chance
    await enqueue(store, NewTask("a"))
    await scheduler.run_once()
    assert (await loads(store))[OUTBOUND].slots() == 1


# Metrics


async def test_the_supervisor_exports_each_lane_and_takes_back_a_route_that_is_gone(store: Store) -> None:
    await route(store, "video", "video.*")
    await enqueue(store, NewTask("video.cut"), NewTask("a"), NewTask("a"))
    gauges = Gauges(store=store, queues={}, dead_letters={})
    await gauges.run_once()
    assert sample("penstock_scaling_waiting", route=OUTBOUND) == 2
    assert sample("penstock_scaling_waiting", route="video") == 1
    assert sample("penstock_scaling_in_flight", route="video") == 0
    assert sample("penstock_scaling_slots", route="video") == 1
    assert sample("penstock_scaling_oldest_seconds", route="video") >= 0
    async with store.transaction() as session:
        await delete_route(session, "video")
    gauges._rest_until = float("-inf")  # however long the first look took
    await gauges.run_once()
    assert sample("penstock_scaling_waiting", route=OUTBOUND) == 3
    assert not any(
        found.labels.get("route") == "video"
        for gauge in ("waiting", "in_flight", "oldest_seconds", "slots")
        for family in _families(f"penstock_scaling_{gauge}")
        for found in family.samples
    )


def _families(name: str) -> list[Any]:
    from penstock.runtime import metrics

    return [family for family in metrics.REGISTRY.collect() if family.name == name]


# Over HTTP


@pytest.fixture
async def api(store: Store, settings: Settings) -> AsyncIterator[Api]:
    async with running(store, settings) as api:
        yield api


@pytest.fixture
async def http(api: Api) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=api.url) as client:
        yield client


@pytest.fixture
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(scaling, "_REST", 0)


async def test_a_lane_is_plain_numbers_as_the_page_shows_and_all_lanes_stand_by_name(
    store: Store, http: httpx.AsyncClient
) -> None:
    (shown,) = re.findall(r"```json load\n(.*?)```", PAGE, re.DOTALL)
    await route(store, "video", "video.*")
    await enqueue(store, NewTask("video.cut"), *(NewTask("a") for _ in range(1201)))
    await tell(store, a=(30, 60.0))  # one of two seconds ran at once
    answer = await http.get("/scaling")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    routes = answer.json()["routes"]
    assert list(routes) == [OUTBOUND, "video"]
    assert list(routes[OUTBOUND]) == list(json.loads(shown))
    assert 0 <= routes[OUTBOUND]["oldest_seconds"] < 600
    assert routes[OUTBOUND] | {"oldest_seconds": 0} == json.loads(shown) | {"oldest_seconds": 0}
    assert (await http.get("/scaling/video")).json() == routes["video"]
    hurried = (await http.get(f"/scaling/{OUTBOUND}", params={"drain_seconds": 10})).json()
    assert hurried["slots"] == 1 + 1200 * 2 / 10


async def test_one_count_answers_all_who_ask_at_about_the_same_time(
    store: Store, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "_FRESH_SECONDS", 3600.0)
    monkeypatch.setattr(scaling, "_REST_SECONDS", 3600.0)
    assert (await http.get(f"/scaling/{OUTBOUND}")).json()["tasks"] == 0
    await enqueue(store, NewTask("a"))
    assert (await http.get(f"/scaling/{OUTBOUND}")).json()["tasks"] == 0


@pytest.mark.usefixtures("always_fresh")
async def test_a_later_question_is_counted_anew(store: Store, http: httpx.AsyncClient) -> None:
    for tasks in range(3):
        assert (await http.get(f"/scaling/{OUTBOUND}")).json()["tasks"] == tasks
        await enqueue(store, NewTask("a"))


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/scaling/none", 404, "No such route: none"),
        ("/scaling/video%00", 404, "No such route"),
        ("/scaling?drain_seconds=soon", 400, "must be seconds from 1 to 86400, not 'soon'"),
        ("/scaling?drain_seconds=nan", 400, "must be seconds from 1 to 86400"),
        ("/scaling?drain_seconds=0", 400, "must be seconds from 1 to 86400"),
        ("/scaling?drain_second=5", 400, "drain_second is unknown here; drain_seconds is known"),
    ],
)
async def test_a_question_that_makes_no_sense_is_told_why(
    http: httpx.AsyncClient, path: str, status: int, message: str
) -> None:
    answer = await http.get(path)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_only_this_machine_asks_without_keys(http: httpx.AsyncClient) -> None:
    answer = await http.get("/scaling", headers={"Host": "evil.example"})
    assert (answer.status_code, "loopback" in answer.json()["error"]["message"]) == (403, True)
    assert (await http.post("/scaling")).status_code == 405


async def test_where_keys_are_asked_for_one_for_scaling_is_enough(store: Store, settings: Settings) -> None:
    async with store.session() as session:
        made = {
            permission: await create_key(session, CreateKey(permission.value, [permission]))
            for permission in Permission
        }
    async with (
        running(store, settings.model_copy(update={"api_require_keys": True})) as api,
        httpx.AsyncClient(base_url=api.url) as client,
    ):
        assert (await client.get("/scaling")).status_code == 401
        statuses = {}
        for permission, key in made.items():
            assert key is not None
            statuses[permission] = (await client.get("/scaling", headers={"X-API-Key": key.key})).status_code
            assert (
                await client.get("/scaling", headers={"Authorization": f"Bearer {key.key}"})
            ).status_code == statuses[permission]
    allowed = {Permission.READ, Permission.ADMIN, Permission.SCALING}
    assert statuses == {permission: 200 if permission in allowed else 403 for permission in Permission}


async def test_questions_count_towards_the_rate(store: Store, settings: Settings) -> None:
    limited = settings.model_copy(update={"api_rate_limit": 0.001, "api_rate_burst": 2})
    async with running(store, limited) as api, httpx.AsyncClient(base_url=api.url) as client:
        assert [(await client.get("/scaling")).status_code for _ in range(3)] == [200, 200, 429]


@pytest.mark.usefixtures("always_fresh")
async def test_a_database_that_is_away_is_told_as_such(
    http: httpx.AsyncClient, postgres: EmbeddedPostgres, database_url: str
) -> None:
    assert (await http.get("/scaling")).status_code == 200
    async with postgres_away(postgres, database_url):
        answer = await http.get("/scaling")
    assert answer.status_code == 503
    assert "try again" in answer.json()["error"]["message"]
