"""clockwork's and kafka-message-scheduler's jobs on the whole pipeline: real processes, of which some are killed.

    python benchmarks/older_schedulers.py clockwork --schedules 10000 --keys 100
    python benchmarks/older_schedulers.py kafka-message-scheduler --schedules 20000 --kill

Kafka is librdkafka's mock cluster, in this process. Lateness is from a schedule's time to when a consumer, in this
process too, has its record; so it holds the whole way, and this program's own load on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services")]

from benchmarks.harness.machine import describe_machine  # noqa: E402
from penstock.local.stack import Stack  # noqa: E402
from penstock.runtime.logs import setup_logging  # noqa: E402
from tests.kafka import MockKafka, Reader  # noqa: E402

VICTIMS = ("worker-1", "scheduler", "supervisor", "resulter")
_PATIENCE_SECONDS = 300.0
_ORDER_SEED = 7


@dataclass
class Report:
    """What came: published records by kind, lateness in seconds, and what must be nothing at all."""

    wanted: int
    arrived: int = 0
    lost: int = 0
    early: int = 0
    out_of_order: int = 0
    unwanted: int = 0
    doubled: int = 0
    lateness: list[float] = field(default_factory=list)
    seconds: float = 0.0
    creation_seconds: float = 0.0

    def quantile(self, share: float) -> float:
        ordered = sorted(self.lateness)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def figures(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("wanted", "arrived", "lost", "early", "out_of_order", "unwanted",
                                                       "doubled")}  # fmt: skip
        if self.lateness:
            for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                told[f"lateness_{name}_ms"] = round(self.quantile(share) * 1000)
            told["lateness_mean_ms"] = round(statistics.fmean(self.lateness) * 1000)
        return told | {"creation_seconds": round(self.creation_seconds, 1), "seconds": round(self.seconds, 1)}


RECOVERY = {
    # So that what a killed process held is taken over within seconds and not within minutes.
    "PENSTOCK_UNSENT_AFTER_SECONDS": "3",
    "PENSTOCK_STALE_AFTER_SECONDS": "10",
    "PENSTOCK_HEARTBEAT_SECONDS": "2",
    "PENSTOCK_VISIBILITY_TIMEOUT_SECONDS": "5",
    "PENSTOCK_SUPERVISOR_INTERVAL_SECONDS": "1",
}


def stack_environment(kafka: MockKafka, topic: str, *, with_kills: bool) -> dict[str, str]:
    """The settings of a stack that has clockwork's API, and reads schedules in JSON from this topic."""
    return (RECOVERY if with_kills else {}) | {
        "PENSTOCK_KAFKA_BROKERS": kafka.brokers,
        "PENSTOCK_DELIVERIES": "kafka.publish",
        "PENSTOCK_CLOCKWORK_API": "true",
        "PENSTOCK_CLOCKWORK_CREATE_TOPIC": kafka.topic("schedule-create"),
        "PENSTOCK_KAFKA_SOURCE_JSON_TOPICS": topic,
        "PENSTOCK_KAFKA_SESSION_TIMEOUT_SECONDS": "3",
        "PENSTOCK_HTTP_PORT": "0",
        "PENSTOCK_METRICS_PORT": "0",
    }


