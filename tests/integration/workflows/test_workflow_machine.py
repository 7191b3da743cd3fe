"""Random workflows, random ends of their steps, several that move them on: the real statements, judged after each step.

What a workflow is must always be what its steps imply, and no step may start before its predecessors are done.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.db.pool import Store
from penstock.protocol.errors import WorkflowConflict
from penstock.protocol.reports import NO_HINTS, Failed, Hints, Report, Succeeded
from penstock.protocol.task import Claimed
from penstock.results.apply import apply_reports
from penstock.settings.model import load_settings
from penstock.tasks import settle as settling
from tests.integration.lives import Lives
from tests.rounds import run_rounds

T = TypeVar("T")
TABLES = "task, task_history, ordering_head, dispatch, tally, workflow, workflow_step, workflow_edge, workflow_event"
FEWEST_STEPS = 500
# What the run must have met to count as having tried.
MET = {
    "create", "same key again", "success", "failure", "last failure", "snooze", "put off beside a failure",
    "spawn", "late result", "cancel", "retry", "retry refused", "advance", "advance killed", "advance beside another",
    "cancel while a step settles", "step cancelled by hand", "compensation", "ended SUCCESS", "ended FAILED",
    "ended CANCELLED",
}  # fmt: skip
SELDOM = st.sampled_from([False, False, True])
# Of what there is then. What there is hangs on the clock too, so it must not bound what is drawn.
WHICH = st.integers(0, 9999)
KINDS = st.sampled_from([*["success"] * 4, "fail", "fail permanently", "snooze", "spawn", "spawn"])


@st.composite
def definitions(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps in a random order of dependence, some of which fan out, join, follow an ordering key or take results."""
    steps: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 6))):
        names = [step["name"] for step in steps]
        after = draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) if names else []
        step: dict[str, Any] = {"name": f"s{number}", "after": after}
        kind = draw(st.sampled_from(["task", "task", "task", "map", "join"]))
        if kind == "join" and after:
            steps.append(step)
            continue
        step["action"] = "a"
        step["on_failure"] = draw(st.sampled_from(["compensate", {"compensate": "u"}, "fail", "continue"]))
        step["compensate"] = draw(st.sampled_from([None, "u"]))
        step["max_attempts"] = draw(st.integers(1, 2))
        step["ordering_key"] = draw(st.sampled_from([None, None, "o"]))
        if kind == "map":
            step["over"] = draw(st.lists(st.integers(0, 9), max_size=2))
        elif after and draw(st.booleans()):
            step["results_as"], step["errors_as"] = "r", "e"
        steps.append(step)
    return [{name: value for name, value in step.items() if value is not None} for step in steps]


