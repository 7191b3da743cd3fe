"""The reader of a consumer group, over a consumer that has no records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from penstock.brokers.kafka.group_reader import GroupReader
from penstock.brokers.kafka.messages import Partition, Received
from penstock.settings.model import load_settings


class Consumer:
    """Knows which partitions are paused."""

    def __init__(self) -> None:
        self.mine: set[Partition] = set()
        self.paused: set[Partition] = set()

    async def pause(self) -> None:
        self.paused |= self.mine

    async def resume(self) -> None:
        self.paused.clear()

    async def receive(self, *, max_records: int, wait_seconds: float) -> list[Received]:
        await asyncio.sleep(0.01)
        return []


async def test_what_was_paused_goes_on_although_a_partition_came_meanwhile() -> None:
    async def write(records: Sequence[Any]) -> list[Any]:
        return [None for _ in records]

    reader = GroupReader(load_settings(kafka_brokers="127.0.0.1:1"), "t", write)
    consumer = Consumer()
    reader._consumer = cast(Any, consumer)
    first, second = Partition("t", 0), Partition("t", 1)
    consumer.mine = {first}
    reader._assigned([first])
    reader._ahead.extend(Received("t", 0, n, None, b"{}", (), None) for n in range(100))
    reading = asyncio.create_task(reader._read_ahead())
    async with asyncio.timeout(5):
        while not consumer.paused:
            await asyncio.sleep(0.005)
        assert consumer.paused == {first}
        consumer.mine = {first, second}
        reader._assigned([second])
        reader._ahead.clear()
        while consumer.paused:
            await asyncio.sleep(0.005)
    assert not reading.done()
    reading.cancel()
