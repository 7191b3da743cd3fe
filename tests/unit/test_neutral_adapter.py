"""The adapter for the neutral harness: its rate, its percentiles, what it reads, and what its manifest names."""

from __future__ import annotations

import json
from pathlib import Path

import asyncpg
import pytest

from benchmarks.neutral.adapter import Latencies, Options, Pace

MANIFEST = json.loads((Path(__file__).parents[2] / "benchmarks" / "neutral" / "adapter.json").read_text("utf-8"))


def test_tasks_are_credited_by_the_clock_however_late_a_batch_is() -> None:
    pace = Pace(now=0.0)
    due = [pace.due(rate=100, now=now, most=128) for now in (0.005, 0.01, 0.5, 0.51)]
    assert due == [0, 1, 49, 1]


def test_no_more_than_a_second_is_made_up_for() -> None:
    pace = Pace(now=0.0)
    assert pace.due(rate=100, now=60.0, most=1000) == 100
    assert pace.due(rate=100, now=60.0, most=1000) == 0


def test_a_batch_has_its_limit_and_the_rest_stays_due() -> None:
    pace = Pace(now=0.0)
    assert [pace.due(rate=200, now=1.0, most=128) for _ in range(3)] == [128, 72, 0]


def test_percentiles_are_of_the_last_thirty_seconds() -> None:
    latencies = Latencies()
    for second in range(100):
        latencies.add(1.0 if second < 60 else 0.010, now=second)
    assert latencies.percentiles(now=99) == pytest.approx({"p50": 10, "p95": 10, "p99": 10}, rel=0.002)
    assert Latencies().percentiles(now=0) == {"p50": 0, "p95": 0, "p99": 0}


def test_the_rate_follows_the_file_of_the_harness(tmp_path: Path) -> None:
    control = tmp_path / "rate"
    options = Options.read({"DATABASE_URL": "postgresql://h/d", "PRODUCER_RATE_CONTROL_FILE": str(control)})
    assert options.rate_now() == 800
    control.write_text("1200.0\n", "utf-8")
    assert options.rate_now() == 1200


@pytest.mark.parametrize(("env", "told"), [({}, "DATABASE_URL"), ({"SCENARIO": "worker_crash"}, "worker_crash")])
def test_what_cannot_be_run_is_named(env: dict[str, str], told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        Options.read(env)


async def test_the_tables_of_the_manifest_exist(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert None not in [
            await connection.fetchval("select to_regclass($1)", name) for name in MANIFEST["event_tables"]
        ]
    finally:
        await connection.close()
