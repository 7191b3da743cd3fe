"""What a rate of tasks takes: processes, cores, WAL, SQS calls and money, calculated from a measured drain.

    python benchmarks/model.py [benchmarks/results/drain.json] [--rate 1000000 ...]

It multiplies; it does not simulate. Each line names what it assumes, and the walls at the end are known limits held
against the products, so the first one reached is the first thing to change.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY = 0.7  # of a core: what one plans with
USD_PER_MILLION_REQUESTS = 0.40
SECONDS_PER_DAY = 86_400
DEAD_TUPLES_PER_TASK = 2  # of the live table: the claim's old version, the deleted row


@dataclass(frozen=True)
class Wall:
    """A known limit of one resource. ``per_task``: how much of it a task takes; ``then``: what lies behind it."""

    name: str
    limit: float
    unit: str
    per_task: float
    then: str

    @property
    def rate(self) -> float:
        """Tasks a second at which it is reached."""
        return self.limit / self.per_task


def walls(cost: Mapping[str, Any]) -> list[Wall]:
    """Limits of one Postgres and of SQS, lowest rate first."""
    cpu = cost["cpu_us_per_task"]
    wal = cost["wal_bytes_per_task"]
    found = [
        Wall(
            "vacuum of the one live table", 1_000_000, "dead tuples/s, one vacuum worker at full speed",
            DEAD_TUPLES_PER_TASK,
            "`penstock partition-tasks`: hash partitions, a vacuum worker each",
        ),
        Wall(
            "WAL of one server", 1_000_000_000, "bytes/s, what log insertion and one volume take together", wal,
            "shards: tasks know nothing of each other but keys, so a hash of the key picks the database",
        ),
        Wall(
            "CPU of one server", 64 * BUSY * 1e6, "us/s, 64 vCPU at 70 %", cpu["postgres"],
            "a larger class, or shards",
        ),
        Wall(
            "messages in flight of one queue", 120_000, "messages, at a second each and 100 tasks a message", 0.01,
            "several outbound queues",
        ),
        Wall(
            "network of one server", 1.5e9, "bytes/s, 12.5 Gbit/s", 600,
            "shards, or smaller payloads",
        ),
    ]  # fmt: skip
    return sorted(found, key=lambda wall: wall.rate)


def plan(cost: Mapping[str, Any], rate: float) -> list[tuple[str, str]]:
    """What so many tasks a second take."""
    cpu: defaultdict[str, float] = defaultdict(float)
    for name, us in cost["cpu_us_per_task"].items():
        cpu[name.partition("-")[0]] += us  # two workers have a share of the tasks each
    rows = [
        (f"{name} processes (one core each at {BUSY:.0%})", f"{math.ceil(rate * cpu[name] / 1e6 / BUSY):,}")
        for name in ("scheduler", "worker", "resulter")
    ]
    units = cost["sqs_billed_units_per_task"] * rate
    return [
        *rows,
        ("Postgres, cores busy", f"{rate * cpu['postgres'] / 1e6:,.1f}"),
        ("WAL", f"{rate * cost['wal_bytes_per_task'] / 1e6:,.0f} MB/s"),
        ("dead tuples of the live table", f"{rate * DEAD_TUPLES_PER_TASK:,.0f}/s"),
        ("SQS calls", f"{rate * cost['sqs_calls_per_task']:,.0f}/s"),
        ("SQS bill at list price", f"${units * SECONDS_PER_DAY * USD_PER_MILLION_REQUESTS / 1e6:,.2f} a day"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", nargs="?", type=Path, default=Path(__file__).parent / "results" / "drain.json")
    parser.add_argument("--rate", type=float, action="append", help="tasks a second; may be repeated")
    given = parser.parse_args(arguments)
    cost = json.loads(given.report.read_text("utf-8"))["scenarios"]["drain"]["figures"]["cost"]
    rates = given.rate or [10_000.0, 100_000.0, 1_000_000.0]
    plans = [plan(cost, rate) for rate in rates]
    print("| | " + " | ".join(f"{rate:,.0f}/s" for rate in rates) + " |")
    print("| --- |" + " ---: |" * len(rates))
    for lines in zip(*plans, strict=True):
        print(f"| {lines[0][0]} | " + " | ".join(value for _, value in lines) + " |")
    print("\n| wall | reached at | taken as | then |")
    print("| --- | ---: | --- | --- |")
    for wall in walls(cost):
        print(f"| {wall.name} | {wall.rate:,.0f} tasks/s | {wall.limit:,.0f} {wall.unit} | {wall.then} |")


if __name__ == "__main__":
    main()
