"""One run: six kinds of processes, their queues and their database, clients, and what goes wrong."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import Context as Context_
from typing import Any

import msgspec

from penstock.api import dispatch
from penstock.api.dispatch import Methods
from penstock.brokers.base import Outgoing
from penstock.db.notify import Notifier
from penstock.protocol.errors import PenstockError
from penstock.protocol.requests import Request
from penstock.resulter import Resulter
from penstock.runtime.loop import Loop, Service, SideTask
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings, load_settings
from penstock.submitter import Submitter
from penstock.supervisor.process import Supervisor
from penstock.tasks import settle
from penstock.worker.handlers.actions import Registry, action
from penstock.worker.handlers.context import Context, Wait
from penstock.worker.handlers.steps import StepFailed
from penstock.worker.process import Worker
from tests.simulation import clock
from tests.simulation.checks import UNTAKEN_AFTER_SECONDS, Checks, Violation
from tests.simulation.clock import Clock
from tests.simulation.database import Bridge, Database, RealConnection, SimulatedStore
from tests.simulation.loop import Process, SimulatedLoop, current
from tests.simulation.plan import LIMITS, PROCESSES, ROUTE, SIDE_QUEUE, SIDE_WORKER, Call, Hold, Outage, Plan
from tests.simulation.queues import QueueService

_ANSWER_SECONDS = 3.0  # that a client waits
_REST_SECONDS = 600.0  # in which every task ends, once nothing goes wrong any more
_LOOK_SECONDS = 1.0
_SOON_SECONDS = 1.0


def make_settings() -> Settings:
    """Short times, so that repairs happen within a run."""
    return load_settings(
        database_url="postgresql://simulated", worker_name="w", concurrency=2, receive_wait_seconds=2,
        visibility_timeout_seconds=4, stale_after_seconds=9, heartbeat_seconds=1.5, unsent_after_seconds=2,
        untaken_after_seconds=UNTAKEN_AFTER_SECONDS, retry_base_seconds=0.3, retry_cap_seconds=2, poll_seconds=2,
        supervisor_interval_seconds=5, grace_seconds=3, inbound_methods="*", max_attempts=4, worker_concurrency=6,
        pack_max_tasks=3, batch_limit=2, claim_batch_size=8, in_flight_floor=4, task_timeout_seconds=5,
        announce_actions=False,  # they are made in a thread, which no seed determines
    )  # fmt: skip


class _Api(Service):
    """The api without its HTTP server."""

    name = "api"
    idle_seconds = 1.0

    def __init__(self, store: SimulatedStore, settings: Settings) -> None:
        self._store = store
        self._notifier = Notifier(store)
        self.methods = Methods(store, self._notifier, settings, queues={}, dead_letters={})

    async def open(self) -> None:
        await self._store.open()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"notify": self._notifier.run, "results": self.methods.long_polls.run}

    async def run_once(self) -> int:
        await self._store.ping()
        return 0


class _Worker(Worker):
    """Without the task that watches the threads of handlers: they live in real time."""

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {name: task for name, task in super().side_tasks().items() if not name.startswith("watch")}


class Planned(Exception):
    """A handler fails, as its task wants it."""


class _Mistakes(logging.Handler):
    """Finds lines that say that the code met what its author did not expect."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        event = record.msg if isinstance(record.msg, dict) else {}
        if event.get("event") == "task_died" or (record.exc_info and record.exc_info[0] is not Planned):
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            self._note(f"{dict(event)}\n{trace}")


