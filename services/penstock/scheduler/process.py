"""Scheduler: claims due tasks by priority, which SQS does not have, and sends no more than the window allows."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from penstock.brokers.base import Queue
from penstock.db.notify import Listener
from penstock.db.pool import Store
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.task import BEGINNING, Position, Stretch
from penstock.runtime.loop import Service, SideTask
from penstock.runtime.periodic import Pace, is_set_within
from penstock.scheduler.gates import Gates
from penstock.scheduler.routes import Diverter, Routes
from penstock.scheduler.scan_bounds import LEVELS, ScanBounds
from penstock.scheduler.sending import Sender
from penstock.scheduler.window import ClaimWindow, Throughput
from penstock.settings.model import Settings
from penstock.tasks import claim
from penstock.tasks.claim import ClaimBatch

_AGED_SHARE = 10  # one claim in so many goes to tasks that have waited too long
_AGED_LOOK_SECONDS = 1.0  # until the next look when there were none
_SOONEST_SECONDS = 0.001
_RULES_FRESH_SECONDS = 1.0
_CONFIRM_SECONDS = 1.0  # at most, until a claim confirms what was sent


class Scheduler(Service):
    """One scheduler process; ``run_once`` is one claim, sent and confirmed, and a look at gates and routes."""

    name = "scheduler"

    def __init__(
        self, *, store: Store, outbound: Queue, settings: Settings, open_queue: Callable[[str, str], Queue]
    ) -> None:
        self._store = store
        self._outbound = outbound
        self._settings = settings
        self._listener = Listener(store)
        self._bounds = ScanBounds()
        self._rules_read_at = float("-inf")
        self._is_limited = False  # any action is limited or paused
        self._has_gates = False
        self._has_turns = False  # tasks are promoted many at a time
        self._looked_at = float("-inf")  # for the next task that will be due
        self._next_due_at = float("inf")
        self._waiting = asyncio.Lock()
        self._has_looked_in_vain = False  # a pass found all room set aside for the claim of the other
        self._aged_at = float("-inf")
        self._others_first = 0  # tasks to claim by priority before the next that waited too long
        self._throughput = Throughput(store)
        window_of = partial(ClaimWindow, store, settings, self._throughput)
        self._window = window_of(None)
        self._pace = Pace(settings.hop_wait_seconds if outbound.limits.bills_calls else 0.0)
        self._routes = Routes(
            store=store, outbound=outbound, open_queue=open_queue, window_of=window_of, put_aside=self._note
        )
        self._diverter = Diverter(store, settings)
        self._sender = Sender(
            store=store, settings=settings, run_seconds=self._throughput.run_seconds,
            queue_of=self._routes.queue_of, released=self._bounds.look_back,
        )  # fmt: skip
        self._gates = Gates(
            store=store, sender=self._sender, at_once=settings.claim_batch_size, claimed=self._passed_gates
        )

    async def open(self) -> None:
        await self._store.open()
        await self._outbound.depth()

    def side_tasks(self) -> Mapping[str, SideTask]:
        return {"listen": self._listener.run}

    async def wait_for_work(self) -> None:
        """Until a wake-up, the next task's time or the poll interval; with a full window, until it may have room."""
        if self._window.is_full:  # not behind a pass that waits for a wake-up: tasks that settle wake no scheduler
            await self._sender.confirm()
            await asyncio.sleep(max(_SOONEST_SECONDS, self._window.full_for_seconds(monotonic())))
            return
        async with self._waiting:  # a wake-up is for one pass: two that look at once find no more than one
            waits = [self._settings.poll_seconds, *self._routes.full_for_seconds()]
            if self._has_gates:
                waits.append(self._gates.idle_seconds())
            if self._sender.sent:
                waits.append(_CONFIRM_SECONDS)
            if not self._listener.event.is_set():
                waits.append(await self._read_seconds_to_next())
            await is_set_within(self._listener.event, min(waits))
            self._listener.event.clear()

    async def _read_seconds_to_next(self) -> float:
        """Until the next task is due that was not at the last look; wake-ups for tasks that are due change nothing."""
        now = monotonic()
        if self._listener.later or now >= min(self._next_due_at, self._looked_at + self._settings.poll_seconds):
            self._listener.later = False
            seconds = await claim.read_seconds_to_next(self._store, self._bounds.from_bounds(), LEVELS)
            self._looked_at = now = monotonic()
            self._next_due_at = float("inf") if seconds is None else now + seconds
        return max(_SOONEST_SECONDS, self._next_due_at - now)

    async def run_once(self) -> int:
        """Claim what is due and fits the window, send it, release the rest; returns how many were sent."""
        await asyncio.sleep(self._pace.turn_seconds())
        # Cleared before looking: a wake-up that comes during the claim then leads to another look, not to a wait.
        self._listener.event.clear()
        await self._store.read_fence()
        await self._read_rules()
        failure: Unavailable | None = None
        sent = diverted = 0
        # The gates first: while tasks wait there, more of their action are diverted, which costs twice as much.
        worked = await self._gates.run_once() if self._has_gates else 0
        try:
            sent, diverted = await self._send_plain()
        except Unavailable as exc:
            if not (self._has_gates or self._routes.known):
                raise
            failure = exc
        worked += sent + diverted
        if diverted and self._has_gates:
            worked += await self._gates.run_once()
        worked += await self._routes.run_once(self._sender)
        if self._follows_rules or self._has_gates or self._has_turns:
            await self._sender.confirm()  # such claims confirm nothing
        if failure is not None:
            raise failure
        return worked

    async def drain(self, seconds: float) -> None:
        await self._sender.confirm()

    async def _send_plain(self) -> tuple[int, int]:
        """Send tasks without route and gate; returns how many were sent, and how many diverted to one."""
        batch, diverted = await self._claim()
        if batch is not None:
            return await self._sender.send_batch(batch), diverted
        if not diverted and await self._read_rules(at_once=True):
            return await self._send_plain()  # nothing was found because there are rules now, or turns
        return 0, diverted

    @property
    def _follows_rules(self) -> bool:
        """Whether claims must follow limits or routes; a plain claim finds no task then."""
        return self._is_limited or bool(self._routes.known)

    async def _read_rules(self, *, at_once: bool = False) -> bool:
        """Read limits and routes when they are old, or at once; returns whether claims take more from now on."""
        if not at_once and monotonic() - self._rules_read_at < _RULES_FRESH_SECONDS:
            return False
        took = self._follows_rules, self._has_turns
        (found,) = await self._store.fetch("read_rules")
        self._rules_read_at = monotonic()
        self._is_limited, self._has_gates, self._has_turns = found["limits"], found["gates"], found["turns"]
        self._routes.set(json.loads(found["routes"]))
        return (self._follows_rules, self._has_turns) > took

    async def _passed_gates(self, batch: ClaimBatch) -> None:
        """A claim looks up routes in Postgres, so it may find one that is unknown here."""
        self._throughput.saw(batch.tasks)
        if {task.route for task in batch.tasks} - {None, *self._routes.known}:
            await self._read_rules(at_once=True)

    async def _claim(self) -> tuple[ClaimBatch | None, int]:
        """Claim what fits the window, tasks that waited too long first; also returns how many tasks were diverted."""
        bounds = self._bounds
        self.has_found_all = False
        async with self._window.reserve() as limit:
            if not limit:
                # The other pass has all the room. Its claim may see less than the wake-up that this one was given.
                self._has_looked_in_vain = self._window.reserved > 0
                diverted = await self._diverter.run_once(self._gates.flowing) if self._follows_rules else 0
                self._note(diverted)
                return None, diverted
            batch, diverted = await self._claim_aged(limit)
            if batch is None and not diverted:
                if not bounds.sweep_is_due(monotonic()):
                    batch, diverted = await self._claim_of(limit, bounds.from_bounds())
                    bounds.claimed(*_outcome(batch, diverted, limit))
                if batch is None and not diverted and bounds.sweep_is_due(monotonic()):
                    batch, diverted = await self._sweep(limit)
                    has_more_ways = self._follows_rules or self._has_gates
                    self.has_found_all = batch is not None and len(batch.tasks) < limit and not has_more_ways
                self._others_first -= limit if batch is None else len(batch.tasks)
            self._note(diverted)
            if batch is not None:
                self._window.note_claim(batch.tasks)
                self._pace.record(len(batch.tasks))
        if self._has_looked_in_vain:
            self._has_looked_in_vain = False
            self._listener.event.set()  # one of the two looks again
        return batch, diverted

    def _note(self, diverted: int) -> None:
        if diverted:
            self._has_gates = self._has_gates or self._is_limited
            self._routes.look_again()

    async def _claim_aged(self, limit: int) -> tuple[ClaimBatch | None, int]:
        """Claim tasks that higher priorities have kept waiting, the lowest first; a small part of all claims."""
        age = self._settings.priority_ageing_seconds
        if not age or self._others_first > 0 or monotonic() < self._aged_at:
            return None, 0
        levels = await claim.read_priorities(self._store, LEVELS)
        stretches = [Stretch(level, level, BEGINNING) for level in reversed(levels)]
        batch, diverted = await self._claim_of(max(1, limit // _AGED_SHARE), stretches, due_seconds=age)
        if batch is not None:
            self._others_first = (_AGED_SHARE - 1) * len(batch.tasks)
        elif not diverted:
            self._aged_at = monotonic() + _AGED_LOOK_SECONDS
        return batch, diverted

    async def _sweep(self, limit: int) -> tuple[ClaimBatch | None, int]:
        """Claim from the front; other passes claim behind the bounds meanwhile."""
        bounds = self._bounds
        bounds.sweep_begins(monotonic())
        batch, diverted = None, 0
        try:
            if bounds.levels_are_old(monotonic()):
                bounds.set_levels(await claim.read_priorities(self._store, LEVELS), monotonic())
            batch, diverted = await self._claim_of(limit, bounds.from_front())
        finally:
            bounds.swept(*_outcome(batch, diverted, limit), monotonic())
        return batch, diverted

    async def _claim_of(
        self, limit: int, stretches: Sequence[Stretch], *, due_seconds: float = 0.0
    ) -> tuple[ClaimBatch | None, int]:
        try:
            if self._follows_rules:
                return await self._gates.claim_by_rules(limit, stretches, due_seconds)
            if self._has_turns:
                return await claim.claim(self._store, limit, stretches=stretches, due_seconds=due_seconds), 0
            with self._sender.confirming() as sent:
                batch = await claim.claim_ready(
                    self._store, limit, stretches=stretches, due_seconds=due_seconds, sent=sent
                )
                return batch, 0
        except Refused as exc:
            given_up = await claim.give_up_unclaimable(self._store, self._settings, exc, limit, stretches, due_seconds)
            return None, given_up


def _outcome(batch: ClaimBatch | None, diverted: int, limit: int) -> tuple[Mapping[int, Position], bool]:
    """How far a claim reached, and whether it found less than it had room for."""
    if batch is None:
        return {}, diverted < limit
    return batch.reached, len(batch.tasks) + diverted < limit
