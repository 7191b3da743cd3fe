"""Topics of queues: made where they are missing, and counted."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from penstock.brokers.base import QueueMissing
from penstock.brokers.kafka.library import client_config, confluent, consumer_config, open_client, told
from penstock.protocol.errors import Unavailable
from penstock.runtime.logs import get_logger
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

_ANSWER_SECONDS = 10.0
_MAKE_SECONDS = 5.0

log = get_logger()

T = TypeVar("T")


class Topics:
    """Asks the brokers about topics; each question in a thread. shown: the URL, for errors."""

    def __init__(self, settings: Settings, shown: str) -> None:
        self._settings = settings
        self._shown = shown
        self._known: set[str] = set()
        self._asking = asyncio.Lock()
        self._admin: Any = None
        self._cannot_make = ""  # why, once it was tried
        self._groups: dict[str, Any] = {}  # a consumer that reads nothing, by the group that it asks about

    async def ensure(self, name: str, *, make: bool) -> None:
        """See to it once that a queue's topic is there, and that of its dead letters.

        Raises QueueMissing, Unavailable.
        """
        if name in self._known:
            return
        async with self._asking:
            wanted = [name] if name.endswith(DEAD_LETTER_SUFFIX) else [name + DEAD_LETTER_SUFFIX, name]
            there = await self._in_thread(self._list)
            for topic in wanted:
                if topic not in there and make:
                    await self._in_thread(partial(self._make, topic))
            if name not in there and not make:
                raise QueueMissing(
                    f"topic {name!r} does not exist at {self._shown}: make it with `penstock create-queues`"
                )
            self._known.add(name)

    async def count_brokers(self) -> int:
        """Raises Unavailable."""
        return await self._in_thread(lambda: len(self._open_admin().list_topics(timeout=_ANSWER_SECONDS).brokers))

    async def lag(self, name: str) -> int:
        """Records behind the group's positions, over all partitions. Raises Unavailable."""
        async with self._asking:
            return await self._in_thread(lambda: self._lag(name))

    async def close(self) -> None:
        groups, self._groups, self._admin = self._groups, {}, None
        for consumer in groups.values():
            await asyncio.to_thread(consumer.close)

    async def _in_thread(self, ask: Callable[[], T]) -> T:
        module = confluent()
        try:
            return await asyncio.to_thread(ask)
        except module.KafkaException as exc:
            raise Unavailable(f"Kafka at {self._shown} is unavailable or rejected the request: {told(exc)}") from exc

    # In a thread

    def _open_admin(self) -> Any:
        if self._admin is None:
            library: Any = importlib.import_module("confluent_kafka.admin")
            config = client_config(self._settings)
            self._admin = library.AdminClient(config, logger=config.pop("logger"))
        return self._admin

    def _list(self) -> set[str]:
        return set(self._open_admin().list_topics(timeout=_ANSWER_SECONDS).topics)

    def _make(self, topic: str) -> None:
        admin = self._open_admin()
        if not self._cannot_make:
            self._cannot_make = self._create(topic)
            if not self._cannot_make:
                return
        # Brokers may make topics that are asked for, though they do not let us make them.
        found = admin.list_topics(topic, timeout=_ANSWER_SECONDS).topics[topic]
        if found.error is not None and found.error.name() != "LEADER_NOT_AVAILABLE":
            raise QueueMissing(
                f"topic {topic!r} does not exist at {self._shown} and cannot be made: {self._cannot_make}"
            )

    def _create(self, topic: str) -> str:
        """Returns why it could not be made, "" when it is there."""
        library: Any = importlib.import_module("confluent_kafka.admin")
        partitions, copies = self._settings.kafka_partitions, self._settings.kafka_replication
        new = library.NewTopic(topic, num_partitions=partitions, replication_factor=copies)
        made = self._open_admin().create_topics([new], request_timeout=_MAKE_SECONDS)[topic]
        try:
            made.result(2 * _MAKE_SECONDS)
        except confluent().KafkaException as exc:
            name = exc.args[0].name() if exc.args else ""
            return "" if name == "TOPIC_ALREADY_EXISTS" else told(exc)
        except TimeoutError:
            return "no answer"
        log.info("topic_made", topic=topic, partitions=partitions)
        return ""

    def _lag(self, name: str) -> int:
        module = confluent()
        consumer = self._groups.get(name)
        if consumer is None:
            consumer = self._groups[name] = open_client("Consumer", consumer_config(self._settings, name))
        found = consumer.list_topics(name, timeout=_ANSWER_SECONDS).topics[name]
        asked = [module.TopicPartition(name, number) for number in found.partitions]
        lag = 0
        for at in consumer.committed(asked, timeout=_ANSWER_SECONDS):
            low, high = consumer.get_watermark_offsets(
                module.TopicPartition(name, at.partition), timeout=_ANSWER_SECONDS
            )
            lag += max(0, high - max(low, at.offset))
        return lag
