"""Scheduler: claims due tasks by priority and sends them, no more than the window allows.

SQS has no priority, so tasks that are not needed yet stay in Postgres. ``scan_bounds`` decides where to look,
``claim_window`` how much to claim, ``packing`` what travels together. Tasks of limited actions wait at ``gates``;
``routes`` have windows of their own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from penstock.brokers.base import Queue
from penstock.db.notify import Listener
from penstock.db.pool import Store
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.task import BEGINNING, Position, Stretch
from penstock.runtime.loop import Service, SideTask
from penstock.runtime.periodic import is_set_within
from penstock.scheduler.claim_window import ClaimWindow, Throughput
from penstock.scheduler.divert import Diverter
from penstock.scheduler.gates import Gates
from penstock.scheduler.routes import Routes
from penstock.scheduler.scan_bounds import LEVELS, ScanBounds
from penstock.scheduler.sending import Sender
from penstock.scheduler.unclaimable import give_up_unclaimable
from penstock.settings.model import Settings
from penstock.tasks import claim
from penstock.tasks.records import ClaimBatch

_AGED_SHARE = 10  # one claim in so many goes to tasks that have waited too long
_AGED_LOOK_SECONDS = 1.0  # until the next look when there were none
_SOONEST_SECONDS = 0.001
_RULES_FRESH_SECONDS = 1.0


class RulesCache:
    """The limits and routes as this scheduler knows them.

    limited: any action is limited or paused. gates: any gate exists. routes: (name, queue) of each.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_at = float("-inf")
        self.limited = False
        self.gates = False
        self.routes: list[tuple[str, str]] = []

    @property
    def apply(self) -> bool:
        """Whether claims must follow them; a plain claim finds no task then."""
        return self.limited or bool(self.routes)

    async def refresh(self, *, at_once: bool = False) -> bool:
        """Read them when they are old, or at once; returns whether claims must follow them now and did not before."""
        if not at_once and monotonic() - self._read_at < _RULES_FRESH_SECONDS:
            return False
        applied = self.apply
        (found,) = await self._store.fetch("read_rules")
        self._read_at = monotonic()
        self.limited, self.gates = found["limits"], found["gates"]
        self.routes = [(name, queue) for name, queue in json.loads(found["routes"])]
        return self.apply and not applied


