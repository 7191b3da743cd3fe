"""The simulation: a few of its seeds, that a seed always gives the same run, and that broken statements are noticed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from docs.models import claims, ordering, waits
from docs.models.checker import replay
from penstock.brokers.base import Outgoing
from penstock.protocol.errors import Unavailable
from tests.simulation.__main__ import Databases, databases, simulate
from tests.simulation.checks import Checks, Violation
from tests.simulation.database import Bridge
from tests.simulation.loop import SimulatedLoop
from tests.simulation.plan import draw_plan, read_plan
from tests.simulation.queues import QueueService
from tests.simulation.traces import lives

_SEEDS = 3


@pytest.fixture(scope="module")
def made() -> Iterator[Databases]:
    with databases() as made:
        yield made


def test_all_properties_hold_and_a_seed_gives_one_run(made: Databases) -> None:
    """Whatever ran before it in the same process, and however long its statements take."""
    runs = {outcome["seed"]: outcome for outcome in simulate(made.make(), f"--seeds={_SEEDS}")}
    assert [outcome["problem"] for outcome in runs.values()] == [None] * _SEEDS
    assert all(outcome["succeeded"] > 3 for outcome in runs.values())
    assert sum(outcome["kills"] for outcome in runs.values()) > _SEEDS
    again = list(simulate(made.make(), f"--seeds={_SEEDS}", "--backwards", "--lag"))
    assert [outcome["seed"] for outcome in again] == [*reversed(runs)]
    assert {outcome["seed"]: outcome["digest"] for outcome in again} == {s: one["digest"] for s, one in runs.items()}


def test_statements_that_one_commit_frees_go_on_in_the_order_in_which_they_came(made: Databases) -> None:
    bridge = Bridge(made.make())
    for statement in ("create table sim.held (id int)", "insert into sim.held values (1), (2)"):
        bridge.ask(statement)
    holder, first, second = (bridge.take("test") for _ in range(3))
    bridge.start(holder, "begin")
    bridge.start(holder, "update sim.held set id = id")
    update = "update sim.held set id = id where id = $1 returning (select pg_sleep($2)), nextval('sim.uuid') as number"
    waiting = [bridge.start(first, update, (1, 0.1)), bridge.start(second, update, (2, 0.0))]
    assert not any(pending.work.done() for pending in waiting)
    bridge.start(holder, "commit")
    assert [pending.work.result()[0]["number"] for pending in waiting] == [1, 2]


@pytest.mark.parametrize(("seconds", "is_doubled"), [(1, True), (5, False)])
def test_only_a_task_that_two_workers_held_at_once_may_run_a_step_twice(seconds: float, is_doubled: bool) -> None:
    async def pause() -> None:
        return None

    async def deliver_twice(queues: QueueService) -> None:
        queue = queues.queue("penstock-outbound", "outbound")
        await queue.send([Outgoing('[{"method": "stepped", "id": "7:11:x"}]'), Outgoing('{"id": "8:12:x"}')])
        queues.fault_share = 1.0
        while not queues.held_until:
            await asyncio.sleep(0.1)
            with suppress(Unavailable):
                await queue.receive(wait_seconds=0, visibility_seconds=4)
        queues.fault_share = 0.0
        await asyncio.sleep(seconds)
        assert await queue.receive(wait_seconds=0, visibility_seconds=4)

    queues = QueueService(random.Random(3), pause)
    loop = SimulatedLoop()
    loop.run_until_complete(deliver_twice(queues))
    loop.close()
    checks = Checks(cast(Any, None), queues)
    checks.step_returns(7, 11, "a", 11)
    checks.step_returns(9, 13, "a", 13)
    with pytest.raises(Violation, match="step a of task 9 runs again after its report"):
        checks.step_begins(9, 14, "a")
    with nullcontext() if is_doubled else pytest.raises(Violation, match="step a of task 7 runs again"):
        checks.step_begins(7, 12, "a")


def test_models_can_do_what_the_simulated_processes_did(made: Databases) -> None:
    """Every task alone against the model of claims or of waits, every ordering key against that of keys."""
    replayed = Counter[str]()
    for outcome in simulate(made.make(), "--first=56", "--seeds=4", "--steps=15", "--traces"):
        assert outcome["problem"] is None
        for model, observations in lives(outcome["trace"], outcome["retried"]):
            place = replay(model, observations)
            assert place is None, (outcome["seed"], model.name, observations[: place + 1])
            replayed[model.name] += 1
    assert set(replayed) == {"claims", "ordering", "waits"}
    assert replayed.total() > 20


def test_a_model_cannot_do_what_must_not_happen() -> None:
    assert replay(claims.model(), [("ACQUIRED", 1, 1), ("ERROR", 1, 1), ("ACQUIRED", 1, 2)]) == 2
    assert replay(waits.model(), [("ACQUIRED", 1, 1), ("WAITING", 1, 1), ("ACQUIRED", 2, 2)]) == 2
    assert replay(ordering.model(2), [("SCHEDULED", ""), ("SCHEDULED", "WAITING"), ("SCHEDULED", "SCHEDULED")]) == 2


@pytest.mark.parametrize(
    "mutation",
    [
        "a result of an old claim counts",
        "an attempt counts twice",
        "all of an ordering key start at once",
        "finished steps are not carried",
        "a body's keyed tasks are stored side by side",
        "packed messages are held to the limit of clients",
    ],
)
def test_a_broken_statement_or_module_is_noticed(made: Databases, mutation: str) -> None:
    """By one of twenty seeds; from the first of these on, one of the next three notices any of them today."""
    *_, last = simulate(
        made.make(), "--first=5", "--seeds=20", "--steps=10", "--until-failure", f"--mutation={mutation}"
    )
    assert last["problem"] is not None
    assert last["history"][-1].strip()


def test_a_failing_plan_is_shrunk_to_one_that_still_fails(made: Databases, tmp_path: Path) -> None:
    written = tmp_path / "plan.json"
    mutation = "--mutation=an attempt counts twice"
    (found,) = simulate(made.make(), f"--shrink={written}", "--first=3", "--steps=8", mutation)
    smallest = read_plan(written)
    assert len(smallest.calls) == 1
    assert not smallest.kills
    assert not smallest.holds
    (again,) = simulate(made.make(), f"--plan={written}", mutation)
    assert again["problem"] == found["problem"]


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = draw_plan(3, 40)
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["seed"] == "3"
