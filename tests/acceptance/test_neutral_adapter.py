"""The adapter for the neutral harness as the harness runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

REQUIRED = {"claim_p50_ms", "claim_p95_ms", "claim_p99_ms", "enqueue_rate", "completion_rate", "queue_depth"}


def test_it_reports_what_the_harness_requires_and_ends_when_told(empty_database_url: str) -> None:
    env = dict(os.environ, DATABASE_URL=empty_database_url, PRODUCER_RATE="50", WORKER_COUNT="8", SAMPLE_EVERY_S="1")
    adapter = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.neutral.adapter"],
        env=env, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert adapter.stdout is not None
    records = (json.loads(line) for line in adapter.stdout)
    descriptor = next(records)
    values: dict[str, float] = {}
    for record in records:
        values[record["metric"]] = record["value"]
        if values.keys() >= REQUIRED and values["completion_rate"] > 0 and values["claim_p50_ms"] > 0:
            break
    adapter.send_signal(signal.SIGTERM)
    assert adapter.wait(timeout=60) == 0
    assert (descriptor["kind"], descriptor["system"]) == ("descriptor", "penstock")
    assert values.keys() >= REQUIRED