class Scheduler(Service):
    """One scheduler process; ``run_once`` is one claim, sent and confirmed, and a look at gates and routes.

    open_queue: makes a queue of a name, or URL, and a label, for routes.
    """

    name = "scheduler"

    def __init__(
        self, *, store: Store, outbound: Queue, settings: Settings, open_queue: Callable[[str, str], Queue]
    ) -> None:
        self._store = store
        self._outbound = outbound
        self._settings = settings
        self._listener = Listener(store)
        self._bounds = ScanBounds()
        self._rules = RulesCache(store)
        self._waiting = asyncio.Lock()
        self._aged_at = float("-inf")
        self._others_first = 0  # tasks to claim by priority before the next that waited too long
        self._throughput = throughput = Throughput(store)
        self._window = ClaimWindow(store=store, settings=settings, throughput=throughput, route=None)
        self._routes = Routes(
            store=store, settings=settings, throughput=throughput, outbound=outbound, open_queue=open_queue,
            put_aside=self._note,
        )  # fmt: skip
        self._diverter = Diverter(store=store, at_once=settings.claim_batch_size, give_up=self._give_up)
        self._sender = Sender(
            store=store, settings=settings, times=throughput.times, queue_of=self._routes.queue_of,
            released=self._bounds.look_back,
        )  # fmt: skip
        self._gates = Gates(
            store=store, sender=self._sender, at_once=settings.claim_batch_size,
            claimed=self._passed_gates,
        )  # fmt: skip

    async def open(self) -> None:
        await self._store.open()
        await self._outbound.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"listen": self._listener.run}

    async def wait_for_work(self) -> None:
        """Until a wake-up, the next task's time or the poll interval; while the window is full, wake-ups wait too."""
        async with self._waiting:  # a wake-up is for one pass: two that look at once find no more than one
            await asyncio.sleep(self._window.full_for_seconds())
            seconds = self._settings.poll_seconds
            if self._rules.gates:
                seconds = min(seconds, self._gates.idle_seconds())
            if not self._listener.event.is_set():
                async with self._store.session() as session:
                    next_due = await claim.read_seconds_to_next(session, self._bounds.from_bounds(), LEVELS)
                if next_due is not None:
                    seconds = min(seconds, max(_SOONEST_SECONDS, next_due))
            await is_set_within(self._listener.event, seconds)
            self._listener.event.clear()

    async def run_once(self) -> int:
        """Claim what is due and fits the window, send it, release the rest; returns how many were sent."""
        # Cleared before looking: a wake-up that comes during the claim then leads to another look, not to a wait.
        self._listener.event.clear()
        await self._store.read_fence()
        await self._look_at_rules()
        failure: Unavailable | None = None
        try:
            worked = await self._send_plain()
        except Unavailable as exc:
            if not (self._rules.gates or self._rules.routes):
                raise
            worked, failure = 0, exc
        if self._rules.gates:
            worked += await self._gates.run_once()
        if self._rules.routes:
            worked += await self._routes.run_once(self._sender)
        if failure is not None:
            raise failure
        return worked

    async def _send_plain(self) -> int:
        """Send tasks without route and gate; returns how many were sent, or diverted to one."""
        batch, diverted = await self._claim()
        if batch is not None:
            return diverted + await self._sender.send_batch(batch)
        if not diverted and await self._look_at_rules(at_once=True):
            return await self._send_plain()  # nothing was found because there are rules now
        return diverted

    async def _look_at_rules(self, *, at_once: bool = False) -> bool:
        """Returns whether claims must follow rules now and did not before."""
        applies_now = await self._rules.refresh(at_once=at_once)
        self._routes.set(self._rules.routes)
        return applies_now

    async def _passed_gates(self, batch: ClaimBatch) -> None:
        """A claim looks up routes in Postgres, so it may find one that is unknown here."""
        self._throughput.saw(batch.tasks)
        if any(not self._routes.knows(task.route) for task in batch.tasks):
            await self._look_at_rules(at_once=True)

    async def _claim(self) -> tuple[ClaimBatch | None, int]:
        """Claim what fits the window, behind the bounds or from the front; tasks that waited too long go first.

        Also returns how many tasks were diverted to a gate or a route.
        """
        bounds = self._bounds
        async with self._window.reserved() as limit:
            if not limit:
                return None, await self._look_ahead()
            batch, diverted = await self._claim_aged(limit)
            if batch is None and not diverted:
                if bounds.sweep_is_due(monotonic()):
                    batch, diverted = await self._sweep(limit)
                else:
                    batch, diverted = await self._claim_behind_bounds(limit)
                self._others_first -= limit if batch is None else len(batch.tasks)
            self._note(diverted)
            if batch is not None:
                self._window.claimed(batch.tasks)
        return batch, diverted

    async def _look_ahead(self) -> int:
        """Without room for a claim: divert tasks of gates and routes."""
        diverted = await self._diverter.run_once() if self._rules.apply else 0
        self._note(diverted)
        return diverted

    def _note(self, diverted: int) -> None:
        if diverted:
            self._rules.gates = self._rules.gates or self._rules.limited
            self._routes.look_again()

    async def _claim_aged(self, limit: int) -> tuple[ClaimBatch | None, int]:
        """Claim tasks that higher priorities have kept waiting, the lowest first; a small part of all claims."""
        age = self._settings.priority_ageing_seconds
        if not age or self._others_first > 0 or monotonic() < self._aged_at:
            return None, 0
        async with self._store.session() as session:
            levels = await claim.read_priorities(session, LEVELS)
        stretches = [Stretch(level, level, BEGINNING) for level in reversed(levels)]
        batch, diverted = await self._claim_of(max(1, limit // _AGED_SHARE), stretches, due_seconds=age)
        if batch is not None:
            self._others_first = (_AGED_SHARE - 1) * len(batch.tasks)
        elif not diverted:
            self._aged_at = monotonic() + _AGED_LOOK_SECONDS
        return batch, diverted

    async def _claim_behind_bounds(self, limit: int) -> tuple[ClaimBatch | None, int]:
        bounds = self._bounds
        batch, diverted = await self._claim_of(limit, bounds.from_bounds())
        bounds.claimed(*_outcome(batch, diverted, limit))
        if batch is None and not diverted and bounds.sweep_is_due(monotonic()):
            return await self._sweep(limit)
        return batch, diverted

    async def _sweep(self, limit: int) -> tuple[ClaimBatch | None, int]:
        """Claim from the front; other passes claim behind the bounds meanwhile."""
        bounds = self._bounds
        bounds.sweep_begins(monotonic())
        batch, diverted = None, 0
        try:
            if bounds.levels_are_old(monotonic()):
                async with self._store.session() as session:
                    bounds.set_levels(await claim.read_priorities(session, LEVELS), monotonic())
            batch, diverted = await self._claim_of(limit, bounds.from_front())
        finally:
            bounds.swept(*_outcome(batch, diverted, limit), monotonic())
        return batch, diverted

    async def _claim_of(
        self, limit: int, stretches: Sequence[Stretch], *, due_seconds: float = 0.0
    ) -> tuple[ClaimBatch | None, int]:
        try:
            async with self._store.session() as session:
                if self._rules.apply:
                    return await claim.claim_by_rules(session, limit, stretches=stretches, due_seconds=due_seconds)
                return await claim.claim(session, limit, stretches=stretches, due_seconds=due_seconds), 0
        except Refused as exc:
            return None, await self._give_up(exc, limit, stretches, due_seconds=due_seconds)

    async def _give_up(
        self, refused: Refused, limit: int, stretches: Sequence[Stretch], *, due_seconds: float = 0.0
    ) -> int:
        """Fail the tasks because of which a claim was refused; returns how many. Raises Refused: there are none."""
        given_up = await give_up_unclaimable(
            self._store, refused, limit, stretches,
            due_seconds=due_seconds, hold_keys=self._settings.holds_ordering_keys,
        )  # fmt: skip
        if not given_up:
            raise refused
        return given_up


def _outcome(batch: ClaimBatch | None, diverted: int, limit: int) -> tuple[Mapping[int, Position], bool]:
    """How far a claim reached, and whether it found less than it had room for."""
    if batch is None:
        return {}, diverted < limit
    return batch.reached, len(batch.tasks) + diverted < limit