class World:
    """history: lines of what happened, by simulated time. lines: the same, with every statement and its rows."""

    def __init__(self, bridge: Bridge, plan: Plan) -> None:
        self._bridge = bridge
        self._plan = plan
        self._chance = random.Random(f"world {plan.seed}")
        self._settings = make_settings()
        self._passes = self._chance.choice((1, 2))
        self._is_over = False  # nothing goes wrong any more
        self._has_ended = False
        self._failure: Violation | None = None
        self._processes: dict[int, Process] = {}
        self._services: dict[int, Service] = {}
        self._strangers: list[RealConnection] = []
        self._locked: set[int] = set()  # tasks, by strangers, now or before
        self._tasks: dict[int, int] = {}
        self._sent: Counter[int] = Counter()
        self._runs: Counter[int] = Counter()
        self.history: list[str] = []
        self.lines: list[str] = []
        self._digest = hashlib.sha256()
        self.statements = 0
        self.kills = 0
        self._queues = QueueService(random.Random(f"queues {plan.seed}"), self._pause, plan.fault_share)
        self.checks = Checks(bridge, self._queues)
        self._database = Database(
            bridge, pause=self._pause, strikes=self._strikes, asked=self._asked, answered=self._answered,
            changed=self._changed,
        )  # fmt: skip
        self._registry = Registry()
        for name in ("plain", "limited", "keyed", "routed"):
            action(name, registry=self._registry)(self._work)
        action("stepped", registry=self._registry)(self._step_by_step)

    def run(self) -> str:
        """Run the plan; returns the digest of all that happened. Raises Violation."""
        clock.follow(self._plan.seed)
        self._bridge.reset()
        mistakes = _Mistakes(lambda text: self._fail(Violation(text)))
        settle.PROMOTIONS_FROM = 16 if self._plan.limited else 1
        dispatch.MAX_INSERT_TASKS = 2  # so that bodies are cut
        logger = logging.getLogger("penstock")
        logger.handlers[:] = [mistakes]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
        loop = SimulatedLoop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._live())
        finally:
            self._has_ended = True
            for process in self._processes.values():
                process.kill()
            self._database.end_all()
            for connection in self._strangers:
                self._bridge.end(connection)
        if self._failure is not None:
            raise self._failure
        return self._digest.hexdigest()

    async def _live(self) -> None:
        plan = self._plan
        for number in range(len(PROCESSES)):
            self._start(number)
        for kill in plan.kills:
            process = self._processes[kill.process]
            process.kill_at = min(kill.step, process.kill_at or kill.step)
        await asyncio.sleep(1)
        for name, limits in LIMITS.items() if plan.limited else ():
            await self._call(Call(0, "action.set", {"action": name, **limits}))
        if plan.routed:
            await self._call(Call(0, "route.set", ROUTE))
        disturbances = [asyncio.ensure_future(self._hold(hold)) for hold in plan.holds]
        watch = asyncio.ensure_future(self._watch_results())
        disturbances += [asyncio.ensure_future(self._fall_out(outage)) for outage in plan.outages]
        for number, call in enumerate(plan.calls):
            await asyncio.sleep(call.after)
            self._raise()
            await (self._send(number, call) if call.by_queue else self._call(call, number))
        self.checks.look_for_broken()
        await asyncio.gather(*disturbances)
        self._queues.fault_share = 0.0
        self._is_over = True
        for action_name in {call.params["action"]: None for call in plan.calls if call.method == "action.pause"}:
            while not await self._call(Call(0, "action.resume", {"action": action_name})):
                await asyncio.sleep(_LOOK_SECONDS)
        deadline = Clock.now + _REST_SECONDS
        while self._is_busy():
            self._raise()
            if Clock.now > deadline:
                raise Violation(f"these tasks make no progress: {self.checks.unsettled()[:10]}")
            await asyncio.sleep(_LOOK_SECONDS)
        watch.cancel()
        self._raise()
        self.checks.look()
        self.checks.look_for_lost()
        self.checks.look_for_broken()
        self.checks.look_for_repeated(self._sent)
        self.checks.look_for_disorder(self._sent)
        self.checks.look_for_instants()
        self.checks.look_for_refused()
        self.checks.look_for_false_cancellations()
        if plan.is_calm:
            self.checks.look_for_dead()

    def _is_busy(self) -> bool:
        return bool(self._queues.messages["penstock-inbound"]) or bool(self.checks.unsettled())

    # Processes

    def _start(self, number: int) -> None:
        name = PROCESSES[number]
        process = Process(name, number, self._died)
        self._processes[number] = process
        self._note(f"{name}/{number} starts")
        process.start(self._serve(number, name), f"{name}/{number}")

    async def _serve(self, number: int, name: str) -> None:
        service = self._services[number] = self._make(name, number)
        passes = 1 if name in ("api", "supervisor") else self._passes
        try:
            ended = f"exit code {await Loop(service, passes=passes, grace_seconds=3).run()}"
        except Exception as exc:
            ended = repr(exc)
        self._fail(Violation(f"{name} ended with {ended}"))

    def _make(self, name: str, number: int) -> Service:
        settings = self._settings
        queues = {label: self._queues.queue(f"penstock-{label}", label) for label in ("inbound", "outbound", "results")}
        if self._plan.routed and number == SIDE_WORKER:
            queues["outbound"] = self._queues.queue(SIDE_QUEUE, "outbound:side")
        if name == "worker":
            return _Worker(
                outbound=queues["outbound"], results=queues["results"], settings=settings, registry=self._registry
            )
        store = SimulatedStore(self._database)
        if name == "api":
            return _Api(store, settings)
        if name == "submitter":
            return Submitter(store=store, inbound=queues["inbound"], settings=settings)
        if name == "scheduler":
            return Scheduler(store=store, outbound=queues["outbound"], settings=settings, open_queue=self._queues.queue)
        if name == "resulter":
            return Resulter(store=store, results=queues["results"], settings=settings)
        return Supervisor(store=store, queues=queues, settings=settings, open_queue=self._queues.queue)

    def _died(self, process: Process) -> None:
        self.kills += not self._has_ended
        self._note(f"{process.name}/{process.number} is killed at step {process.steps}")
        self._database.died(process)
        if not self._has_ended:
            down = next((k.down_seconds for k in self._plan.kills if k.process == process.number), 0.0)
            asyncio.get_running_loop().call_later(down, self._start, process.number, context=_WORLD)

    # What they meet

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.choice((0.0005, 0.002, 0.01, 0.05)) * self._chance.random())

    def _strikes(self) -> bool:
        return not self._is_over and current() is not None and self._chance.random() < self._plan.fault_share / 4

    def _asked(self, name: str, args: Any) -> None:
        self.statements += 1
        self._note_statement(f"{name} {args}")

        if name == "raise_journal_floor":
            self.checks.rewinding.add(args[0])

    def _answered(self, name: str, outcome: Any) -> None:
        self._note_statement(f"{name}: {type(outcome).__name__ if isinstance(outcome, Exception) else outcome}")

    def _note_statement(self, text: str) -> None:
        process = current()
        if process is not None:
            self._note(f"{process.name}/{process.number} {text}", is_statement=True)

    def _changed(self) -> None:
        if self._failure is None:
            process = current()
            self._check(self.checks.look, "" if process is None else process.name)

    async def _work(
        self, ctx: Context, n: int, seconds: float = 0.0, fails: int = 0, waits: float = 0.0, at: str = ""
    ) -> dict[str, Any] | Wait:
        self._runs[ctx.task_id] += 1
        self._note(f"handler of task {ctx.task_id} begins, claim {ctx.claim}")
        await asyncio.sleep(seconds)
        if self._runs[ctx.task_id] <= fails:
            raise Planned
        if waits:
            self._note(f"handler of task {ctx.task_id} waits, claim {ctx.claim}")
            return ctx.wait(f"t{n}", waits, on_timeout="fail" if n % 2 else "retry")
        self._note(f"handler of task {ctx.task_id} ends, claim {ctx.claim}")
        return {"claim": ctx.claim, "n": n}

    async def _step_by_step(
        self, ctx: Context, n: int, seconds: float = 0.0, fails: int = 0, waits: float = 0.0, at: str = ""
    ) -> dict[str, Any]:
        self._runs[ctx.task_id] += 1
        self._note(f"handler of task {ctx.task_id} begins, claim {ctx.claim}")

        async def run(name: str) -> int:
            self._check(self.checks.step_begins, ctx.task_id, ctx.claim, name)
            await asyncio.sleep(seconds / 3)
            return ctx.claim

        for name in "abc":
            self._check(self.checks.step_returns, ctx.task_id, ctx.claim, name, await ctx.step(name, run, name))
            if self._runs[ctx.task_id] <= fails:
                raise Planned
            if name == "a" and n % 2:
                await ctx.sleep(1)
            elif name == "b" and waits:
                with suppress(StepFailed):
                    await ctx.event(f"t{n}", timeout=waits)
        self._note(f"handler of task {ctx.task_id} ends, claim {ctx.claim}")
        return {"claim": ctx.claim, "n": n}

    def _check(self, check: Callable[..., None], *seen: Any) -> None:
        try:
            check(*seen)
        except Violation as violation:
            self._fail(violation)

    # Clients and strangers

    async def _call(self, call: Call, number: int | None = None) -> bool:
        """A request by HTTP, of which the client may never hear. Returns whether the client knows it is done."""
        params = call.params
        if "id" in params:
            if params["id"] not in self._tasks:
                return False
            params = {**params, "id": self._tasks[params["id"]]}
        if call.method == "retry":
            self.checks.retried.add(params["id"])
        if call.method == "workflow.retry":
            self.checks.flows_retried.add(params["id"])
        if call.method == "action.resume":
            self.checks.paused.pop(params["action"], None)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        process = self._processes[0]
        if process.is_dead or 0 not in self._services:
            self._note(f"client: {call.method}: refused")
            return False

        async def answer() -> None:
            api = self._services[0]
            assert isinstance(api, _Api)
            try:
                outcome: Any = await (
                    api.methods.handlers[call.method](_requests(call))
                    if call.body
                    else api.methods.call(call.method, params)
                )
            except PenstockError as exc:
                outcome = exc
            except Exception as exc:
                self._fail(Violation(f"{call.method} {params}: {exc!r}"))
                raise
            if not answered.done():
                answered.set_result(outcome)

        self._sent.update(_numbers(call, number))
        process.start(answer(), "request")
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                outcome = await answered
        except TimeoutError:
            self._note(f"client: {call.method}: no answer")
            return False
        for given, one in zip(call.body, outcome, strict=True) if call.body else [(params, outcome)]:
            self._note_answer(call.method, given, one, number)
        return call.body != () or not isinstance(outcome, PenstockError)

    def _note_answer(self, method: str, params: dict[str, Any], outcome: Any, number: int | None) -> None:
        if isinstance(outcome, PenstockError):
            self._note(f"client: {method} {params}: {type(outcome).__name__}")
            return
        self._note(f"client: {method} {params}: {getattr(outcome, 'id', 'done')}")  # no addresses of memory
        if method == "enqueue":
            self.checks.ledger[outcome.id] = outcome.id
        if method in ("enqueue", "workflow.create") and number is not None:
            self._tasks[number] = outcome.id
        if method == "action.pause":
            self.checks.paused[params["action"]] = Clock.now

    async def _send(self, number: int, call: Call) -> None:
        """A request through the inbound queue; sent again until the queue has it."""
        entries = [
            {"jsonrpc": "2.0", "method": call.method, "params": params, "id": number}
            for params in call.body or (call.params,)
        ]
        body = json.dumps(entries if call.body else entries[0])
        queue = self._queues.queue("penstock-inbound", "inbound")
        self._note(f"client: {call.method} {call.body or call.params} by queue")
        for _ in range(20):
            self._sent.update(_numbers(call, number))
            try:
                if not (await queue.send([Outgoing(body)])).failed:
                    return
            except PenstockError:
                pass

    async def _watch_results(self) -> None:
        """Where only locks are in the way, no result waits for the locks of other tasks."""
        while self._plan.is_calm:
            self._check(self.checks.look_for_held_up, self._locked)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _fall_out(self, outage: Outage) -> None:
        await asyncio.sleep(outage.at)
        self._note(f"results do not arrive for {outage.seconds:.1f} s")
        self._queues.is_out = True
        await asyncio.sleep(_SOON_SECONDS)
        if outage.kills is not None:
            self._processes[outage.kills].kill()
        await asyncio.sleep(outage.seconds - _SOON_SECONDS)
        self._queues.is_out = False

    async def _hold(self, hold: Hold) -> None:
        await asyncio.sleep(hold.at)
        connection = self._bridge.take("stranger")
        self._strangers.append(connection)
        try:
            self._bridge.start(connection, "begin")
            pending = self._bridge.start(
                connection,
                "select id from penstock.task where id % 3 = $1 order by id limit $2 for update skip locked",
                (self._chance.randrange(3), hold.tasks),
            )  # fmt: skip
            self._bridge.start(
                connection,
                "select key from penstock.ordering_head order by key limit $1 for update skip locked",
                (hold.tasks // 2,),
            )  # fmt: skip
            locked = [row["id"] for row in pending.work.result()]
            self._locked.update(locked)
            self._note(f"a stranger locks {locked} for {hold.seconds:.1f} s")
            await asyncio.sleep(hold.seconds)
        finally:
            self._strangers.remove(connection)
            self._bridge.end(connection)

    def _note(self, text: str, *, is_statement: bool = False) -> None:
        line = f"{Clock.now:9.3f} {text}"
        self._digest.update(f"{line}\n".encode())
        self.lines.append(line)
        if not is_statement:
            self.history.append(line)

    def _fail(self, violation: Violation) -> None:
        if self._failure is None:
            self._failure = violation
            self._note(f"violation: {violation}")

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure


def _requests(call: Call) -> list[Request]:
    return [Request("2.0", call.method, msgspec.Raw(msgspec.json.encode(params))) for params in call.body]


def _numbers(call: Call, number: int | None) -> list[int]:
    """Of the tasks that a call may make; an empty list for calls of the world itself."""
    return [params["payload"]["n"] for params in call.body] or ([] if number is None else [number])


_WORLD = Context_()
