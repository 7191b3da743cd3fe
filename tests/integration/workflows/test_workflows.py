"""Workflows over the real statements: order, results, failure policies, children, cancel and retry."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest

from penstock.db.context import within
from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.db.statements import SQL
from penstock.limits.explain import explain
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.answers import Cause
from penstock.protocol.errors import InvalidParams, PayloadUnavailable, TooSlow, WorkflowConflict, WorkflowNotFound
from penstock.protocol.journal import Entry, StepPlace
from penstock.protocol.reports import Failed, Hints, Report, Stepped, Succeeded, Suspended, Waiting, WaitPolicy
from penstock.protocol.task import EXPIRED, Claimed, Failure, NewTask
from penstock.results.apply import apply_reports
from penstock.settings.model import Settings, load_settings
from penstock.settings.payload_texts import new_key
from penstock.supervisor.duties import expire_some
from penstock.tasks import claim, enqueue, ordering, settle
from penstock.workflows import advance
from tests.integration.lives import Broken, Lives, Spawned


@pytest.fixture
def lives(store: Store) -> Lives:
    return Lives(store, load_settings(retry_base_seconds=0.01, retry_jitter=0))


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


async def test_two_wide_groups_in_a_chain_are_joined_and_the_results_pass_through(lives: Lives) -> None:
    flow = await lives.create(
        chain=[[{"action": "a"}, {"action": "b"}], [{"action": "c", "results_as": "r"}, {"action": "d"}]]
    )
    await lives.live(lambda action, payload: action)
    assert (await lives.steps(flow))["join"].kind == "join"
    assert ("c", {"r": {"a": "a", "b": "b"}}) in lives.ran
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_step_behind_an_ordering_key_is_explained_by_it(lives: Lives, store: Store, sql: Any) -> None:
    await lives.create(steps=[{"action": "a", "ordering_key": "k"}, {"action": "b", "ordering_key": "k"}])
    first, second = [row[0] for row in await sql.fetch("select id from penstock.task order by state = 'WAITING', id")]
    async with store.session() as session:
        found = await explain(session, second)
    assert (found.cause, found.task) == (Cause.ORDERING_KEY, first)


async def test_a_workflow_with_nothing_to_do_is_said_to_have_ended(lives: Lives) -> None:
    made = await lives.ask("workflow.create", steps=[{"action": "a", "over": []}])
    assert (made.state, (await lives.look(made.id)).state) == ("SUCCESS", "SUCCESS")


async def test_a_step_of_items_has_succeeded_as_soon_as_its_children_are_made(lives: Lives) -> None:
    flow = await lives.create(steps=[{"action": "a", "over": [1, 2]}])
    step = (await lives.steps(flow))["a"]
    assert (step.state, step.open_children) == ("SUCCESS", 2)


async def test_children_whose_payloads_are_too_much_together_are_not_made(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workflows.model.MAX_CHILDREN_BYTES", 1000)
    payload = {"text": "x" * 200}
    with pytest.raises(InvalidParams, match="bytes together"):
        await lives.create(steps=[{"action": "a", "over": [0] * 10, "payload": payload}])
    flow = await lives.create(chain=[{"action": "find"}, {"action": "load", "over": "find", "payload": payload}])
    await lives.live(lambda action, _: [0] * 10)
    step = (await lives.steps(flow))["load"]
    assert (step.state, step.children) == ("CRITICAL_ERROR", 0)
    assert "bytes together" in (step.reason or "")


async def test_the_lists_of_one_call_have_so_many_items_together(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workflows.model.MAX_CHILDREN", 10)
    step = {"action": "a", "over": [0] * 6}
    with pytest.raises(InvalidParams, match="steps have lists of 12 items together; the limit is 10"):
        await lives.create(steps=[{"name": "a", **step}, {"name": "b", **step}])
    await lives.create(steps=[{"action": "a", "over": [0] * 10}])


async def test_other_work_goes_on_while_the_children_of_a_long_list_are_made(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "_STEPS_AT_ONCE", 100)
    turns = itertools.count()
    made_at: list[int] = []

    async def other_work() -> None:
        while True:
            latest[0] = next(turns)
            await asyncio.sleep(0)

    def step_task(*given: Any) -> NewTask:
        made_at.append(latest[0])
        return make(*given)

    latest, make = [next(turns)], advance.step_task
    monkeypatch.setattr(advance, "step_task", step_task)
    beside = asyncio.create_task(other_work())
    await lives.create(steps=[{"action": "a", "over": [*range(4000)]}])
    beside.cancel()
    assert len(made_at) == 4000
    assert max(Counter(made_at).values()) <= 100


async def test_a_fan_out_over_a_given_list_hands_on_an_array_in_its_order(lives: Lives) -> None:
    flow = await lives.create(
        chain=[
            {"action": "square", "over": [3, 1, 2], "item_as": "n", "payload": {"unit": "m"}},
            {"action": "sum", "results_as": "r"},
        ]
    )
    await lives.live(lambda _, payload: payload["n"] ** 2 if "n" in payload else sum(payload["r"]["square"]))
    assert ("square", {"unit": "m", "n": 3}) in lives.ran
    assert lives.ran[-1] == ("sum", {"r": {"square": [9, 1, 4]}})
    steps = await lives.steps(flow)
    assert steps["square"].children == 3
    assert steps["square/1"].parent == "square"
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_fan_out_over_the_result_of_a_step(lives: Lives) -> None:
    flow = await lives.create(
        steps=[
            {"action": "find"},
            {"action": "load", "over": "find"},
            {"action": "done", "after": ["load", "find"], "results_as": "r"},
        ]
    )
    await lives.live(lambda action, payload: ["x", "y"] if action == "find" else payload.get("item"))
    assert lives.ran[-1] == ("done", {"r": {"load": ["x", "y"], "find": ["x", "y"]}})
    assert (await lives.look(flow)).state == "SUCCESS"


@pytest.mark.parametrize("found", [[], 7])
async def test_a_fan_out_over_nothing_is_done_at_once_and_over_no_list_fails(lives: Lives, found: Any) -> None:
    flow = await lives.create(chain=[{"action": "find"}, {"action": "load", "over": "find"}, {"action": "done"}])
    await lives.live(lambda action, payload: found)
    record = await lives.look(flow)
    if found == []:
        assert record.state == "SUCCESS"
        assert lives.ran[-1][0] == "done"
    else:
        assert record.state == "FAILED"
        assert (await lives.steps(flow))["load"].reason == "the result of find is no array to fan out over"


async def test_a_step_that_fails_fails_the_workflow_and_what_has_not_started_is_cancelled(lives: Lives) -> None:
    flow = await lives.create(
        steps=[{"action": "a"}, {"action": "b"}, {"action": "c", "after": ["a"]}, {"action": "late", "delay": 60}]
    )
    a, b = await lives.claim()
    await lives.work([a], _break)
    await lives.advance()
    record = await lives.look(flow)
    assert (record.state, record.reason) == ("FAILING", "step a is CRITICAL_ERROR")
    await lives.work([b], lambda *_: None)
    await lives.live()
    record = await lives.look(flow)
    assert (record.state, record.open) == ("FAILED", 0)
    assert {name: step.state for name, step in (await lives.steps(flow)).items()} == {
        "a": "CRITICAL_ERROR", "b": "SUCCESS", "c": "CANCELLED", "late": "CANCELLED",
    }  # fmt: skip


async def test_with_continue_what_follows_runs_and_sees_what_failed(lives: Lives) -> None:
    flow = await lives.create(
        steps=[
            {"action": "good"},
            {"action": "bad", "on_failure": "continue"},
            {"action": "end", "after": ["good", "bad"], "results_as": "results", "errors_as": "errors"},
        ]
    )
    await lives.live(lambda action, payload: _break() if action == "bad" else action)
    action, payload = lives.ran[-1]
    assert action == "end"
    assert payload["results"] == {"good": "good"}
    assert payload["errors"]["bad"]["state"] == "CRITICAL_ERROR"
    assert payload["errors"]["bad"]["error"]["message"] == "broken"
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_compensations_run_one_after_the_other_from_the_last_success_back(lives: Lives) -> None:
    flow = await lives.create(
        chain=[
            {"action": "book", "payload": {"seat": 1}, "compensate": "unbook"},
            {"action": "look"},
            {"action": "pay", "compensate": "refund"},
            {"action": "ship", "on_failure": "compensate"},
        ]
    )
    await lives.live(lambda action, payload: _break() if action == "ship" else f"{action} done")
    assert lives.ran[-2:] == [
        ("refund", {"step": "pay", "payload": {}, "result": "pay done"}),
        ("unbook", {"step": "book", "payload": {"seat": 1}, "result": "book done"}),
    ]
    record = await lives.look(flow)
    assert (record.state, record.compensated) == ("FAILED", True)
    with pytest.raises(WorkflowConflict, match="was undone"):
        await lives.ask("workflow.retry", id=flow)


async def test_a_policy_may_name_one_action_that_undoes_all_that_name_none(lives: Lives) -> None:
    await lives.create(
        chain=[{"action": "a"}, {"action": "b", "compensate": "own"},
               {"action": "c", "on_failure": {"compensate": "common"}}]
    )  # fmt: skip
    await lives.live(lambda action, payload: _break() if action == "c" else None)
    assert [(action, payload.get("step")) for action, payload in lives.ran[3:]] == [("own", "b"), ("common", "a")]


async def test_a_compensation_that_fails_does_not_keep_the_others_from_running_and_can_be_retried(lives: Lives) -> None:
    flow = await lives.create(
        chain=[{"action": "a", "compensate": "undo-a"}, {"action": "b", "compensate": "undo-b"},
               {"action": "c", "on_failure": "compensate"}]
    )  # fmt: skip
    await lives.live(lambda action, payload: _break() if action in ("c", "undo-b") else None)
    assert [action for action, _ in lives.ran] == ["a", "b", "c", "undo-b", "undo-a"]
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 1
    assert (await lives.look(flow)).state == "FAILING"
    await lives.live()
    assert lives.ran[-1][0] == "undo-b"
    assert (await lives.look(flow)).state == "FAILED"
    assert (await lives.counts(flow)) == {"SUCCESS": 4, "CRITICAL_ERROR": 1}


async def test_a_compensation_is_tried_again_without_a_wait_for_its_workflow(lives: Lives) -> None:
    await lives.create(chain=[{"action": "a", "compensate": "u"}, {"action": "b", "on_failure": "compensate"}])
    await lives.work(await lives.claim(), lambda *_: None)
    await lives.advance()
    await lives.work(await lives.claim(), _break)
    await lives.advance()
    (undo,) = await lives.claim()
    await lives.report(Failed(undo.id, undo.claim, None, '{"code": -32000, "message": "m"}', Hints(retry_after=0.0)))
    assert [task.id for task in await lives.claim()] == [undo.id]


async def test_compensations_that_are_retried_still_run_one_by_one(lives: Lives) -> None:
    steps = [{"action": name, "compensate": f"undo-{name}"} for name in "abc"]
    flow = await lives.create(chain=[*steps, {"action": "d", "on_failure": "compensate"}])
    broken = {"d", "undo-c", "undo-a"}
    await lives.live(lambda action, payload: _break() if action in broken else None)
    for overcome in (None, "undo-c", "undo-a"):
        again = sorted(broken - {"d"}, reverse=True)
        assert (await lives.ask("workflow.retry", id=flow)).restarted == len(again)
        broken.discard(overcome or "")
        for action in again:
            tasks = await lives.claim()
            assert [task.action for task in tasks] == [action]
            await lives.work(tasks, lambda action, payload: _break() if action in broken else None)
            await lives.advance()
        assert (await lives.look(flow)).state == "FAILED"
    assert (await lives.steps(flow))["a/undo"].after == ["c/undo"]


async def test_a_step_whose_children_came_by_a_retry_is_undone_behind_them(lives: Lives, store: Store) -> None:
    small = Lives(store, lives.settings.model_copy(update={"payload_limit_bytes": 20}))
    flow = await small.create(
        chain=[{"action": "a", "compensate": "undo-a"}, {"action": "b", "on_failure": "compensate"}]
    )
    child = {"action": "child", "payload": {"text": "x" * 30}, "compensate": "undo-child"}

    def work(action: str, payload: Any) -> None:
        if action == "a":
            raise Spawned(1, [child])
        if action == "b":
            _break()

    await lives.work(await lives.claim(), work)
    await small.advance()
    await lives.ask("workflow.retry", id=flow)
    await lives.live(work)
    assert [action for action, _ in lives.ran] == ["a", "child", "b", "undo-child", "undo-a"]


async def test_children_of_a_step_are_waited_for_and_their_results_handed_on(lives: Lives) -> None:
    flow = await lives.create(chain=[{"action": "scan"}, {"action": "end", "results_as": "r"}])

    def handler(action: str, payload: Any) -> Any:
        if action == "scan":
            raise Spawned("two", [{"action": "child", "payload": {"n": 1}, "name": "one"},
                                  {"action": "parent", "payload": {"n": 2}}])  # fmt: skip
        if action == "parent":
            raise Spawned("p", [{"action": "child", "payload": {"n": 3}}])
        return payload.get("n")

    await lives.live(handler)
    assert lives.ran[-1] == ("end", {"r": {"scan": "two", "scan/one": 1, "scan/1": "p", "scan/1/0": 3}})
    record = await lives.look(flow)
    assert (record.state, record.steps) == ("SUCCESS", 5)


async def test_a_late_result_of_a_lost_claim_makes_no_children_and_a_duplicate_none_twice(
    lives: Lives, sql: Any
) -> None:
    flow = await lives.create(steps=[{"action": "scan"}])
    (lost,) = await lives.claim()
    async with lives.store.session() as session:
        await claim.release(session, [(lost.id, lost.claim)])
    await sql.execute("update penstock.task set run_at = now()")
    (held,) = await lives.claim()

    def handler(action: str, payload: Any) -> Any:
        if action == "scan":
            raise Spawned(None, [{"action": "child"}])
        return None

    await lives.work([lost], handler)
    await lives.advance()
    assert (await lives.look(flow)).steps == 1
    await lives.work(
        [
            held,
        ],
        handler,
    )
    await lives.work([held, lost], handler)
    await lives.live(handler)
    await lives.work([held], handler)
    await lives.live(handler)
    record = await lives.look(flow)
    assert (record.state, record.steps) == ("SUCCESS", 2)


async def test_children_of_a_plain_task_are_plain_tasks(lives: Lives) -> None:
    async with lives.store.session() as session:
        from penstock.protocol.task import NewTask

        await enqueue.enqueue(session, [NewTask("plain")])
    (task,) = await lives.claim()

    def handler(action: str, payload: Any) -> Any:
        raise Spawned(None, [{"action": "child", "payload": {"n": 1}, "priority": 7}])

    await lives.work([task], handler)
    await lives.work([task], handler)
    (child,) = await lives.claim()
    assert (child.action, child.payload) == ("child", '{"n": 1}')


async def test_what_a_compensation_spawns_are_plain_tasks(lives: Lives, sql: Any) -> None:
    flow = await lives.create(
        chain=[{"action": "a", "compensate": "undo"}, {"action": "b", "on_failure": "compensate"}], tenant="acme"
    )

    def work(action: str, payload: Any) -> None:
        if action == "b":
            _break()
        if action == "undo":
            raise Spawned(1, [{"action": "report"}])

    await lives.live(work)
    assert [action for action, _ in lives.ran] == ["a", "b", "undo", "report"]
    row = await sql.fetchrow("select workflow, tenant from penstock.task_history where action = 'report'")
    assert tuple(row) == (None, "acme")
    assert ((await lives.look(flow)).state, (await lives.look(flow)).steps) == ("FAILED", 3)


async def test_children_that_are_wrong_end_their_task(lives: Lives) -> None:
    flow = await lives.create(steps=[{"action": "scan", "max_attempts": 5}])

    def handler(action: str, payload: Any) -> Any:
        raise Spawned(None, [{"action": "fine"}, {"action": "rpc.bad"}])

    await lives.live(handler)
    assert (await lives.look(flow)).state == "FAILED"
    step = (await lives.steps(flow))["scan"]
    async with lives.store.session() as session:
        (row,) = await session.fetch("read_tasks", [step.task_id])
    assert "spawn[1].action" in row["error"]


async def test_a_workflow_that_is_cancelled_is_so_at_once_and_begins_again_where_it_stood(lives: Lives) -> None:
    flow = await lives.create(chain=[{"action": "a"}, {"action": "b"}, {"action": "c"}])
    await lives.work(await lives.claim(), lambda *_: "done")
    await lives.advance()
    (running,) = await lives.claim()
    cancelled = await lives.ask("workflow.cancel", id=flow, reason="not needed")
    assert cancelled.state == "CANCELLED"
    assert (await lives.ask("workflow.cancel", id=flow)).state == "CANCELLED"
    record = await lives.look(flow)
    assert (record.open, record.reason) == (0, "not needed")
    assert await lives.counts(flow) == {"SUCCESS": 1, "CANCELLED": 2}
    await lives.work([running], lambda *_: "late")
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 2
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 0
    await lives.live()
    assert [action for action, _ in lives.ran] == ["a", "b", "b", "c"]
    assert (await lives.look(flow)).state == "SUCCESS"
    with pytest.raises(WorkflowConflict, match="is SUCCESS; it cannot be cancelled"):
        await lives.ask("workflow.cancel", id=flow)


@pytest.mark.parametrize("then", [{"results_as": "given"}, {"over": "a"}])
async def test_a_workflow_is_cancelled_though_the_result_that_its_next_step_is_given_cannot_be_read(
    lives: Lives, application_url: str, then: Any
) -> None:
    workflow = await lives.create(steps=[{"action": "a"}, {"name": "b", "action": "b", "after": ["a"], **then}])
    locked = load_settings(payload_keys=new_key())
    async with Store(application_url, codec=PayloadCodec(locked)) as sealing:
        await Lives(sealing, locked).work(await lives.claim(), lambda action, payload: [1])
    with pytest.raises(PayloadUnavailable):
        await lives.advance()
    assert (await lives.ask("workflow.cancel", id=workflow)).state == "CANCELLED"
    assert await lives.counts(workflow) == {"SUCCESS": 1, "CANCELLED": 1}


async def test_a_cancel_that_meets_the_last_result_leaves_the_workflow_to_its_success(
    lives: Lives, store: Store
) -> None:
    """It waits for the transaction that settles the last step; then nothing is left to cancel."""
    flow = await lives.create(chain=[{"action": "a"}])
    (task,) = await lives.claim()
    async with store.transaction() as session:
        await apply_reports(session, [Succeeded(task.id, task.claim, None, "1")], lives.settings)
        cancelling = asyncio.create_task(lives.ask("workflow.cancel", id=flow))
        await asyncio.wait([cancelling], timeout=0.2)
        assert not cancelling.done()
    with pytest.raises(WorkflowConflict, match="is SUCCESS; it cannot be cancelled"):
        await cancelling
    await lives.advance()
    record = await lives.look(flow)
    assert (record.state, record.open, record.reason) == ("SUCCESS", 0, None)


async def test_a_cancel_that_meets_a_result_before_the_last_cancels_the_rest(lives: Lives, store: Store) -> None:
    flow = await lives.create(chain=[{"action": "a"}, {"action": "b"}])
    (task,) = await lives.claim()
    async with store.transaction() as session:
        await apply_reports(session, [Succeeded(task.id, task.claim, None, "1")], lives.settings)
        cancelling = asyncio.create_task(lives.ask("workflow.cancel", id=flow, reason="rain"))
        await asyncio.wait([cancelling], timeout=0.2)
    assert (await cancelling).state == "CANCELLED"
    await lives.live()
    steps = await lives.steps(flow)
    assert (steps["a"].state, steps["b"].state, steps["b"].reason) == ("SUCCESS", "CANCELLED", "rain")


async def test_a_retry_ends_what_an_earlier_version_had_cancelled_after_its_last_success(
    lives: Lives, sql: Any
) -> None:
    flow = await lives.create(chain=[{"action": "a"}])
    await lives.live()
    await sql.execute("update penstock.workflow set state = 'CANCELLED'")
    changed = await lives.ask("workflow.retry", id=flow)
    assert (changed.state, changed.restarted) == ("SUCCESS", 0)
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_workflow_that_failed_with_nothing_to_undo_is_retried_from_where_it_stood(lives: Lives) -> None:
    flow = await lives.create(chain=[{"action": "a", "on_failure": "compensate"}, {"action": "b"}])
    await lives.live(lambda *_: _break())
    record = await lives.look(flow)
    assert (record.state, record.compensated) == ("FAILED", False)
    await lives.ask("workflow.retry", id=flow)
    await lives.live()
    assert (await lives.look(flow)).state == "SUCCESS"


@pytest.mark.parametrize("settles", ["before the round", "in the midst of it"])
async def test_a_step_that_fails_in_a_workflow_that_fails_is_not_tried_again(
    lives: Lives, store: Store, settles: str
) -> None:
    flow = await lives.create(steps=[{"action": "a", "max_attempts": 10}, {"action": "b"}])
    a, b = await lives.claim()
    await lives.work([b], _break)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    if settles == "before the round":
        await lives.advance()
        await lives.work([a], fail)
    else:
        async with store.transaction() as session:
            await lives.advance_in(session, 100)
            await lives.work([a], fail)
    await lives.advance()
    assert await lives.claim() == []
    record, steps = await lives.look(flow), await lives.steps(flow)
    assert (record.state, record.open) == ("FAILED", 0)
    assert steps["a"].state == "CANCELLED"
    assert steps["a"].reason == f"workflow {flow} has failed: step b is CRITICAL_ERROR"


async def give_back(store: Store, way: str, task: Claimed) -> None:
    error = '{"code": -32000, "message": "lost"}'
    reports: dict[str, Report] = {
        "sleep": Suspended(task.id, task.claim, 86_400.0),
        "woken": Suspended(task.id, task.claim),
        "failed": Failed(task.id, task.claim, None, error, Hints(retry_after=0.0)),
        "snooze at once": Failed(task.id, task.claim, None, error, Hints(retry_after=0.0, snooze=True)),
        "event": Waiting(task.id, task.claim, "token", None, WaitPolicy()),
        "snooze": Failed(task.id, task.claim, None, error, Hints(retry_after=60.0, snooze=True)),
        "unknown": Failed(task.id, task.claim, None, error, Hints(unknown_action=True)),
    }
    async with store.transaction() as session:
        match way:
            case "release":
                assert await claim.release(session, [(task.id, task.claim)]) == 1
            case "unsent":
                later = datetime.now(UTC) + timedelta(seconds=120)
                assert len(await session.fetch("release_unsent", 60, 10, later)) == 1
            case "refund":
                assert await settle.refund(session, [Failure(task.id, task.claim, error, None)]) == {task.id}
            case _:
                await apply_reports(session, [reports[way]], load_settings())


@pytest.mark.parametrize(
    "way", ["sleep", "event", "snooze", "release", "unsent", "refund", "woken", "failed", "snooze at once"]
)
async def test_a_step_that_is_given_back_in_a_workflow_that_fails_does_not_go_on(
    lives: Lives, store: Store, sql: Any, way: str
) -> None:
    flow = await lives.create(steps=[{"action": "a"}, {"action": "b"}])
    async with store.session() as session:
        batch = await claim.claim(session, 10)
    assert batch is not None
    a, b = batch.tasks
    await lives.work([b], _break)
    await lives.advance()
    await give_back(store, way, a)
    assert await lives.claim() == [], "the workflow has not taken note yet"
    await lives.advance()
    record, step = await lives.look(flow), (await lives.steps(flow))["a"]
    assert (record.state, record.open) == ("FAILED", 0)
    assert (step.state, step.reason) == ("CANCELLED", f"workflow {flow} has failed: step b is CRITICAL_ERROR")
    assert await sql.fetchval("select count(*) from penstock.wait where deadline is not null") == 0


@pytest.mark.parametrize("way", ["sleep", "event", "snooze", "release", "unsent", "refund"])
async def test_a_step_that_is_given_back_in_a_workflow_that_runs_stays(
    lives: Lives, store: Store, sql: Any, way: str
) -> None:
    flow = await lives.create(chain=[{"action": "a"}, {"action": "b"}])
    async with store.session() as session:
        batch = await claim.claim(session, 10)
    assert batch is not None
    await give_back(store, way, batch.tasks[0])
    await lives.advance()
    assert (await lives.steps(flow))["a"].state == ("WAITING" if way == "event" else "SCHEDULED")
    if way in ("release", "unsent", "refund"):
        await sql.execute("update penstock.task set run_at = now() where run_at < now() + interval '3 seconds'")
        await lives.live()
        assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_plain_task_that_is_given_back_is_due_at_once_and_tells_no_workflow(
    lives: Lives, store: Store, sql: Any
) -> None:
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("a")])
    for way in ("release", "unsent", "refund"):
        async with store.session() as session:
            batch = await claim.claim(session, 10)
        assert batch is not None
        await give_back(store, way, batch.tasks[0])
    assert await sql.fetchval("select count(*) from penstock.workflow_event") == 0


async def test_children_that_were_refused_are_made_by_a_retry_and_their_step_is_not_run_again(
    lives: Lives, store: Store
) -> None:
    """The supervisor takes smaller payloads than the resulter that accepted them."""
    small = Lives(store, lives.settings.model_copy(update={"payload_limit_bytes": 20}))
    flow = await small.create(chain=[{"action": "a"}, {"action": "end", "results_as": "r"}])

    def spawn(action: str, payload: Any) -> Any:
        if action != "a":
            return payload
        raise Spawned(1, [{"action": "child", "payload": {"text": "x" * 30}}])

    await lives.work(await lives.claim(), spawn)
    await small.advance()
    step = (await lives.steps(flow))["a"]
    assert (step.state, (await lives.look(flow)).state) == ("CRITICAL_ERROR", "FAILED")
    assert step.reason is not None
    assert "its children were refused" in step.reason
    assert (await small.ask("workflow.retry", id=flow)).state == "FAILED"
    assert (await lives.steps(flow))["a"].state == "CRITICAL_ERROR"
    await lives.ask("workflow.retry", id=flow)
    await lives.live(spawn)
    assert (await lives.look(flow)).state == "SUCCESS"
    assert [action for action, _ in lives.ran] == ["a", "child", "end"]
    assert lives.ran[-1][1] == {"r": {"a": 1, "a/0": {"text": "x" * 30}}}


async def test_the_reason_why_children_were_refused_is_handed_on(lives: Lives, sql: Any) -> None:
    small = Lives(lives.store, lives.settings.model_copy(update={"payload_limit_bytes": 500}))
    flow = await small.create(
        chain=[{"action": "a", "on_failure": "continue"}, {"action": "end", "results_as": "r", "errors_as": "e"}]
    )

    def fail(*_: Any) -> None:
        raise ArithmeticError("overcome")

    def spawn(*_: Any) -> None:
        raise Spawned(1, [{"action": "child", "payload": {"text": "x" * 600}}])

    for handler in (fail, spawn):
        await lives.work(await lives.claim(), handler)
        await sql.execute("update penstock.task set run_at = now() where action = 'a'")
    await small.advance()
    reason = (await lives.steps(flow))["a"].reason
    assert "its children were refused" in (reason or "")
    (end,) = await lives.claim()
    assert json.loads(end.payload) == {"r": {}, "e": {"a": {"state": "CRITICAL_ERROR", "reason": reason}}}


async def test_a_step_that_is_cancelled_or_expires_tells_why(lives: Lives, store: Store, sql: Any) -> None:
    flow = await lives.create(
        steps=[
            {"action": "a", "on_failure": "continue"},
            {"action": "b", "on_failure": "continue", "expires_in": 100},
            {"action": "c", "after": ["a"], "delay": 3600},
            {"name": "all", "after": ["c"]},
        ]
    )
    steps = await lives.steps(flow)
    async with store.transaction() as session:
        await settle.cancel(session, [steps["a"].task_id or 0], "not wanted")
    await sql.execute("update penstock.task set expires_at = now() where id = $1", steps["b"].task_id)
    async with store.transaction() as session:
        assert await expire_some(session, 10) == 1
    await lives.advance()
    steps = await lives.steps(flow)
    assert (steps["a"].state, steps["a"].reason) == ("CANCELLED", "not wanted")
    assert (steps["b"].state, steps["b"].reason) == ("CANCELLED", EXPIRED)
    await lives.ask("workflow.cancel", id=flow, reason="rain")
    await lives.advance()
    steps = await lives.steps(flow)
    assert [steps[name].reason for name in ("c", "all")] == ["rain", "rain"]


async def test_retry_runs_what_failed_and_what_came_after_and_nothing_that_succeeded(lives: Lives) -> None:
    flow = await lives.create(
        steps=[
            {"action": "a"},
            {"action": "b", "after": ["a"], "results_as": "r", "payload": {"own": 1}},
            {"action": "skip", "on_failure": "continue"},
            {"action": "c", "after": ["b", "skip"], "results_as": "r"},
        ]
    )
    await lives.live(lambda action, _: _break() if action in ("b", "skip") else action)
    assert (await lives.look(flow)).state == "FAILED"
    before = len(lives.ran)
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 2
    await lives.live(lambda action, _: action)
    assert lives.ran[before:] == [("b", {"own": 1, "r": {"a": "a"}}), ("c", {"r": {"b": "b"}})]
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_step_that_had_not_started_keeps_its_time_in_a_retry(lives: Lives, sql: Any) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    flow = await lives.create(chain=[{"action": "a"}, {"action": "b", "run_at": tomorrow.isoformat()}])
    await lives.live(_break)
    await lives.ask("workflow.retry", id=flow)
    await lives.live()
    assert [action for action, _ in lives.ran] == ["a", "a"]
    assert await sql.fetchval("select run_at from penstock.task") == tomorrow


async def test_a_delay_does_not_begin_anew_in_a_retry_unless_it_had_not_begun(lives: Lives, sql: Any) -> None:
    flow = await lives.create(chain=[{"action": "a", "delay": 3600}, {"action": "b", "delay": 3600}])

    async def left() -> float:
        row = await sql.fetchrow("select run_at - now() as left from penstock.task where state = 'SCHEDULED'")
        return float(row["left"].total_seconds())

    await sql.execute("update penstock.task set run_at = now() + interval '1800 s' where action = 'a'")
    await lives.ask("workflow.cancel", id=flow)
    await lives.ask("workflow.retry", id=flow)
    assert 1700 < await left() <= 1800
    await sql.execute("update penstock.task set run_at = now() where action = 'a'")
    await lives.live(lambda *_: _break())
    await lives.ask("workflow.retry", id=flow)
    assert await left() <= 0
    await lives.live()
    assert 3500 < await left() <= 3600


async def test_a_step_that_has_begun_its_journal_does_not_expire_after_a_retry(lives: Lives, sql: Any) -> None:
    flow = await lives.create(steps=[{"action": "a", "expires_in": 60}])
    (a,) = await lives.claim()
    assert await sql.fetchval("select expires_at from penstock.task") is not None
    begun = Entry.of(StepPlace(name="first"), "1")
    await lives.report(Stepped(a.id, a.claim, begun), Suspended(a.id, a.claim, 86_400.0))
    await lives.ask("workflow.cancel", id=flow)
    await lives.ask("workflow.retry", id=flow)
    assert await sql.fetchval("select expires_at from penstock.task") is None


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("way", ["sleep", "unknown"])
async def test_a_retry_goes_on_with_a_sleep_and_not_with_a_wait_for_a_worker(
    lives: Lives, store: Store, sql: Any, way: str, failed: bool
) -> None:
    flow = await lives.create(steps=[{"action": "a"}])
    (a,) = await lives.claim()
    if failed:
        await lives.report(Failed(a.id, a.claim, None, '{"code": -32000, "message": "m"}', Hints(retry_after=0.0)))
        (a,) = await lives.claim()
    await give_back(store, way, a)
    await lives.ask("workflow.cancel", id=flow)
    await lives.ask("workflow.retry", id=flow)
    left = await sql.fetchval("select run_at - now() from penstock.task")
    assert left > timedelta(hours=23) if way == "sleep" else left <= timedelta(0)


async def test_a_step_that_waits_in_a_retry_names_no_step_that_had_succeeded(lives: Lives, store: Store) -> None:
    flow = await lives.create(steps=[{"action": "a"}, {"action": "b"}, {"action": "c", "after": ["a", "b"]}])
    a, b = await lives.claim()
    for task, handler in ((b, _break), (a, lambda *_: None)):
        await lives.work([task], handler)
        await lives.advance()
    await lives.ask("workflow.retry", id=flow)
    waiting = (await lives.steps(flow))["c"].task_id
    assert waiting is not None
    async with store.session() as session:
        assert (await explain(session, waiting)).reason == f"Waits for earlier steps of workflow {flow}: b."


async def test_a_step_cancelled_with_its_workflow_begins_again_though_its_policy_is_continue(lives: Lives) -> None:
    flow = await lives.create(chain=[{"action": "a", "on_failure": "continue"}, {"action": "b"}])
    await lives.ask("workflow.cancel", id=flow)
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 2
    await lives.live()
    assert [action for action, _ in lives.ran] == ["a", "b"]


async def test_retry_of_a_failed_child_runs_the_child_alone(lives: Lives) -> None:
    flow = await lives.create(chain=[{"action": "scan"}, {"action": "end", "results_as": "r"}])
    broken = True

    def handler(action: str, payload: Any) -> Any:
        if action == "scan":
            raise Spawned("s", [{"action": "good"}, {"action": "bad"}])
        if action == "bad" and broken:
            raise Broken("broken")
        return action

    await lives.live(handler)
    assert (await lives.look(flow)).state == "FAILED"
    broken = False
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 2
    await lives.live(handler)
    assert [action for action, _ in lives.ran].count("scan") == 1
    assert lives.ran[-1] == ("end", {"r": {"scan": "s", "scan/0": "good", "scan/1": "bad"}})
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_step_cancelled_by_hand_counts_as_failed_and_is_not_retried_alone(lives: Lives) -> None:
    from penstock.protocol.errors import StateConflict
    from penstock.tasks.methods import retry
    from penstock.tasks.params import RetryParams

    flow = await lives.create(chain=[{"action": "a"}, {"action": "b"}])
    step = (await lives.steps(flow))["b"]
    assert step.task_id is not None
    async with lives.store.transaction() as session:
        await settle.cancel(session, [step.task_id], "by hand")
    await lives.live()
    assert (await lives.look(flow)).state == "FAILED"
    async with lives.store.transaction() as session:
        with pytest.raises(StateConflict, match=r"use workflow\.retry"):
            await retry.carry_out(within(session, lives.settings), RetryParams(step.task_id))


async def test_results_that_no_payload_can_hold_cancel_the_step_with_the_reason(lives: Lives) -> None:
    lives.settings = lives.settings.model_copy(update={"payload_limit_bytes": 1000})
    flow = await lives.create(chain=[[{"action": "a"}, {"action": "b"}], {"action": "end", "results_as": "r"}])
    await lives.live(lambda *_: "x" * 600)
    record = await lives.look(flow)
    assert record.state == "FAILED"
    step = (await lives.steps(flow))["end"]
    async with lives.store.session() as session:
        (row,) = await session.fetch("read_tasks", [step.task_id])
    assert row["state"] == "CANCELLED"
    assert row["reason"] == "the results of its predecessors are more than the 1000 bytes allowed"


async def test_a_result_that_is_no_longer_kept_cancels_the_step_that_wants_it(lives: Lives, sql: Any) -> None:
    flow = await lives.create(chain=[{"action": "a"}, {"action": "b", "results_as": "r"}])
    await lives.work(await lives.claim(), lambda *_: None)
    await sql.execute("delete from penstock.task_history")
    await lives.live()
    assert (await lives.look(flow)).state == "FAILED"
    assert await sql.fetchval("select reason from penstock.task_history") == "the result of a is no longer kept"


async def empty(sql: Any, *what: str) -> None:
    """What retention does with records that are old enough."""
    now, day = datetime.now(UTC), timedelta(days=1)
    for one in what:
        await sql.fetch(SQL[f"empty_{one}"], now - day, now + day)


async def test_a_result_that_was_emptied_is_not_handed_on_as_null(lives: Lives, sql: Any) -> None:
    flow = await lives.create(
        steps=[
            {"action": "a"},
            {"action": "nothing"},
            {"action": "slow"},
            {"name": "taking", "action": "t", "after": ["a", "slow"], "results_as": "r", "on_failure": "continue"},
            {"name": "each", "action": "t", "after": ["a", "slow"], "over": "a", "on_failure": "continue"},
            {"name": "null", "action": "t", "after": ["nothing", "slow"], "results_as": "r"},
        ]
    )
    a, nothing, slow = await lives.claim()
    await lives.work([a], lambda *_: [1])
    await lives.work([nothing], lambda *_: None)
    await empty(sql, "results")
    await lives.work([slow], lambda *_: 2)
    await lives.live()
    steps = await lives.steps(flow)
    gone = "the result of a is no longer kept"
    assert [(steps[name].state, steps[name].reason) for name in ("taking", "each", "null")] == [
        ("CANCELLED", gone), ("CRITICAL_ERROR", gone), ("SUCCESS", None),
    ]  # fmt: skip
    assert lives.ran[-1] == ("t", {"r": {"nothing": None, "slow": 2}})


@pytest.mark.parametrize("what", ["payload", "result"])
async def test_a_compensation_is_not_given_what_was_emptied(lives: Lives, sql: Any, what: str) -> None:
    flow = await lives.create(
        chain=[
            {"action": "a", "payload": {"seat": 1}, "compensate": "undo-a"},
            {"action": "b", "compensate": "undo-b"},
            {"action": "c", "on_failure": "compensate"},
        ]
    )
    for _ in range(2):
        await lives.work(await lives.claim(), lambda action, _: 7 if action == "a" else None)
        await lives.advance()
    await empty(sql, f"{what}s")
    await lives.live(lambda action, _: _break() if action == "c" else None)
    assert lives.ran[3:] == [("undo-b", {"step": "b", "payload": {}, "result": None})]
    record, step = await lives.look(flow), (await lives.steps(flow))["a/undo"]
    assert (record.state, record.open) == ("FAILED", 0)
    assert (step.state, step.reason) == ("CANCELLED", f"the {what} of a is no longer kept")


async def test_a_compensation_is_retried_with_its_payload_made_anew(lives: Lives, sql: Any) -> None:
    flow = await lives.create(
        chain=[{"action": "a", "compensate": "undo-a"}, {"action": "b", "on_failure": "compensate"}],
    )
    await lives.live(lambda action, _: 7 if action == "a" else _break())
    await empty(sql, "payloads")
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 1
    await lives.live()
    assert lives.ran[-1] == ("undo-a", {"step": "a", "payload": {}, "result": 7})


async def test_a_step_whose_payload_was_emptied_is_not_run_again_without_it(lives: Lives, sql: Any) -> None:
    flow = await lives.create(steps=[{"action": "a", "payload": {"n": 1}}, {"action": "b"}])
    await lives.live(_break)
    await empty(sql, "payloads")
    with pytest.raises(WorkflowConflict, match="the records or payloads of 1 of its tasks are no longer kept"):
        await lives.ask("workflow.retry", id=flow)
    assert (await lives.look(flow)).state == "FAILED"
    assert await sql.fetchval("select count(*) from penstock.task") == 0


async def test_a_delay_and_an_expiry_count_from_when_the_predecessors_are_done(lives: Lives, sql: Any) -> None:
    await lives.create(chain=[{"action": "a"}, {"action": "b", "delay": 3600, "expires_in": 7200}])
    assert await sql.fetchval("select expires_at from penstock.task where action = 'b'") is None
    await lives.live()
    row = await sql.fetchrow("select state, run_at - now() as wait, expires_at - now() as left from penstock.task")
    assert row["state"] == "SCHEDULED"
    assert 3500 < row["wait"].total_seconds() <= 3600 < 7100 < row["left"].total_seconds() <= 7200


async def test_a_step_takes_its_place_behind_an_ordering_key_when_its_predecessors_are_done(
    lives: Lives, sql: Any
) -> None:
    flow = await lives.create(
        steps=[{"action": "first", "name": "x", "ordering_key": "k"}, {"action": "slow"},
               {"action": "second", "after": ["slow"], "ordering_key": "k"}]
    )  # fmt: skip
    x, slow = await lives.claim()
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 1
    await lives.work([slow], lambda *_: None)
    await lives.advance()
    assert await lives.claim() == []
    await lives.work([x], lambda *_: None)
    (second,) = await lives.claim()
    assert second.action == "second"
    await lives.work([second], lambda *_: None)
    await lives.live()
    assert (await lives.look(flow)).state == "SUCCESS"
    assert await sql.fetchval("select count(*) from penstock.ordering_head") == 0


async def test_a_step_that_held_its_ordering_key_lets_it_go_once_it_is_retried_and_succeeds(
    store: Store, settings: Settings
) -> None:
    lives = Lives(store, settings.model_copy(update={"ordering_on_critical_error": "hold"}))
    flow = await lives.create(steps=[{"action": "a", "ordering_key": "k"}])
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("behind", ordering_key="k")])

    def fail(*_: Any) -> None:
        raise Broken

    await lives.work(await lives.claim(), fail)
    await lives.advance()
    assert (await lives.look(flow)).state == "FAILED"
    assert await lives.claim() == []
    await lives.ask("workflow.retry", id=flow)
    (again,) = await lives.claim()
    assert again.action == "a"
    await lives.work([again], lambda *_: None)
    assert [task.action for task in await lives.claim()] == ["behind"]


async def test_a_step_that_held_its_ordering_key_lets_it_go_when_it_is_cancelled_before_it_starts_again(
    store: Store, settings: Settings, sql: Any
) -> None:
    lives = Lives(store, settings.model_copy(update={"ordering_on_critical_error": "hold"}))
    flow = await lives.create(chain=[{"action": "a"}, {"action": "b", "ordering_key": "k", "results_as": "r"}])
    await lives.work(await lives.claim(), lambda *_: None)
    await lives.advance()
    async with store.transaction() as session:
        await enqueue.enqueue(session, [NewTask("behind", ordering_key="k")])
    await lives.work(await lives.claim(), _break)
    await lives.advance()
    await sql.execute("delete from penstock.task_history where action = 'a'")
    await lives.ask("workflow.retry", id=flow)
    step = (await lives.steps(flow))["b"]
    assert (step.state, (await lives.look(flow)).state) == ("CANCELLED", "FAILED")
    assert await lives.claim() == []
    async with store.transaction() as session:
        assert (await ordering.release_orphaned_keys(session, 10))[0] == 1
    assert [task.action for task in await lives.claim()] == ["behind"]


async def test_the_same_key_and_definition_is_one_workflow_and_another_definition_an_error(lives: Lives) -> None:
    first = await lives.ask("workflow.create", key="k", chain=[{"action": "a", "payload": {"x": 1, "y": 2}}])
    again = await lives.ask("workflow.create", key="k", chain=[{"payload": {"y": 2, "x": 1}, "action": "a"}])
    assert (again.id, again.duplicate) == (first.id, True)
    with pytest.raises(WorkflowConflict, match="has the key 'k' and another definition"):
        await lives.ask("workflow.create", key="k", chain=[{"action": "a"}])
    assert len(await lives.claim()) == 1


async def test_a_workflow_that_there_is_not_is_named(lives: Lives) -> None:
    with pytest.raises(WorkflowNotFound, match="No such workflow: 7"):
        await lives.ask("workflow.cancel", id=7)
    with pytest.raises(WorkflowNotFound, match="No such workflow: nightly"):
        await lives.ask("workflow.retry", key="nightly")


async def test_a_workflow_of_ten_thousand_steps_is_made_at_once_and_costs_as_much_a_step_as_a_small_one(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in statements, for time says little on a busy machine."""
    asked: list[str] = []
    fetch = Session.fetch

    async def counted(self: Session, name: str, *args: Any, **options: Any) -> Any:
        asked.append(name)
        return await fetch(self, name, *args, **options)

    monkeypatch.setattr(Session, "fetch", counted)
    random = Random(7)
    steps: list[dict[str, Any]] = []
    for number in range(10_000):
        before = random.sample(range(max(0, number - 2000), number), min(number, random.randint(0, 3)))
        steps.append({"name": f"s{number}", "action": "a", "after": [f"s{n}" for n in before]})
    flow = await lives.create(steps=steps)
    assert Counter(asked) == {"create_workflow": 1, "insert_steps": 5}
    asked.clear()
    done: set[int] = set()
    after = [{int(name[1:]) for name in step["after"]} for step in steps]
    numbers = {step.task_id: step.number for step in (await lives.steps(flow)).values()}
    while await lives.advance() or not done:
        while tasks := await lives.claim(2000):
            for task in tasks:
                assert after[numbers[task.id]] <= done, "it has begun before those that it comes after"
            await lives.work(tasks, lambda *_: None)
            done |= {numbers[task.id] for task in tasks}
    assert len(done) == 10_000
    assert (await lives.look(flow)).state == "SUCCESS"
    depth = Counter(asked)["settle_steps"]
    assert depth < 200
    assert Counter(asked)["release_successors"] == depth


