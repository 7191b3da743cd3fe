"""Workflows over the real statements: order, results, failure policies, children, cancel and retry."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidParams, WorkflowConflict, WorkflowNotFound
from penstock.settings import Settings
from penstock.store import Store
from tests.integration.lives import Broken, Lives, Spawned


@pytest.fixture
def lives(store: Store, settings: Settings) -> Lives:
    return Lives(store, settings)


async def test_a_chain_runs_in_order_and_each_step_is_given_the_result_before(lives: Lives) -> None:
    flow = await lives.create(
        chain=[{"action": "a"}, {"action": "b", "results_as": "before"}, {"action": "c", "results_as": "before"}]
    )
    await lives.live(lambda action, payload: action * 2)
    assert lives.ran == [("a", {}), ("b", {"before": {"a": "aa"}}), ("c", {"before": {"b": "bb"}})]
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_group_runs_side_by_side_and_what_follows_waits_for_all_of_it(lives: Lives) -> None:
    flow = await lives.create(
        chain=[[{"action": "part", "payload": {"n": n}} for n in range(3)], {"action": "sum", "results_as": "parts"}]
    )
    first = await lives.claim()
    assert [task.action for task in first] == ["part"] * 3
    await lives.work(first[:2], lambda _, payload: payload["n"])
    await lives.advance()
    assert await lives.claim() == []
    await lives.work(first[2:], lambda _, payload: payload["n"])
    await lives.live()
    assert lives.ran[-1] == ("sum", {"parts": {"part": 0, "part-2": 1, "part-3": 2}})
    assert (await lives.look(flow)).state == "SUCCESS"
