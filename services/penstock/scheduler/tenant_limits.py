"""Limits of tenants at gates, over all their actions, and even shares between tenants.

A tenant's row is locked while its limit is counted and used, as an action's is, so one scheduler at a time claims its
tasks. Rows that another scheduler holds are skipped, so no two can deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.db.session import Session
from penstock.limits.token_bucket import BUSY_SECONDS, Allowance, Gate, allowance, share_out


@dataclass(slots=True)
class TenantLimits:
    """Tenants whose tasks wait at some gates. allowances: by tenant. of: the tenant of a gate. paused: gates of tenants
    that are."""

    allowances: dict[str, Allowance] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)
    paused: list[str] = field(default_factory=list)

    def bound(self, gates: Sequence[Gate]) -> list[Gate]:
        """The gates whose tenant is not paused, none of them allowing more than its tenant may."""
        shut = set(self.paused)
        return [self._bound(gate) for gate in gates if gate.name not in shut]

    def _bound(self, gate: Gate) -> Gate:
        tenant = self.allowances.get(self.of.get(gate.name, ""))
        if tenant is None or tenant.tasks >= gate.allowance.tasks:
            return gate
        # The longer of two waits counts; the tokens are the gate's own.
        retry = max(tenant.retry_seconds, gate.allowance.retry_seconds if not gate.allowance.tasks else 0.0)
        return Gate(gate.name, Allowance(tenant.tasks, retry, gate.allowance.tokens))

    def share_out(self, room: int, gates: Sequence[Gate]) -> dict[str, int]:
        """As ``limits.share_out``, first between tenants, then between the gates of each."""
        groups: dict[str, list[Gate]] = {}
        for gate in gates:
            tenant = self.of.get(gate.name)
            # A gate of no tenant is a group of its own, under a name that no tenant has.
            groups.setdefault(f"\x1e{gate.name}" if tenant is None else tenant, []).append(gate)
        wholes = []
        for name, members in groups.items():
            most = sum(gate.allowance.tasks for gate in members)
            limit = self.allowances.get(name)
            wholes.append(Gate(name, Allowance(most if limit is None else min(most, limit.tasks), 0.0, None)))
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
    in_flight: dict[str, int] = {}
    if bounds:
        in_flight = dict(map(tuple, await session.fetch("count_gated_of_tenants", list(bounds), list(bounds.values()))))
    for name in names:
        row = locked.get(name)
        if row is None:
            found.allowances[name] = Allowance(0, BUSY_SECONDS, None)
            continue
        if row["paused"]:
            found.paused += [gate for gate, tenant in found.of.items() if tenant == name]
        found.allowances[name] = allowance(
            max_in_flight=row["max_in_flight"], rate=row["rate"], burst=row["burst"], in_flight=in_flight.get(name, 0),
            tokens=row["tokens"], refilled_at=row["refilled_at"], now=row["at"], room=room,
        )  # fmt: skip
    return found