async def clockwork(
    url: str,
    kafka: MockKafka,
    create_topic: str,
    *,
    schedules: int,
    keys: int,
    over_seconds: float,
    lead_seconds: float,
    by_http: int = 2000,
    cancelled_count: int = 200,
    stack: Any = None,
) -> Report:
    """Create schedules, some over HTTP and the others through the create topic, create and cancel more over
    HTTP, and check their outcome. stack: of which some processes are killed.

    lead_seconds: from now to the first that is due; creating them all has to be done by then.
    """
    topic = kafka.topic("clockwork")
    randoms = random.Random(_ORDER_SEED)
    started = time.time()
    base_ms = round((started + lead_seconds) * 1000)
    extra = cancelled_count
    due = {number: base_ms + round(randoms.random() * over_seconds * 1000) for number in range(schedules + extra)}
    key_of = {number: f"key-{randoms.randrange(keys)}" for number in due}
    cancelled = set(range(schedules, schedules + extra))
    due |= dict.fromkeys(cancelled, base_ms + round(over_seconds * 1000))

    def body_of(number: int) -> dict[str, Any]:
        return {
            "clientId": "bench", "scheduleKey": str(number), "orderingKey": key_of[number],
            "taskData": str(number), "delivery": {"topic": topic}, "scheduleTime": due[number],
        }  # fmt: skip

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=16), timeout=60) as http:
        others = randoms.sample(range(schedules), schedules)
        records = [(key_of[number].encode(), json.dumps(body_of(number)).encode()) for number in others[by_http:]]
        writing = asyncio.create_task(asyncio.to_thread(kafka.write, create_topic, *records))
        numbers = iter([*sorted(cancelled), *others[:by_http]])

        async def create() -> None:
            for number in numbers:
                answer = await http.post("/schedule", json=body_of(number))
                assert (answer.status_code, answer.text) == (200, key_of[number]), answer.text
                if number in cancelled:
                    body = {"clientId": "bench", "scheduleKey": str(number)}
                    answer = await http.request("DELETE", "/schedule", json=body)
                    # One that was due by then may have been sent; the report says that creating took too long.
                    is_late = time.time() * 1000 >= due[number]
                    assert is_late or (answer.status_code, answer.text) == (200, str(number)), answer.text

        await asyncio.gather(*(create() for _ in range(16)))
        await writing
    report = Report(wanted=schedules, creation_seconds=time.time() - started)
    late_seconds = time.time() - base_ms / 1000
    if late_seconds > 0:
        print(
            f"creating took {late_seconds:.1f} s longer than the lead: those due by then count as late", file=sys.stderr
        )
    seen = await _follow(kafka, topic, schedules, base_ms / 1000, stack)
    await asyncio.sleep(1)
    report.seconds = time.time() - started

    last: dict[str, int] = {}
    counts: Counter[int] = Counter()
    for arrived_at, record in seen:
        number = int(record.value())
        counts[number] += 1
        report.unwanted += (
            number in cancelled or record.key() != key_of[number].encode() or record.headers() is not None
        )
        if counts[number] > 1:
            report.doubled += 1
            continue
        report.early += record.timestamp()[1] < due[number] or arrived_at * 1000 < due[number]
        report.lateness.append(arrived_at - due[number] / 1000)
        # Those of one millisecond stand in the order of their arrival, which sixteen requests at once do not show.
        report.out_of_order += due[number] < last.get(key_of[number], 0)
        last[key_of[number]] = max(due[number], last.get(key_of[number], 0))
    report.arrived = len(counts.keys() - cancelled)
    report.lost = schedules - report.arrived
    return report


async def message_scheduler(
    kafka: MockKafka, source: str, *, schedules: int, over_seconds: float, lead_seconds: float, stack: Any = None
) -> Report:
    """Write schedules in JSON, a tenth of them replaced and a tenth cancelled, and check their outcome."""
    topic = kafka.topic("fired")
    randoms = random.Random(_ORDER_SEED)
    started = time.time()
    base_ms = round((started + lead_seconds) * 1000)
    extra = schedules // 10
    due = {number: base_ms + round(randoms.random() * over_seconds * 1000) for number in range(schedules + extra)}

    def body(number: int, value: str) -> bytes:
        members = {"time": due[number], "topic": topic, "key": _b64(str(number)), "value": _b64(value)}
        return json.dumps(members).encode()

    records: list[tuple[bytes, bytes | None]] = [(b"%d" % number, body(number, "old")) for number in range(extra)]
    records += [(b"%d" % number, body(number, "new")) for number in due]
    records += [(b"%d" % number, None) for number in range(schedules, schedules + extra)]
    await asyncio.to_thread(kafka.write, source, *records)
    report = Report(wanted=schedules, creation_seconds=time.time() - started)
    seen = await _follow(kafka, topic, schedules, base_ms / 1000, stack)
    marks = await _follow_marks(kafka, source, schedules, len(records))
    report.seconds = time.time() - started

    counts: Counter[int] = Counter()
    for arrived_at, record in seen:
        number = int(record.key())
        counts[number] += 1
        report.unwanted += number >= schedules or record.value() != b"new"
        report.early += record.timestamp()[1] < due[number]
        if counts[number] == 1:
            report.lateness.append(arrived_at - due[number] / 1000)
    report.arrived = len([number for number in counts if number < schedules])
    report.lost = schedules - min(report.arrived, len(marks))
    report.doubled = sum(counts.values()) - len(counts)
    return report


