"""clockwork's and kafka-message-scheduler's jobs on one stack of real processes, of which some are killed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import older_schedulers
from tests.acceptance.conftest import RunningStack, running
from tests.conftest import reachable_folder
from tests.kafka import MockKafka


@pytest.fixture(scope="module")
def pipeline(kafka: MockKafka) -> Iterator[SimpleNamespace]:
    """A stack with clockwork's API and both sources; ``topic`` is that of the schedules in JSON."""
    topic = kafka.topic("schedules")
    env = older_schedulers.stack_environment(kafka, topic, with_kills=True)
    with reachable_folder() as path, running(path / "data", "--workers", "1", env=env) as stack:
        yield SimpleNamespace(stack=stack, topic=topic, create_topic=env["PENSTOCK_CLOCKWORK_CREATE_TOPIC"])


class Killable:
    """What the benchmark asks of a stack that it kills processes of."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack

    def state(self) -> dict[str, Any]:
        return self._stack.state


def test_schedules_of_clockwork_arrive_in_order_and_on_time_and_cancelled_ones_never(
    kafka: MockKafka, pipeline: SimpleNamespace
) -> None:
    """How late they are depends on the machine; the benchmark has it. Where the first was due before all were created,
    which says nothing about their order, the next try has more time."""
    for lead_seconds in (15.0, 60.0, 240.0):
        report = asyncio.run(
            older_schedulers.clockwork(
                pipeline.stack.state["api"], kafka, pipeline.create_topic, schedules=300, keys=10, over_seconds=3,
                lead_seconds=lead_seconds, by_http=300, cancelled_count=20,
            )
        )  # fmt: skip
        if report.creation_seconds < lead_seconds:
            break
    assert (report.arrived, report.lost, report.early, report.out_of_order, report.unwanted) == (300, 0, 0, 0, 0)


def test_schedules_of_kafka_message_scheduler_survive_kills_in_the_midst_of_firing(
    kafka: MockKafka, pipeline: SimpleNamespace
) -> None:
    report = asyncio.run(
        older_schedulers.message_scheduler(
            kafka, pipeline.topic, schedules=1000, over_seconds=5, lead_seconds=8, stack=Killable(pipeline.stack)
        )
    )
    assert (report.arrived, report.lost, report.early, report.unwanted) == (1000, 0, 0, 0)
    assert all(os.path.exists(f"/proc/{one['pid']}") for one in pipeline.stack.state["processes"] if one["pid"])
