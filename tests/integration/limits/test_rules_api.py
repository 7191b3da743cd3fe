"""Limits, pauses and routes over HTTP, by the client, and through the inbound queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.api.process import Api
from penstock.brokers.sqs import SqsQueue
from penstock.client.client import Client
from penstock.db.pool import Store
from penstock.protocol.errors import InvalidParams, RpcError
from penstock.settings.model import Settings
from penstock.submitter import Submitter
from tests.integration.apis import running
from tests.integration.doors import put, rejected, request
from tests.integration.limits.test_limits import limits_of
from tests.integration.rules import list_actions, list_routes


@pytest.fixture
async def api(store: Store, settings: Settings) -> AsyncIterator[Api]:
    async with running(store, settings) as api:
        yield api


async def test_limits_are_set_shown_and_taken_away_by_the_client(api: Api) -> None:
    def talk() -> None:
        with Client(api.url) as client:
            made = client.set_limits("mail", max_in_flight=5, rate=120, per="minute", burst=10)
            assert made | {"updated_at": None} == {
                "action": "mail", "paused": False, "max_in_flight": 5, "rate": 2.0, "burst": 10,
                "key_max_in_flight": None, "key_rate": None, "key_burst": None, "in_flight": 0, "updated_at": None,
            }  # fmt: skip
            assert made["updated_at"].endswith("Z")
            assert client.pause("mail")["paused"] is True
            assert client.pause("other")["paused"] is True
            assert [(row["action"], row["max_in_flight"]) for row in client.actions()] == [("mail", 5), ("other", None)]
            assert client.resume("other") == client.call("action.get", {"action": "never-heard-of"}) | {
                "action": "other"
            }
            client.set_limits("mail", max_in_flight=None, rate=None, burst=None)
            assert client.resume("mail")["updated_at"] is None
            assert client.actions() == []
            with pytest.raises(InvalidParams, match="pause"):
                client.set_limits("mail", max_in_flight=0)

    await asyncio.to_thread(talk)


async def test_routes_are_set_listed_and_deleted_by_the_client(api: Api) -> None:
    def talk() -> None:
        with Client(api.url) as client:
            client.set_route("video", "queue-v", ["video.*"], {"size": "big"}, 3)
            client.set_route("all", "queue-a", position=9)
            client.set_route("video", "queue-w", ["video.*"], {"size": "big"}, 3)
            assert client.routes() == [
                {"name": "video", "queue": "queue-w", "actions": ["video.*"], "labels": {"size": "big"}, "position": 3,
                 "in_flight": 0},
                {"name": "all", "queue": "queue-a", "actions": ["*"], "labels": {}, "position": 9, "in_flight": 0},
            ]  # fmt: skip
            client.delete_route("video")
            with pytest.raises(RpcError) as caught:
                client.delete_route("video")
            assert (caught.value.code, caught.value.data) == (-32011, {"name": "video"})

    await asyncio.to_thread(talk)


async def test_rules_are_changed_through_the_inbound_queue_and_what_cannot_be_is_kept(
    store: Store, inbound: SqsQueue, settings: Settings
) -> None:
    await put(
        inbound, request("action.set", {"action": "mail", "rate": 5}), request("action.pause", {"action": "other"}),
        request("route.set", {"name": "v", "queue": "q", "actions": ["v.*"]}),
        request("route.delete", {"name": "none"}), request("action.list", {}),
    )  # fmt: skip
    submitter = Submitter(store=store, inbound=inbound, settings=settings)
    while await submitter.run_once():
        pass
    async with store.session() as session:
        actions = await list_actions(session)
        (route,) = await list_routes(session)
    assert {record.action: limits_of(record) for record in actions} == {
        "mail": {"rate": 5.0}, "other": {"paused": True},
    }  # fmt: skip
    assert (route.name, route.queue, route.actions, route.in_flight) == ("v", "q", ["v.*"], 0)
    reasons = sorted(reason for _, _, reason in await rejected(store))
    assert reasons == ["No such route: none", "action.list only answers, and a queue has no way back: ask over HTTP"]