async def test_a_statement_over_very_many_steps_takes_the_time_that_it_needs(
    application_url: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, end in (("cancel_tasks", "from gone"), ("restart_steps", "from back")):
        assert SQL[name].endswith(end)
        monkeypatch.setitem(SQL, name, f"{SQL[name]}, (select pg_sleep(1.2)) slow")
    store = Store(application_url, statement_timeout_seconds=1)
    lives = Lives(store, settings)
    flow = await lives.create(steps=[{"action": "a", "over": [*range(60)]}])
    with pytest.raises(TooSlow):
        await lives.ask("workflow.cancel", id=flow)
    monkeypatch.setattr("penstock.db.session._VERY_MANY_ROWS", 60)
    assert (await lives.ask("workflow.cancel", id=flow)).state == "CANCELLED"
    assert (await lives.ask("workflow.retry", id=flow)).restarted == 60
    await store.close()


async def test_children_of_many_steps_are_made_part_by_part(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together may be more than the memory of a process, and than one statement stores in time."""
    monkeypatch.setattr("penstock.workflows.advance.CHILDREN_CHARS_AT_ONCE", 300)
    stored: list[int] = []
    fetch = Session.fetch

    async def counted(self: Session, name: str, *args: Any, **options: Any) -> Any:
        if name == "insert_steps":
            stored.append(len(args[0]))
        return await fetch(self, name, *args, **options)

    def spawn(action: str, payload: Any) -> Any:
        if action == "scan":
            raise Spawned(payload["item"], [{"action": "index", "payload": {"n": n}} for n in range(5)])

    flow = await lives.create(steps=[{"action": "scan", "over": [*range(10)]}])
    monkeypatch.setattr(Session, "fetch", counted)
    await lives.work(await lives.claim(), spawn)
    assert await lives.advance() == 1
    assert stored == [10] * 5
    await lives.live(spawn)
    assert (await lives.counts(flow), (await lives.look(flow)).state) == ({"SUCCESS": 61}, "SUCCESS")


async def test_payloads_of_steps_are_held_together_only_up_to_so_many_bytes(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bucket each may have 64 MiB, and a group as wide as it likes is given the same result."""
    monkeypatch.setattr("penstock.workflows.advance._INPUT_BYTES_AT_ONCE", 3 * 262_144)
    started: list[int] = []
    fetch = Session.fetch

    async def counted(self: Session, name: str, *args: Any, **options: Any) -> Any:
        if name == "start_steps":
            started.append(len(args[0]))
        return await fetch(self, name, *args, **options)

    monkeypatch.setattr(Session, "fetch", counted)
    group = [{"action": "part", "results_as": "r"} for _ in range(7)]
    flow = await lives.create(chain=[{"action": "first"}, group, {"action": "last", "results_as": "r"}])
    await lives.live(lambda *_: "x" * 1000)
    assert started == [3, 3, 1, 1]
    assert (await lives.look(flow)).state == "SUCCESS"


async def test_a_group_and_a_fan_in_of_a_thousand(lives: Lives) -> None:
    group = [{"action": "part", "payload": {"n": n}} for n in range(1000)]
    flow = await lives.create(chain=[group, group, {"action": "sum", "results_as": "parts"}])
    await lives.live(lambda _, payload: payload.get("n"))
    assert sum(lives.ran[-1][1]["parts"].values()) == sum(range(1000))
    assert (await lives.look(flow)).state == "SUCCESS"


def _break(*_: Any) -> None:
    raise Broken("broken")
