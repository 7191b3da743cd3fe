"""Every scenario of `make bench`, tiny, through the real command: the counts and the shape, never a rate."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from tests import postgres_versions
from tests.forking import forked_commands
from tests.pgbouncer import WHY_NOT

ROOT = Path(__file__).resolve().parents[2]
TASKS = 100
ROWS = 1000
PROCESSES = {"bench", "api", "submitter", "scheduler", "scheduler-2", "resulter", "supervisor", "worker-1"}
SERVICES = {"postgres", "sqs"}


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'services'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    with forked_commands():
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What one run of all scenarios has printed, and its JSON; on two schedulers, which a scenario must not notice."""
    path = tmp_path_factory.mktemp("bench") / "figures" / "all.json"
    sizes = (
        "--tasks",
        str(TASKS),
        "--rows",
        str(ROWS),
        "--seconds",
        "1",
        "--rate",
        "100",
        "--schedulers",
        "2",
        "--no-peers",
    )
    done = run_benchmark("all", *sizes, "--workers", "1", "--one-stack", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.fixture(scope="module")
def report(run: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return run[1]


def figures_of(report: dict[str, Any], scenario: str) -> dict[str, Any]:
    figures: dict[str, Any] = report["scenarios"][scenario]["figures"]
    return figures


def check_cost(cost: dict[str, Any]) -> None:
    assert cost["cpu_us_per_task"].keys() == PROCESSES | SERVICES | {"total"}
    assert all(used >= 0 for used in cost["cpu_us_per_task"].values())
    assert cost["cpu_us_per_task"]["total"] > 0
    for moment in ("start", "end"):
        assert cost["memory_mb"][moment].keys() == PROCESSES | SERVICES
        assert all(size > 1 for size in cost["memory_mb"][moment].values())
    assert 0 < cost["sqs_calls_per_task"] < 100
    assert cost["sqs_billed_units_per_task"] >= cost["sqs_calls_per_task"] / 2
    assert cost["sqs_usd_per_million_tasks"] == pytest.approx(cost["sqs_billed_units_per_task"] * 0.4, abs=0.0002)
    assert cost["wal_bytes_per_task"] > 100
    assert cost["dead_tuples"].keys() == {"start", "end"}


def check_percentiles(times: dict[str, Any], count: int) -> None:
    assert times["count"] == count
    assert times["p50"] <= times["p95"] <= times["p99"] <= times["max"]


def test_report_says_where_and_with_what_it_was_measured(report: dict[str, Any]) -> None:
    assert report["machine"].keys() >= {"cpu", "cores", "memory_gb", "python", "packages", "commit"}
    assert report["settings"]["claim_batch_size"] > 0
    assert report["settings"]["http_host"] == "127.0.0.1"
    assert report["options"]["tasks"] == TASKS
    assert report["options"]["postgres"] == postgres_versions.VERSION
    assert "postgresql://" not in json.dumps(report)


def test_tables_show_every_scenario(run: tuple[str, dict[str, Any]]) -> None:
    printed, report = run
    lines = printed.splitlines()
    assert set(report["scenarios"]) <= set(lines)
    assert sum(line.startswith("tasks_per_second") for line in lines) >= 2
    assert any(line.split()[:2] == ["single", "100"] for line in lines)  # the table of enqueue


@pytest.mark.parametrize("scenario", ["drain", "batched"])
def test_drain_settles_every_task_at_its_first_attempt(report: dict[str, Any], scenario: str) -> None:
    figures = figures_of(report, scenario)
    assert (figures["tasks"], figures["attempts"], figures["schedulers"]) == (TASKS, TASKS, 2)
    assert figures["tasks_per_second"] > 0
    check_cost(figures["cost"])


def test_live_takes_half_of_the_tasks_by_each_door(report: dict[str, Any]) -> None:
    figures = figures_of(report, "live")
    assert figures["http"]["tasks"] + figures["inbound"]["tasks"] == TASKS
    assert figures["http"]["accepted_per_second"] > 0
    assert figures["inbound"]["sent_per_second"] >= figures["inbound"]["accepted_per_second"] > 0
    check_cost(figures["cost"])


def test_latency_tells_each_stage_of_every_task_in_order(report: dict[str, Any]) -> None:
    figures = figures_of(report, "latency")["at_100_per_second"]
    check_percentiles(figures["enqueue_call_ms"], TASKS)
    check_percentiles(figures["call_to_sent_ms"], TASKS)
    check_percentiles(figures["call_to_handler_start_ms"], TASKS)
    check_percentiles(figures["call_to_success_visible_ms"], TASKS // 2)  # 50 a second are watched
    assert 0 < figures["call_to_handler_start_ms"]["p50"] < figures["call_to_success_visible_ms"]["max"]
    check_cost(figures["cost"])


def test_enqueue_has_four_figures_of_tasks_that_are_stored(report: dict[str, Any]) -> None:
    figures = figures_of(report, "enqueue")
    legs = {(leg["kind"], leg["connections"]): leg["tasks"] for leg in figures["table"]}
    assert legs == {
        ("single", 1): TASKS // 5,
        ("single", 100): TASKS,
        ("batched", 1): TASKS * 10,
        ("batched", 100): TASKS * 10,
    }
    for leg in figures["table"]:
        assert figures[f"{leg['kind']}_{leg['connections']}_per_second"] == leg["tasks_per_second"] > 0
        assert leg["cost"]["cpu_us_per_task"]["api"] >= 0
        assert leg["cost"]["wal_bytes_per_task"] > 100


def test_mixed_ends_a_tenth_critical_after_two_attempts(report: dict[str, Any]) -> None:
    figures = figures_of(report, "mixed")
    urgent = figures["urgent_tasks"]
    assert figures["settled"] == {"SUCCESS": TASKS * 9 // 10 + urgent, "CRITICAL_ERROR": TASKS // 10}
    assert figures["attempts"] == TASKS + TASKS // 10 + urgent
    check_percentiles(figures["urgent_call_to_start_ms"], urgent)
    check_percentiles(figures["ordinary_call_to_start_ms"], TASKS // 2 - TASKS // 100)
    check_cost(figures["cost"])


def test_urgent_tells_the_start_of_every_urgent_task(report: dict[str, Any]) -> None:
    figures = figures_of(report, "urgent")
    assert (figures["tasks"], figures["urgent_tasks"]) == (TASKS, 20)
    backlog = figures["backlog_when_enqueued"]  # the first look comes after the start, when most may have settled
    assert 0 <= backlog["least"] <= backlog["most"] <= TASKS
    check_percentiles(figures["urgent_call_to_start_ms"], 20)
    check_cost(figures["cost"])


@pytest.mark.parametrize("scenario", ["future", "history"])
def test_crowded_drains_the_same_tasks_with_and_without(report: dict[str, Any], scenario: str) -> None:
    figures = figures_of(report, scenario)
    assert figures["rows"] == ROWS
    for side in ("without", "with"):
        assert (figures[side]["tasks"], figures[side]["attempts"]) == (TASKS, TASKS)
        check_cost(figures[side]["cost"])
    rates = figures["with"]["tasks_per_second"] / figures["without"]["tasks_per_second"]
    assert figures["ratio"] == pytest.approx(rates, abs=0.01)


def test_features_are_drained_each_beside_a_plain_drain(report: dict[str, Any]) -> None:
    table = figures_of(report, "features")["table"]
    assert [row["attempts"] for row in table] == [TASKS] * 6
    for row in table:
        assert row["ratio_lowest"] == row["ratio"] == row["ratio_highest"]  # of so few tasks there is one pair
        assert row["ratio"] == pytest.approx(row["tasks_per_second"] / row["plain_per_second"], abs=0.01)
        assert row["cpu_ratio"] > 0


def test_held_xmin_goes_on_settling_while_the_transaction_is_open(report: dict[str, Any]) -> None:
    figures = figures_of(report, "held-xmin")
    assert figures["held_seconds"] == 1
    assert figures["before_per_second"] > 0
    # A third of a second may pass without a result on a busy machine, the whole second hardly.
    assert sum(figures["during_by_thirds_per_second"].values()) > 0
    check_cost(figures["cost"])


def test_schedules_fire_each_of_three_instants_once(report: dict[str, Any]) -> None:
    figures = figures_of(report, "schedules")
    assert (figures["schedules"], figures["period_seconds"]) == (TASKS, 1)
    assert [row["fires"] for row in figures["table"]] == [TASKS] * 3
    for row in figures["table"]:
        assert 0 < row["late_p50_ms"] <= row["late_p99_ms"] <= row["late_max_ms"]
    check_cost(figures["cost"])


def test_workflows_of_each_kind_end_well(report: dict[str, Any]) -> None:
    figures = figures_of(report, "workflows")
    assert [(row["kind"], row["steps"], row["state"]) for row in figures["table"]] == [
        ("chain", TASKS // 50, "SUCCESS"),
        ("group and fan-in", TASKS // 10 + 1, "SUCCESS"),
        ("group and fan-in", TASKS + 1, "SUCCESS"),
        ("random", TASKS // 10, "SUCCESS"),
        ("random", TASKS, "SUCCESS"),
    ]
    for row in figures["table"]:
        assert 0 < row["create_seconds"] < row["seconds"]
        check_cost(row["cost"])


def test_trickle_has_the_cost_and_the_times_of_a_single_task_and_of_a_step(report: dict[str, Any]) -> None:
    figures = figures_of(report, "trickle")
    assert figures["idle"]["cpu_percent_of_a_core"].keys() == PROCESSES | SERVICES | {"total"}
    assert figures["idle"]["sqs_calls_per_second"]["outbound receive_message"] > 0
    single, chain = figures["at_100_per_second"], figures["chain"]
    assert (single["tasks"], chain["steps"]) == (100, 7)
    check_percentiles(single["enqueue_call_ms"], 100)
    check_percentiles(single["call_to_handler_start_ms"], 100)
    check_percentiles(single["call_to_success_visible_ms"], 17)  # of a third as many, every second is watched
    check_percentiles(chain["step_ms"], 6)
    for leg in (single, chain):
        assert leg["cpu_ms_by_process"].keys() == PROCESSES - {"bench"} | {"postgres"}
        assert leg["statements_per_task"]["finish_few_tasks"] > 0
        assert leg["passes_per_task"]["resulter worked"] > 0
        assert leg["cpu_ms"] == pytest.approx(sum(leg["cpu_ms_by_process"].values()), abs=0.01)
        assert 0 < leg["sqs_calls_by_operation"]["outbound send_message_batch"] <= 1.1
        assert leg["sqs_usd_per_million_tasks"] == pytest.approx(leg["sqs_calls_per_task"] * 0.4, abs=0.002)
    assert [row["tasks"] for row in figures["table"]] == ["100/s", "chain"]
    assert "pgqueuer" not in figures
    floor = figures["floor_at_100_per_second"]
    assert floor["tasks"] == 100
    assert floor["cpu_ms_by_process"].keys() == {"api", "scheduler", "worker", "resulter", "postgres"}
    assert math.isfinite(floor["sqs_cpu_ms"])  # below 0 where SQS has used more while idle, which is taken off
    check_percentiles(floor["call_to_handler_start_ms"], 100)


def test_scale_has_a_row_for_each_number_of_processes(report: dict[str, Any]) -> None:
    table = figures_of(report, "scale")["table"]
    assert [(row["workers"], row["schedulers"], row["attempts"]) for row in table] == [(1, 1, TASKS), (1, 2, TASKS)]


def test_another_sqs_is_left_as_it_was_and_repeats_are_kept_also_through_a_pooler(sqs_url: str, tmp_path: Path) -> None:
    pooler = ["--pooler"] if WHY_NOT is None else []
    client = botocore.session.get_session().create_client("sqs", endpoint_url=sqs_url)
    before = client.list_queues().get("QueueUrls", [])
    path = tmp_path / "drain.json"
    arguments = ("--tasks", str(TASKS), "--sqs-endpoint-url", sqs_url, "--repeat", "2", "--json", str(path))
    done = run_benchmark("drain", *arguments, *pooler)
    assert done.returncode == 0, done.stdout + done.stderr
    drain = json.loads(path.read_text())["scenarios"]["drain"]
    assert [run["attempts"] for run in drain["runs"]] == [TASKS, TASKS]
    used = drain["figures"]["cost"]["cpu_us_per_task"]
    assert "sqs" not in used
    assert ("pgbouncer" in used) == bool(pooler)
    assert client.list_queues().get("QueueUrls", []) == before


def test_unknown_scenario_names_those_that_there_are() -> None:
    done = run_benchmark("drian")
    assert done.returncode == 2
    assert "'drian'" in done.stderr
    assert "drain, batched, live, latency" in done.stderr