class Workflows(RuleBasedStateMachine):
    """One machine is one run over empty tables."""

    store: Store
    loop: asyncio.AbstractEventLoop
    steps: int
    met: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.lives = Lives(self.store, load_settings(retry_base_seconds=0.000001, retry_jitter=0))
        self.flows: dict[int, list[dict[str, Any]]] = {}
        self.cancelled: set[int] = set()
        self.claims: list[Claimed] = []
        self.by_hand: set[int] = set()
        self.run(self._execute(f"truncate {', '.join('penstock.' + name for name in TABLES.split(', '))}"))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        type(self).steps += 1
        return self.loop.run_until_complete(work)  # Runner.run sets a signal handler each time

    async def _execute(self, text: str) -> list[Any]:
        pool = await self.store.open()
        async with pool.acquire() as connection:
            rows: list[Any] = await connection.fetch(text)
        return rows

    # What happens

    @initialize(steps=definitions())
    def begin(self, steps: list[dict[str, Any]]) -> None:
        self.create(steps)  # type: ignore[operator]

    @rule(steps=definitions())
    def create(self, steps: list[dict[str, Any]]) -> None:
        if len(self.flows) >= 3:
            return
        key = f"k{len(self.flows)}"
        made = self.run(self.lives.ask("workflow.create", key=key, steps=steps))
        assert not made.duplicate
        self.flows[made.id] = steps
        self.met["create"] += 1

    @rule(which=WHICH)
    def create_again(self, which: int) -> None:
        place = which % len(self.flows)
        flow, steps = list(self.flows.items())[place]
        again = self.run(self.lives.ask("workflow.create", key=f"k{place}", steps=steps))
        assert (again.id, again.duplicate) == (flow, True)
        with pytest.raises(WorkflowConflict):
            self.run(
                self.lives.ask("workflow.create", key=f"k{place}", steps=[*steps, {"name": "more", "action": "a"}])
            )
        self.met["same key again"] += 1

    @rule(limit=st.integers(1, 6))
    def claim(self, limit: int) -> None:
        self.claims += self.run(self.lives.claim(limit))

    @rule(outcomes=st.lists(st.tuples(WHICH, KINDS), min_size=1, max_size=4))
    def settle(self, outcomes: list[tuple[int, str]]) -> None:
        """Results of claims that hold, and of those that have not for long."""
        if self.claims:
            chosen = {which % len(self.claims): kind for which, kind in outcomes}
            self._report([(self.claims[place], kind) for place, kind in chosen.items()])

    def _report(self, outcomes: list[tuple[Claimed, str]]) -> None:
        applied = self.run(self._applied([self._report_of(task, kind) for task, kind in outcomes]))
        self.met["late result"] += applied.stale

    async def _applied(self, reports: list[Report]) -> Any:
        async with self.store.transaction() as session:
            return await apply_reports(session, reports, self.lives.settings)

    def _report_of(self, task: Claimed, kind: str) -> Report:
        error = json.dumps({"code": 1, "message": kind})
        match kind:
            case "fail":
                self.met["failure"] += 1
                return Failed(task.id, task.claim, None, error, NO_HINTS)
            case "fail permanently":
                self.met["last failure"] += 1
                return Failed(task.id, task.claim, None, error, Hints(final=True))
            case "snooze":
                self.met["snooze"] += 1
                return Failed(task.id, task.claim, None, error, Hints(retry_after=0.0, snooze=True))
            case "spawn":
                self.met["spawn"] += 1
                children = [{"action": "c", "on_failure": "continue"}, {"action": "c", "name": "x", "delay": 0}]
                return Succeeded(task.id, task.claim, None, "1", json.dumps(children))
        self.met["success"] += 1
        return Succeeded(task.id, task.claim, None, json.dumps([task.id]))

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=12))
    def go_on(self, kinds: list[str]) -> None:
        """As undisturbed processes would: each of the kinds ends one task."""
        for kind in kinds:
            self.run(self.lives.advance())
            claimed = self.run(self.lives.claim(1))
            if not claimed:
                return
            self.claims += claimed
            self._report([(claimed[0], kind)])

    @rule()
    def fail_beside_others_that_are_put_off(self) -> None:
        claimed = self.run(self.lives.claim(4))
        self.claims += claimed
        if len(claimed) > 1:
            self._report([(claimed[0], "fail permanently")])
            self.run(self.lives.advance())
            self._report([(task, "snooze") for task in claimed[1:]])
            self.met["put off beside a failure"] += 1

    @rule(limit=st.integers(1, 3))
    def advance(self, limit: int) -> None:
        self.run(self.lives.advance_once(limit))
        self.met["advance"] += 1

    @rule(which=WHICH, kind=KINDS, killed=st.booleans())
    def advance_beside_another(self, which: int, kind: str, killed: bool) -> None:
        """One is in the middle, or dies there, while another looks and a result comes in."""
        report = self._report_of(pick(self.claims, which), kind) if self.claims else None

        async def both() -> None:
            async with self.store.transaction() as session:
                await self.lives.advance_in(session, 2)
                await self.lives.advance_once()
                if report is not None:
                    # Its task may be one that the other has just cancelled, and not committed.
                    late = asyncio.create_task(self._applied([report]))
                    await asyncio.wait([late], timeout=0.01)
                if killed:
                    raise ZeroDivisionError
            if report is not None:
                await late

        async def dying() -> None:
            try:
                await both()
            except ZeroDivisionError:
                await asyncio.gather(*(t for t in asyncio.all_tasks() if t is not asyncio.current_task()))

        self.run(dying())
        self.met["advance killed" if killed else "advance beside another"] += 1

    @rule(which=WHICH, meant=SELDOM)
    def cancel(self, which: int, meant: bool) -> None:
        if not meant:
            return
        flow = pick(list(self.flows), which)
        try:
            self.run(self.lives.ask("workflow.cancel", id=flow))
        except WorkflowConflict:
            return
        self.cancelled.add(flow)
        self.met["cancel"] += 1

    @rule(which=WHICH, claim=WHICH, kind=KINDS, meant=SELDOM)
    def cancel_while_a_step_settles(self, which: int, claim: int, kind: str, meant: bool) -> None:
        if not (self.claims and meant):
            return
        flow = pick(list(self.flows), which)
        report = self._report_of(pick(self.claims, claim), kind)

        async def both() -> bool:
            async with self.store.transaction() as session:
                await apply_reports(session, [report], self.lives.settings)
                cancelling = asyncio.create_task(self.lives.ask("workflow.cancel", id=flow))
                await asyncio.wait([cancelling], timeout=0.02)
            try:
                await cancelling
            except WorkflowConflict:
                return False
            return True

        if self.run(both()):
            self.cancelled.add(flow)
        self.met["cancel while a step settles"] += 1

    @rule(which=WHICH, any_of_them=SELDOM)
    def retry(self, which: int, any_of_them: bool) -> None:
        ended = self.run(self._execute("select id from penstock.workflow where state in ('FAILED', 'CANCELLED')"))
        worth_it = [row["id"] for row in ended if row["id"] in self.flows]
        flow = pick(list(self.flows) if any_of_them or not worth_it else worth_it, which)
        try:
            changed = self.run(self.lives.ask("workflow.retry", id=flow))
        except WorkflowConflict:
            self.met["retry refused"] += 1
            return
        if changed.restarted:
            self.cancelled.discard(flow)
            self.met["retry"] += 1
            # Whatever was cancelled with its workflow begins again; where compensations do, all other steps stay.
            kept = [step for step in self.run(self._execute(STEPS)) if step["workflow_id"] == flow]
            assert any(step["kind"] == "compensation" for step in kept) or all(
                step["task_id"] in self.by_hand or step["kind"] == "compensation"
                for step in kept
                if step["state"] == "CANCELLED"
            )

    @rule(which=WHICH)
    def cancel_a_step(self, which: int) -> None:
        live = [row["id"] for row in self.run(self._execute("select id from penstock.task order by id"))]
        if live:
            task_id = pick(live, which)

            async def cancel() -> None:
                async with self.store.transaction() as session:
                    await settling.cancel(session, [task_id])

            self.run(cancel())
            self.by_hand.add(task_id)
            self.met["step cancelled by hand"] += 1

    # What must hold

    @invariant()
    def it_is_what_its_steps_imply(self) -> None:
        if not self.flows:
            return
        flows = self.run(self._execute("select * from penstock.workflow order by id"))
        events = {row["workflow_id"] for row in self.run(self._execute("select * from penstock.workflow_event"))}
        steps = self.run(self._execute(STEPS))
        for flow in flows:
            self._judge(flow, [s for s in steps if s["workflow_id"] == flow["id"]], flow["id"] in events)

    def _judge(self, flow: Any, steps: list[Any], lags: bool) -> None:
        by_number = {step["number"]: step for step in steps}
        assert sorted(by_number) == list(range(flow["steps"]))
        assert flow["open"] == sum(not step["done"] for step in steps)
        for step in steps:
            children = [s for s in steps if s["parent"] == step["number"] and s["kind"] != "compensation"]
            ended = step["state"] in ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")
            assert step["children"] == len(children)
            assert step["open_children"] == sum(not child["done"] for child in children)
            assert step["done"] == (ended and not step["open_children"]), dict(step)
            if step["task_id"] is not None:
                # Of what has ended the step knows once its event was taken; waiting steps are not to be run.
                assert step["task_state"] is not None
                assert step["state"] == step["task_state"] or not ended, dict(step)
                assert ended or lags or step["is_live"], dict(step)
                held = step["task_state"] == "WAITING" and step["ordering_key"] is None
                assert step["state"] == "WAITING" or not held, dict(step)
                if step["is_live"] and not held:
                    assert step["state"] == "SCHEDULED", dict(step)
            has_begun = step["state"] in ("SCHEDULED", "SUCCESS", "CRITICAL_ERROR")
            before = [by_number[number] for number in step["after"]]
            # A compensation that has succeeded stays so while a retry runs those before it that had been cancelled.
            if has_begun and not (step["kind"] == "compensation" and ended):
                assert all(b["done"] and (b["state"] == "SUCCESS" or b["on_failure"] == "continue") for b in before)
            if not has_begun and not ended and flow["state"] == "RUNNING":
                assert step["pending"] == sum(not b["passed"] for b in before)
                assert step["pending"] > 0
        if lags:
            return
        if flow["state"] == "FAILING":
            # What ran when it failed may finish; nothing waits to run again.
            going = [step for step in steps if step["is_live"] and step["kind"] != "compensation"]
            assert all(step["task_state"] == "ACQUIRED" for step in going)
        failed = any(
            step["state"] in ("CRITICAL_ERROR", "CANCELLED") and step["on_failure"] != "continue" for step in steps
        )
        if flow["id"] in self.cancelled:
            implied = "CANCELLED"
        elif flow["open"]:
            implied = "FAILING" if failed or flow["compensated"] else "RUNNING"
        else:
            implied = "FAILED" if failed else "SUCCESS"
        assert flow["state"] == implied
        if flow["open"]:
            # Something can still happen, so it does not stand still.
            assert any(step["is_live"] and step["state"] == "SCHEDULED" for step in steps)
        else:
            self.met[f"ended {flow['state']}"] += 1
        self.met["compensation"] += any(step["kind"] == "compensation" and step["done"] for step in steps)

    def teardown(self) -> None:
        """However it stands, it comes to an end."""
        if self.flows:
            self._report([(task, "success") for task in self.claims])
            # One that was put off while its workflow was failing waits a second for its cancellation.
            self.run(self._execute("update penstock.task set run_at = now() where run_at > now()"))
            self.run(self.lives.live(lambda action, payload: None))
            self.it_is_what_its_steps_imply()
            open_ = self.run(self._execute("select id from penstock.workflow where finished_at is null"))
            assert open_ == []
            assert self.run(self._execute("select id from penstock.task")) == []


def pick(items: list[Any], which: int) -> Any:
    return items[which % len(items)]


STEPS = """
select s.*, coalesce(t.state, h.state)::text as task_state, t.id is not null as is_live, t.ordering_key
from penstock.workflow_step s
left join penstock.task t on t.id = s.task_id left join penstock.task_history h on h.id = s.task_id
order by s.workflow_id, s.number
"""


def test_random_workflows_are_always_what_their_steps_imply(database_url: str) -> None:
    store = Store(database_url)
    with asyncio.Runner() as runner:

        class OfThisTest(Workflows):
            pass

        OfThisTest.store, OfThisTest.loop = store, runner.get_loop()
        OfThisTest.steps, OfThisTest.met = 0, Counter()

        def is_enough() -> bool:
            return OfThisTest.steps >= FEWEST_STEPS and {name for name in MET if OfThisTest.met[name]} == MET

        try:
            run_rounds(OfThisTest, is_enough, examples=40, steps=30)
        finally:
            runner.run(store.close())
    print(f"{OfThisTest.steps} steps; met: {dict(OfThisTest.met)}")
    assert OfThisTest.steps >= FEWEST_STEPS
    assert {name for name, count in OfThisTest.met.items() if count} == MET
