"""Medians, rows and tables of benchmark reports, and what a cost is counted from."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import report
from benchmarks.harness.measure import Counts, Process, Usage, cost, percentiles_ms
from benchmarks.harness.scenarios.priorities import mixed_task
from penstock.protocol.errors import StackError

ROOT = Path(__file__).resolve().parents[2]


def test_median_is_taken_of_every_number_on_its_own() -> None:
    runs = [
        {"rate": 10, "cost": {"cpu": 1.5}, "best": "a", "table": [{"n": 1, "rate": 3}]},
        {"rate": 30, "cost": {"cpu": 0.5}, "best": "b", "table": [{"n": 1, "rate": 9}]},
        {"rate": 20, "cost": {"cpu": 1.0}, "best": "b", "table": [{"n": 1, "rate": 6}]},
    ]
    assert report.median_of(runs) == {"rate": 20, "cost": {"cpu": 1.0}, "best": "a", "table": [{"n": 1, "rate": 6}]}


def test_figure_that_one_run_lacks_has_no_median() -> None:
    assert report.median_of([{"a": 1, "b": 2}, {"a": 3}]) == {"a": 2}


def test_flat_figures_fill_one_row_and_nested_ones_several() -> None:
    figures = {"tasks": 5, "ms": {"p50": 1, "p99": 2}, "cost": {"cpu": {"api": 3}, "wal": 4}, "table": [{"n": 1}]}
    assert list(report.flat_rows(figures)) == [
        ("tasks", "5"), ("ms", "p50 1, p99 2"), ("cost.cpu", "api 3"), ("cost.wal", "4"),
    ]  # fmt: skip


def test_table_leaves_the_costs_to_the_json() -> None:
    assert report.table_of({"table": [{"workers": 1, "cost": {}}, {"workers": 2, "cost": {}}]}) == (
        ["workers"],
        [["1"], ["2"]],
    )
    assert report.table_of({"tasks": 5}) is None


def usage(pid: int = 1, cpu: float = 0.0, calls: float = 0.0, units: float = 0.0, wal: int = 0) -> Usage:
    counts = Counts({"inbound SendMessage": calls}, units)
    return Usage(cpu, 2 * cpu, {"worker": Process(pid, cpu, 50.04, 60.06)}, counts, wal, 7, 2_000_000)


def test_cost_is_the_difference_of_two_readings_for_one_task() -> None:
    used = cost(usage(cpu=1.0, calls=10, units=20, wal=1000), usage(cpu=3.0, calls=40, units=120, wal=3000), 1000)
    assert used["cpu_us_per_task"] == {"worker": 2000.0, "total": 2000.0}
    assert 0 < used["machine_used_by_others_percent"] <= 100
    assert used["sqs_calls_per_task"] == 0.03
    assert used["sqs_billed_units_per_task"] == 0.1
    assert used["sqs_usd_per_million_tasks"] == 0.04  # 100,000 requests at $0.40 a million
    assert used["wal_bytes_per_task"] == 2.0
    assert used["memory_mb"] == {"start": {"worker": 50.0}, "end": {"worker": 50.0}, "peak": {"worker": 60.1}}


def test_process_restarted_between_the_readings_has_no_cost() -> None:
    with pytest.raises(StackError, match="worker was restarted"):
        cost(usage(pid=1), usage(pid=2), 1)


def test_percentiles_are_milliseconds_of_the_sorted_times() -> None:
    times = [number / 1000 for number in range(100, -1, -1)]
    assert percentiles_ms(times) == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "max": 100.0, "count": 101}
    assert percentiles_ms([]) == {"count": 0}


def test_mixture_is_a_hundredth_slow_and_a_tenth_failing() -> None:
    actions = [mixed_task(number, 0)["params"]["action"] for number in range(1000)]
    assert actions.count("bench.slow") == 10
    assert actions.count("bench.failing") == 100
    assert actions.count("bench.clock") == 490
    assert actions.count("bench.noop") == 400


@pytest.mark.parametrize("target", ["bench", "peers"])
def test_the_programs_of_make_can_be_started(target: str) -> None:
    """From the folder of the project, as make does it."""
    made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (program,) = re.findall(r"-m (benchmarks[.\w]*)", made)
    shown = subprocess.run(
        [sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
