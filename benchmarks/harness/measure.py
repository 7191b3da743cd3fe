"""Readings of a running stack: CPU and memory by process, SQS calls and billed units, WAL, dead tuples."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.protocol.errors import StackError
from penstock.runtime import metrics

USD_PER_MILLION_SQS_REQUESTS = 0.40  # standard queues, us-east-1, first tier beyond the free one
OWN_NAME = "bench"  # this process: producers and progress display
# What is read of a page: the rest, mostly buckets of times, takes a hundred times as long to parse.
_COUNTED = (
    "penstock_sqs_billed_units_total", "penstock_sqs_calls_total", "penstock_passes_total",
    "penstock_statement_seconds_count",
)  # fmt: skip

_DATABASE = """
    select pg_current_wal_insert_lsn() - '0/0'::pg_lsn as wal, coalesce(n_dead_tup, 0) as dead,
           pg_total_relation_size('penstock.task') as size
    from pg_stat_user_tables where schemaname = 'penstock' and relname = 'task'
"""


@dataclass(frozen=True)
class Process:
    """One reading of a process; those of a service include its children. Megabytes are 10^6 bytes.

    peak_mb: the most it ever had, None where the system does not report it.
    """

    pid: int
    cpu_seconds: float
    memory_mb: float
    peak_mb: float | None


@dataclass
class Counts:
    """Calls to SQS that were answered, by queue and operation, and 64 KiB units that AWS would bill for them.

    passes: of the processes' loops, by process and outcome. statements: by name.
    """

    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    billed_units: float = 0.0
    passes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    statements: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, families: Iterable[Metric]) -> None:
        """Add what one process has counted."""
        for family in families:
            for sample in family.samples:
                if sample.name == "penstock_sqs_billed_units_total":
                    self.billed_units += sample.value
                elif sample.name == "penstock_sqs_calls_total" and sample.labels["outcome"] == "ok":
                    self.calls[f"{sample.labels['queue']} {sample.labels['operation']}"] += sample.value
                elif sample.name == "penstock_passes_total":
                    self.passes[f"{sample.labels['process']} {sample.labels['outcome']}"] += sample.value
                elif sample.name == "penstock_statement_seconds_count":
                    self.statements[sample.labels["statement"]] += sample.value


@dataclass(frozen=True)
class Usage:
    """One reading of everything.

    at: seconds on a steady clock. busy_seconds: of all cores, since boot, by all programs.
    """

    at: float
    busy_seconds: float
    processes: Mapping[str, Process]
    counts: Counts
    wal_bytes: int
    dead_tuples: int
    task_table_bytes: int


@dataclass
class Pages:
    """Metrics pages of the processes. A stopped process answers for none, so its last one may be kept before."""

    kept: dict[str, str] = field(default_factory=dict)

    async def read(self, processes: Sequence[Mapping[str, Any]]) -> list[str]:
        """The pages of all processes that have one."""
        asked = [entry for entry in processes if entry["metrics"] and entry["name"] not in self.kept]
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            answers = await asyncio.gather(*(client.get(entry["metrics"]) for entry in asked))
        return [answer.text for answer in answers] + list(self.kept.values())

    async def keep(self, processes: Sequence[Mapping[str, Any]]) -> None:
        """Read pages now that will be taken for the present ones until ``forget``."""
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            for entry in processes:
                self.kept[entry["name"]] = (await client.get(entry["metrics"])).text

    def forget(self) -> None:
        self.kept.clear()


async def read_usage(running: Sequence[Mapping[str, Any]], database: asyncpg.Pool[Any], pages: Pages) -> Usage:
    """Read the processes of a running stack, each as ``penstock ps --json`` prints it.

    Raises StackError when a process is not there, since its figures went with it.
    """
    processes = {OWN_NAME: read_process(os.getpid(), children=False)}
    for entry in running:
        try:
            processes[entry["name"]] = read_process(entry["pid"], children=entry["metrics"] is None)
        except (psutil.NoSuchProcess, TypeError) as exc:
            raise StackError(f"{entry['name']} has died during the benchmark: its figures are lost, run again") from exc
    count = Counts()
    count.add(metrics.REGISTRY.collect())  # of producers in this process
    for text in await pages.read(running):
        counted = "".join(line for line in text.splitlines(keepends=True) if line.startswith(_COUNTED))
        count.add(text_string_to_metric_families(counted))
    row = await database.fetchrow(_DATABASE)
    assert row is not None
    return Usage(
        time.monotonic(),
        _busy_seconds(),
        processes,
        count,
        int(row["wal"]),
        row["dead"],
        row["size"],
    )


def cost(before: Usage, after: Usage, tasks: int) -> dict[str, Any]:
    """What was used between two readings, for one task, and the bill for a million.

    Raises StackError when a process was restarted in between.
    """
    for name, process in after.processes.items():
        if name not in before.processes or before.processes[name].pid != process.pid:
            raise StackError(f"{name} was restarted during the benchmark: its figures are lost, run again")
    cpu = {
        name: round((process.cpu_seconds - before.processes[name].cpu_seconds) / tasks * 1e6, 2)
        for name, process in after.processes.items()
    }
    ours = sum(process.cpu_seconds - before.processes[name].cpu_seconds for name, process in after.processes.items())
    available = (after.at - before.at) * (os.cpu_count() or 1)
    others = max(0.0, after.busy_seconds - before.busy_seconds - ours) / available if available > 0 else 0.0
    units = (after.counts.billed_units - before.counts.billed_units) / tasks
    return {
        "machine_used_by_others_percent": round(100 * others, 1),
        "cpu_us_per_task": cpu | {"total": round(sum(cpu.values()), 2)},
        "memory_mb": {
            "start": {name: round(process.memory_mb, 1) for name, process in before.processes.items()},
            "end": {name: round(process.memory_mb, 1) for name, process in after.processes.items()},
            "peak": {name: round(p.peak_mb, 1) for name, p in after.processes.items() if p.peak_mb is not None},
        },
        "sqs_calls_per_task": round((sum(after.counts.calls.values()) - sum(before.counts.calls.values())) / tasks, 5),
        "sqs_calls_by_operation": _each(before.counts.calls, after.counts.calls, tasks),
        "sqs_billed_units_per_task": round(units, 5),
        "sqs_usd_per_million_tasks": round(units * USD_PER_MILLION_SQS_REQUESTS, 4),
        "wal_bytes_per_task": round((after.wal_bytes - before.wal_bytes) / tasks, 1),
        "dead_tuples": {"start": before.dead_tuples, "end": after.dead_tuples},
        "task_table_mb": {
            "start": round(before.task_table_bytes / 1e6, 1),
            "end": round(after.task_table_bytes / 1e6, 1),
        },
    }


def work_by_name(before: Usage, after: Usage, tasks: int) -> dict[str, Any]:
    """Passes of the loops and statements between two readings, for one task."""
    return {
        "passes_per_task": _each(before.counts.passes, after.counts.passes, tasks),
        "statements_per_task": _each(before.counts.statements, after.counts.statements, tasks),
    }


def _each(before: Mapping[str, float], after: Mapping[str, float], tasks: int) -> dict[str, float]:
    more = {name: count - before.get(name, 0.0) for name, count in sorted(after.items())}
    return {name: round(count / tasks, 5) for name, count in more.items() if count > 0}


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | int]:
    """p50, p95, p99 and the worst of durations, in milliseconds, with how many there were."""
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    last = len(ordered) - 1
    picked = {f"p{share}": round(ordered[round(last * share / 100)] * 1000, 2) for share in (50, 95, 99)}
    return picked | {"max": round(ordered[-1] * 1000, 2), "count": len(ordered)}


def read_process(pid: int, *, children: bool) -> Process:
    """A reading of one process; children: with its own children, those that have ended included."""
    process = psutil.Process(pid)
    with process.oneshot():
        own = process.cpu_times()
        used = own.user + own.system
        memory = process.memory_info().rss
    peak = _peak_bytes(pid)
    if children:  # those that live, and those that are gone and were waited for
        used += own.children_user + own.children_system
        peak = None  # not of one moment for all of them
        memory = _proportional_bytes(process)
        for child in process.children(recursive=True):
            try:
                times = child.cpu_times()
                used += times.user + times.system
                memory += _proportional_bytes(child)
            except psutil.NoSuchProcess:
                pass
    return Process(pid, used, memory / 1e6, None if peak is None else peak / 1e6)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in names))


def _proportional_bytes(process: psutil.Process) -> int:
    """Memory in which what is shared counts once over all sharers, if the system reports it; else resident memory."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", 0) or full.rss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)


def _peak_bytes(pid: int) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def seconds_to_look(done: int, total: int, seconds: float) -> float:
    """The pause before the next look at how many tasks are done: half of the time that the rest may take.

    Counting takes a share of the machine that is measured, the more the more there is. One rule for all contenders.
    """
    return min(max((total - done) * seconds / done / 2, 0.02), 0.5) if done else 0.05
