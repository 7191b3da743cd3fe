"""Limit gates (decisions/014): where tasks of limited actions and tenants wait, and how they are claimed.

The row of an action or tenant is locked while its gates are read; rows of tenants that another scheduler holds are
skipped, so no two can deadlock. The gates that have waited longest for a look come first; if there is room for some of
them alone, these are drawn by lot.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from time import monotonic
from typing import Any

from penstock.db.pool import Store
from penstock.db.session import Session
from penstock.limits.model import UNLIMITED
from penstock.protocol.errors import Refused, Unavailable
from penstock.protocol.task import Stretch
from penstock.runtime.logs import log
from penstock.scheduler.sending import Sender
from penstock.tasks import claim
from penstock.tasks.claim import ClaimBatch

_GATES_AT_ONCE = 500
BUSY_SECONDS = 0.05  # until a limit of tasks in flight is looked at again; settling wakes no scheduler
_ADMITTED_AT_ONCE = 16  # actions; those of others take the way through a gate
_ADMITTED_SECONDS = 60.0  # since tasks of an action were last let through
_PAUSE_SECONDS = 2.0  # after tasks could not be claimed or sent
_IDLE_SECONDS = 60.0

Rule = tuple[str, datetime | None]  # an action, and when its limits were changed last


@dataclass(kw_only=True)
class Gates:
    store: Store
    sender: Sender
    at_once: int  # tasks of an action in one claim
    claimed: Callable[[ClaimBatch], Awaitable[None]]  # called with each claim before it is sent
    _looking: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _admitting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _admitted_at: dict[str, float] = field(init=False, default_factory=dict)  # actions with limits as a whole
    flowing: Sequence[str] = ()  # the actions of the last claim, if no task in it was of another
    _rest_until: dict[Rule, float] = field(init=False, default_factory=dict)  # a change ends a rest
    _next_at: float = field(init=False, default=float("-inf"))
    _is_asked: bool = field(init=False, default=False)

    def idle_seconds(self) -> float:
        """For how long no known gate is worth a look; a while as long as another pass looks."""
        return BUSY_SECONDS if self._looking.locked() else max(0.0, self._next_at - monotonic())

    async def run_once(self) -> int:
        """Claim and send what the limits allow, unless another pass does so; returns how many left their gates.

        Not 0 either where another pass would have looked meanwhile: it may know of gates that are younger.
        """
        if self._looking.locked():
            self._is_asked = True
            return 0
        async with self._looking:
            self._is_asked = False
            (found,) = await self.store.fetch("find_open_gates")
            now = monotonic()
            self._rest_until = {rule: until for rule, until in self._rest_until.items() if until > now}
            self._next_at = now + (_IDLE_SECONDS if found["seconds"] is None else found["seconds"])
            went = 0
            found_rules = zip(found["actions"], found["changed_at"], strict=True)
            rules = [rule for rule in found_rules if rule not in self._rest_until]
            random.shuffle(rules)  # or the first of them would use up what a limit of a tenant leaves
            for rule in rules:
                try:
                    went += await self._let_through(rule)
                except Refused as exc:  # other gates and routes must not wait for this action
                    log.error("gate_refused", action=rule[0], reason=str(exc), retry_in_seconds=_PAUSE_SECONDS)
                    self._rest(rule, _PAUSE_SECONDS)
            self._next_at = now if went else min([self._next_at, *self._rest_until.values()])
            return went + self._is_asked

    async def claim_by_rules(
        self, limit: int, stretches: Sequence[Stretch], due_seconds: float
    ) -> tuple[ClaimBatch | None, int]:
        """As ``claim.claim_by_rules``; tasks of actions that were let through lately need not wait at a gate."""
        self.flowing = ()
        now = monotonic()
        actions = [action for action, at in self._admitted_at.items() if now - at < _ADMITTED_SECONDS]
        if not actions:
            return await claim.claim_by_rules(self.store, limit, stretches=stretches, due_seconds=due_seconds)
        # Another pass that finds the actions locked would divert their tasks.
        async with self._admitting, self.store.transaction() as session:
            allowances = await self._admit(session, actions, limit)
            batch, diverted = await claim.claim_by_rules(
                session, limit, stretches=stretches, due_seconds=due_seconds,
                rooms={action: one.tasks for action, one in allowances.items()},
            )  # fmt: skip
            tasks = () if batch is None else batch.tasks
            went = Counter(task.action for task in tasks if task.action in allowances)
            self.flowing = list(went) if went.total() == len(tasks) else ()
            for action, count in went.items():
                self._note_admitted(action)
                if allowances[action].tokens is not None:
                    await session.fetch("note_action", action, allowances[action].spent(count))
            return batch, diverted

    async def _admit(self, session: Session, actions: Sequence[str], room: int) -> dict[str, Allowance]:
        """Lock actions, and see how many tasks of each may go past its gates, where nothing waits."""
        rows = {row["name"]: row for row in await session.fetch("lock_admitting", actions)}
        if not rows:
            return {}
        most = [row["max_in_flight"] or 0 for row in rows.values()]
        counted = await session.fetch("count_admitting", list(rows), most)
        allowances = {action: allowance(rows[action], in_flight, room) for action, in_flight in counted}
        return {action: one for action, one in allowances.items() if one.tasks}

    def _note_admitted(self, action: str) -> None:
        self._admitted_at.pop(action, None)  # the newest stands last
        self._admitted_at[action] = monotonic()
        while len(self._admitted_at) > _ADMITTED_AT_ONCE:
            del self._admitted_at[next(iter(self._admitted_at))]

    async def _let_through(self, rule: Rule) -> int:
        action, batch = rule[0], None
        async with self.store.transaction() as session:
            rows = await session.fetch("lock_action", action)
            if not rows and await session.value("action_is_limited", action):
                self._rest(rule, BUSY_SECONDS)  # another scheduler holds it
                return 0
            limits: Any = rows[0] if rows else UNLIMITED | {"held_until": None}
            if limits["paused"]:
                await session.fetch("close_gates", action, None)
                return 0
            held_until = limits["held_until"]
            if held_until is not None and held_until > limits["at"]:
                await session.fetch("close_gates", action, held_until)
                self._next_at = min(self._next_at, monotonic() + (held_until - limits["at"]).total_seconds())
                return 0
            in_flight = 0
            if limits["max_in_flight"] is not None:
                in_flight = await session.value("count_gated", action, limits["max_in_flight"])
            whole = allowance(limits, in_flight, self.at_once)
            if not whole.tasks:
                if whole.tokens is not None and (limits["refilled_at"] or limits["at"]) > limits["at"]:
                    await session.fetch("note_action", action, whole.tokens)  # the clock went back: refill from now on
                self._rest(rule, whole.retry_seconds)
                return 0
            found = await session.fetch("lock_gates", action, _GATES_AT_ONCE)
            tenants = await look_at_tenants(session, found, whole.tasks)
            gates = tenants.bound({row["name"]: allowance(row, row["in_flight"], whole.tasks) for row in found})
            is_free = not any(limits[name] for name in UNLIMITED)
            if is_free and (left := await session.fetch("leave_gates", list(gates), self.at_once)):
                await session.fetch("rest_gates", list(gates))
                self.sender.released()
                return len(left)
            shares = tenants.share_out(whole.tasks, gates)
            went: Mapping[str, int] = {}
            if shares:
                batch, went = await claim.claim_at_gates(session, shares)
            if whole.tokens is not None:
                await session.fetch("note_action", action, whole.spent(sum(went.values())))
            await tenants.note(session, went)
            await self._note(session, gates, shares, went)
        if batch is None:
            return 0
        if rows and limits["key_max_in_flight"] is None and limits["key_rate"] is None:
            self._note_admitted(action)
        try:
            await self.claimed(batch)
            return await self.sender.send_batch(batch)
        except Unavailable as exc:
            log.warning("gate_not_passed", action=action, reason=str(exc), retry_in_seconds=_PAUSE_SECONDS)
            self._rest(rule, _PAUSE_SECONDS)
            return 0

    async def _note(
        self, session: Session, gates: Mapping[str, Allowance], shares: Mapping[str, int], went: Mapping[str, int]
    ) -> None:
        """Store what is left of each gate's rate, and when to look again."""
        waits = {name: 0.0 if one.tasks else one.retry_seconds for name, one in gates.items()}
        soonest = min((seconds for seconds in waits.values() if seconds), default=_IDLE_SECONDS)
        self._next_at = min(self._next_at, monotonic() + soonest)
        left = [one.spent(went.get(name, 0)) for name, one in gates.items()]
        await session.fetch("note_gates", list(waits), left, list(waits.values()))
        emptied = [name for name, share in shares.items() if went.get(name, 0) < share]
        if emptied:
            await session.fetch("rest_gates", emptied)

    def _rest(self, rule: Rule, seconds: float) -> None:
        # Not for as long as a rate takes: what another scheduler could not send is given back to it.
        self._rest_until[rule] = monotonic() + min(seconds, _IDLE_SECONDS)