async def _follow(kafka: MockKafka, topic: str, wanted: int, begins_at: float, stack: Any) -> list[tuple[float, Any]]:
    """Records as they come, with when; until each of the wanted has come. Processes die on the way, if any are to."""
    reader = kafka.reader(topic)
    seen: list[tuple[float, Any]] = []
    distinct: set[bytes] = set()
    victims = list(VICTIMS) if stack is not None else []
    next_kill = max(wanted // 10, 1)
    deadline = begins_at + _PATIENCE_SECONDS
    while len(distinct) < wanted and time.time() < deadline:
        before = len(reader.records)
        await asyncio.to_thread(reader.look, 0.02)
        now = time.time()
        for record in reader.records[before:]:
            seen.append((now, record))
            distinct.add(record.value() if record.key() is None or record.value().isdigit() else record.key())
        if victims and len(distinct) >= next_kill:
            kill(stack, victims.pop(0))
            next_kill += wanted // 6
    await asyncio.to_thread(reader.look, 0.5)
    seen += [(time.time(), record) for record in reader.records[len(seen) :]]
    reader.close()
    return seen


async def _follow_marks(kafka: MockKafka, source: str, wanted: int, written: int) -> set[bytes]:
    """The ids whose tombstone has come to the source topic."""
    reader: Reader = kafka.reader(source)
    marks: set[bytes] = set()
    deadline = time.time() + _PATIENCE_SECONDS
    while len(marks) < wanted and time.time() < deadline:
        await asyncio.to_thread(reader.look, 0.1)
        marks = {one.key() for one in reader.records if one.headers() == [("schedule:expired", b"true")]}
    reader.close()
    return marks


_STAGES = """
    select (r ->> 'due_at')::float8 / 1000 as due, extract(epoch from t.created_at)::float8 as made,
           extract(epoch from t.claimed_at)::float8 as claimed, extract(epoch from t.finished_at)::float8 as settled,
           json_array_length(t.payload -> 'records') as records
    from penstock.task_history t cross join json_array_elements(t.payload -> 'records') r
    where t.action = 'kafka.publish'
"""


async def stages(database_url: str) -> dict[str, int]:
    """Where the time went, by the database's clock: milliseconds at the 50th and the 99th percentile."""
    connection = await asyncpg.connect(database_url)
    rows = await connection.fetch(_STAGES)
    await connection.close()
    told: dict[str, int] = {}
    for name, begin, end in (("due_to_task", "due", "made"), ("task_to_claim", "made", "claimed"),
                             ("claim_to_settled", "claimed", "settled")):  # fmt: skip
        spans = sorted(row[end] - row[begin] for row in rows)
        for share in (0.5, 0.99):
            told[f"{name}_p{share * 100:g}_ms"] = round(spans[int(share * len(spans))] * 1000) if spans else 0
    return told | {"records_a_task": round(sum(row["records"] for row in rows) / max(1, len(rows)))}


def kill(stack: Any, name: str) -> None:
    """kill -9 at a process of the stack; the stack starts it again."""
    pid = next(one["pid"] for one in stack.state()["processes"] if one["name"] == name)
    if pid:
        os.kill(pid, signal.SIGKILL)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def _main(args: argparse.Namespace) -> int:
    setup_logging("bench", level="warning")
    kafka = MockKafka()
    source = kafka.topic("schedules")
    os.environ.update(stack_environment(kafka, source, with_kills=args.kill))
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        async with contextlib.AsyncExitStack() as held:
            stack = Stack(Path(folder) / "data", workers=args.workers)
            held.push_async_callback(stack.stop)
            await stack.start()
            killed = stack if args.kill else None
            timing = {"schedules": args.schedules, "over_seconds": args.over, "lead_seconds": args.lead}
            if args.scenario == "clockwork":
                report = await clockwork(
                    stack.state()["api"], kafka, os.environ["PENSTOCK_CLOCKWORK_CREATE_TOPIC"], keys=args.keys,
                    by_http=args.by_http, cancelled_count=args.cancelled, stack=killed, **timing,
                )  # fmt: skip
            else:
                report = await message_scheduler(kafka, source, stack=killed, **timing)
            where = await stages(stack.state()["database_url"])
    told = report.figures() | where | {"scenario": args.scenario, "killed": args.kill, "load": os.getloadavg()}
    print(json.dumps(told | {"machine": describe_machine()}, indent=2, default=str))
    return 1 if report.lost or report.early or report.out_of_order or report.unwanted else 0


def _arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenario", choices=("clockwork", "kafka-message-scheduler"))
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=100, help="ordering keys (clockwork)")
    parser.add_argument("--by-http", type=int, default=2000, help="so many are created over HTTP (clockwork)")
    parser.add_argument("--cancelled", type=int, default=200, help="so many more are cancelled (clockwork)")
    parser.add_argument("--over", type=float, default=20.0, help="seconds over which they are due")
    parser.add_argument("--lead", type=float, default=30.0, help="seconds until the first is due")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--kill", action="store_true", help="kill -9 a worker, the scheduler, the supervisor, the resulter"
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(_arguments())))
