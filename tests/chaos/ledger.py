"""The ledger: what was accepted, what ran, what Postgres holds in the end, and whether the three agree."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

SINGLE_KILL_BAR_SECONDS = 10.0
_WINDOWS = 3  # seconds in a row at the old rate before a fault counts as over
_LEVEL = 0.7  # of the rate before; a second of a steady feed is never quite the same as another
_EARLY_SECONDS = 0.05


@dataclass(frozen=True)
class Accepted:
    """One task with an accepted request. id: None for those through the queue, which are known by their key alone."""

    id: int | None
    key: str | None
    at: float
    delay_seconds: float


@dataclass
class Fault:
    """One blow and how long the pipeline took to work at its old rate again, None if it did not in the time given."""

    name: str
    began: float
    ended: float
    bar_seconds: float | None
    recovery_seconds: float | None = None

    @property
    def is_too_slow(self) -> bool:
        if self.bar_seconds is None:
            return False
        return self.recovery_seconds is None or self.recovery_seconds > self.bar_seconds


@dataclass
class Row:
    """One scenario's result. Of lost, twice, wrong and early none may be."""

    scenario: str
    accepted: int = 0
    settled: int = 0
    lost: int = 0  # accepted and in no final state, although all faults were over long ago
    twice: int = 0  # settled twice, live and settled, or two tasks for one key
    wrong: int = 0  # the result kept is not that of the claim kept, or of a run that never was
    early: int = 0  # ran before its delay was over
    given_up: int = 0  # CRITICAL_ERROR beyond those meant to be
    repeated: int = 0  # ran more than once
    why_repeated: str = ""
    rate_before: float = 0.0  # tasks settled a second before the first fault
    faults: list[Fault] = field(default_factory=list)
    settled_after_seconds: float = 0.0  # from the end of the load to the last settled task
    problems: list[str] = field(default_factory=list)
    skipped: str = ""  # why it could not be run on this machine

    @property
    def is_good(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"good": self.is_good}


class Ledger:
    """The answers that the senders got, and what the workers wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.accepted: list[Accepted] = []
        self.poison: set[int] = set()

    def runs(self) -> dict[int, list[tuple[int, float]]]:
        """(claim, time) of each run of each task."""
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for path in self.folder.glob("runs-*"):
            for line in path.read_text("ascii").splitlines():
                task_id, claim, _, at = line.split()
                found[int(task_id)].append((int(claim), float(at)))
        return found

    async def unsettled(self, connection: asyncpg.Connection) -> int:
        """How many accepted tasks are in no final state."""
        history = await connection.fetch("select id, unique_key from penstock.task_history")
        ids, keys = {row[0] for row in history}, {row[1] for row in history}
        return sum(not (entry.id in ids if entry.id is not None else entry.key in keys) for entry in self.accepted)

    async def check(self, connection: asyncpg.Connection, row: Row, *, may_repeat: bool) -> None:
        """Fill the row by holding all three against each other."""
        history = await connection.fetch(
            "select id, state::text, claim, unique_key, (result->>'claim')::bigint as seen from penstock.task_history"
        )
        live = await connection.fetch("select id, state::text, unique_key, attempts from penstock.task")
        runs = self.runs()
        settled = Counter(record["id"] for record in history)
        by_key: dict[str, set[int]] = defaultdict(set)
        for record in (*history, *live):
            if record["unique_key"] is not None:
                by_key[record["unique_key"]].add(record["id"])
        row.accepted = len(self.accepted)
        for entry in self.accepted:
            ids = {entry.id} if entry.id is not None else by_key.get(entry.key or "", set())
            if any(task_id in settled for task_id in ids):
                row.settled += 1
            else:
                row.lost += 1
                if row.lost <= 5:
                    row.problems.append(f"not settled: {entry}, {[dict(r) for r in live if r['id'] in ids]}")
            if entry.id is not None and entry.key is not None and entry.id not in by_key[entry.key]:
                row.problems.append(f"answered with an id that the key does not have: {entry}")
            row.early += any(at < entry.at + entry.delay_seconds - _EARLY_SECONDS
                             for task_id in ids if entry.delay_seconds and task_id is not None
                             for _, at in runs.get(task_id, ()))  # fmt: skip
        row.twice = (
            sum(count > 1 for count in settled.values())
            + sum(record["id"] in settled for record in live)
            + sum(len(ids) > 1 for ids in by_key.values())
        )
        for record in history:
            if record["state"] == "SUCCESS":
                claims = {claim for claim, _ in runs.get(record["id"], ())}
                row.wrong += record["seen"] != record["claim"] or record["claim"] not in claims
            elif record["id"] not in self.poison:
                row.given_up += 1
        row.repeated = sum(len(times) > 1 for task_id, times in runs.items() if task_id not in self.poison)
        self._judge(row, may_repeat=may_repeat)

    def _judge(self, row: Row, *, may_repeat: bool) -> None:
        for name in ("lost", "twice", "wrong", "early", "given_up"):
            if count := getattr(row, name):
                row.problems.append(f"{name}: {count}")
        if row.repeated and not may_repeat:
            row.problems.append(f"ran more than once, though nothing may: {row.repeated}")
        if not row.accepted:
            row.problems.append("nothing was accepted")
        row.problems += [
            f"{fault.name}: recovery took {_seconds(fault.recovery_seconds)}, the bar is {fault.bar_seconds:g} s"
            for fault in row.faults
            if fault.is_too_slow
        ]


def rate_of(finished: Sequence[float], began: float, ended: float) -> float:
    """Tasks settled a second between two instants."""
    return sum(began <= at < ended for at in finished) / (ended - began)


def recovery_seconds(finished: Sequence[float], fault_ended: float, rate_before: float, now: float) -> float | None:
    """From the end of a fault until tasks are settled at the old rate, for seconds in a row; None if not until now."""
    start = fault_ended
    while start + _WINDOWS <= now:
        if all(rate_of(finished, start + n, start + n + 1) >= _LEVEL * rate_before for n in range(_WINDOWS)):
            return round(start - fault_ended, 2)
        start += 0.1
    return None


async def read_finished(connection: asyncpg.Connection, since: float) -> list[float]:
    """When tasks were settled, as epoch seconds, from an instant on."""
    rows = await connection.fetch(
        "select extract(epoch from finished_at)::float8 from penstock.task_history "
        "where finished_at >= to_timestamp($1)",
        since,
    )
    return [record[0] for record in rows]


async def wait_settled(ledger: Ledger, connection: asyncpg.Connection, *, seconds: float) -> float:
    """Until all that was accepted is settled, or the time is up; returns how long that was."""
    began = time.monotonic()
    while time.monotonic() - began < seconds and await ledger.unsettled(connection):
        await asyncio.sleep(0.25)
    return round(time.monotonic() - began, 2)


def _seconds(value: float | None) -> str:
    return "longer than was waited" if value is None else f"{value:.1f} s"