@dataclass(slots=True)
class TenantLimits:
    """Tenants whose tasks wait at some gates."""

    allowances: dict[str, Allowance] = field(default_factory=dict)  # by tenant
    of: dict[str, str] = field(default_factory=dict)  # the tenant of a gate
    paused: list[str] = field(default_factory=list)  # gates of tenants that are

    def bound(self, gates: Mapping[str, Allowance]) -> dict[str, Allowance]:
        """The gates whose tenant is not paused, none of them allowing more than its tenant may."""
        shut = set(self.paused)
        bound = {}
        for name, one in gates.items():
            tenant = self.allowances.get(self.of.get(name, ""))
            if tenant is not None and tenant.tasks < one.tasks:  # the tokens stay the gate's own
                one = Allowance(tenant.tasks, tenant.retry_seconds, one.tokens)
            if name not in shut:
                bound[name] = one
        return bound

    def share_out(self, room: int, gates: Mapping[str, Allowance]) -> dict[str, int]:
        """As the function ``share_out``, first between tenants, then between the gates of each."""
        groups: dict[str, dict[str, Allowance]] = {}
        for name, one in gates.items():
            tenant = self.of.get(name)
            # A gate of no tenant is a group of its own, under a name that no tenant has.
            groups.setdefault(f"\x1e{name}" if tenant is None else tenant, {})[name] = one
        wholes = {}
        for group, members in groups.items():
            most, limit = sum(one.tasks for one in members.values()), self.allowances.get(group)
            wholes[group] = Allowance(most if limit is None else min(most, limit.tasks), 0.0, None)
        shares: dict[str, int] = {}
        for name, share in share_out(room, wholes).items():
            shares |= share_out(share, groups[name])
        return shares

    async def note(self, session: Session, went: Mapping[str, int]) -> None:
        """Store what is left of each tenant's rate after so many claims by gate, and close the gates of paused ones."""
        if self.paused:
            await session.fetch("close_gates_of_paused", self.paused)
        spent = Counter[str]()
        for gate, count in went.items():
            if gate in self.of:
                spent[self.of[gate]] += count
        rated = {name: limit.spent(spent[name]) for name, limit in self.allowances.items() if limit.tokens is not None}
        if rated:
            await session.fetch("note_tenants", list(rated), list(rated.values()))


async def look_at_tenants(session: Session, rows: Sequence[Any], room: int) -> TenantLimits:
    """Lock the tenants of gates, rows of ``lock_gates``, after the action's lock, and count what each may do."""
    found = TenantLimits(of={row["name"]: row["tenant"] for row in rows if row["tenant"] is not None})
    if not found.of:
        return found
    names = sorted(set(found.of.values()))
    locked = {row["name"]: row for row in await session.fetch("lock_tenants", names)}
    missing = [name for name in names if name not in locked]
    if missing:
        # New ones get their rows now; those that another scheduler holds are left to it.
        await session.fetch("add_tenant_paces", missing)
        locked |= {row["name"]: row for row in await session.fetch("lock_tenants", missing)}
    bounds = {name: row["max_in_flight"] for name, row in locked.items() if row["max_in_flight"] is not None}
    given = list(bounds), list(bounds.values())
    counted = await session.fetch("count_gated_of_tenants", *given) if bounds else []
    in_flight: dict[str, int] = dict(map(tuple, counted))
    found.allowances = dict.fromkeys(names, Allowance(0, BUSY_SECONDS, None))
    for name, row in locked.items():
        if row["paused"]:
            found.paused += [gate for gate, tenant in found.of.items() if tenant == name]
        found.allowances[name] = allowance(row, in_flight.get(name, 0), room)
    return found


@dataclass(frozen=True, slots=True)
class Allowance:
    """Tasks that may start now. retry_seconds: until the next check if none may. tokens: left of the rate, if any."""

    tasks: int
    retry_seconds: float
    tokens: float | None

    def spent(self, tasks: int) -> float | None:
        return None if self.tokens is None else self.tokens - tasks


def allowance(row: Any, in_flight: int, room: int) -> Allowance:
    """What a limited action, tenant or gate leaves of ``room``. at: now, by the clock that wrote ``refilled_at``."""
    tasks, retry = room, BUSY_SECONDS
    if row["max_in_flight"] is not None:
        tasks = min(tasks, max(0, row["max_in_flight"] - in_flight))
    left: float | None = None
    if (rate := row["rate"]) is not None:
        left = full = float(row["burst"] or max(1, math.ceil(rate)))
        if row["tokens"] is not None and row["refilled_at"] is not None:
            left = min(full, row["tokens"] + max(0.0, (row["at"] - row["refilled_at"]).total_seconds()) * rate)
        tasks = min(tasks, int(left))
        if left < 1:
            retry = max(retry, (1 - left) / rate)
    return Allowance(tasks, retry, left)


def share_out(room: int, gates: Mapping[str, Allowance]) -> dict[str, int]:
    """Share ``room`` among the gates, as evenly as their allowances permit; returns the shares above 0 by name."""
    shares: dict[str, int] = {}
    open_gates = [(name, one.tasks) for name, one in gates.items() if one.tasks]
    # Drawn by lot: where some get more, or there is room for some alone, it would be the same ones each time.
    open_gates = sorted(random.sample(open_gates, min(room, len(open_gates))), key=itemgetter(1))
    for position, (name, most) in enumerate(open_gates):
        # The smallest allowance first: the others share what it leaves. An even share is rounded up.
        shares[name] = share = min(most, math.ceil(room / (len(open_gates) - position)))
        room -= share
    return shares
