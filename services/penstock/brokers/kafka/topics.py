"""Topics: made where a queue's are missing, counted, and allowed to tasks that publish."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

from penstock.brokers.base import QueueMissing
from penstock.brokers.kafka.library import (
    ANSWER_SECONDS,
    ask,
    client_config,
    confluent,
    consumer_config,
    error_text,
    open_client,
    unread_ranges,
)
from penstock.runtime.logs import get_logger
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings

_MAKE_SECONDS = 5.0
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_SHOWN_CHARS = 300

log = get_logger()

T = TypeVar("T")


def topic_problem(topic: str, settings: Settings) -> str | None:
    """Why tasks and schedules may not publish to a topic, and what to do; None where they may."""
    if not _NAME.fullmatch(topic) or topic in (".", ".."):
        return (
            f"topic {topic[:_SHOWN_CHARS]!r} is no name of a topic: use letters, digits, dots, dashes, underscores, "
            "up to 249 of them"
        )
    if topic.startswith("__"):
        return f"topic {topic!r} is one of Kafka's own: name another"
    if settings.is_own_queue(topic):
        return f"topic {topic!r} is Penstock's own: a right to enqueue is none to write it"
    allowed = settings.kafka_publish_topics
    if allowed and not any(fnmatchcase(topic, pattern) for pattern in allowed):
        return f"topic {topic!r} is not among PENSTOCK_KAFKA_PUBLISH_TOPICS: name another, or add it there"
    return None


class Topics:
    """The topics of queues; each question to the brokers is asked in a thread.

    shown: the URL, for errors. makes: make missing topics of a queue when it is first used.
    """

    def __init__(self, settings: Settings, shown: str, *, makes: bool) -> None:
        self._settings = settings
        self._shown = shown
        self._makes = makes
        self._known: set[str] = set()
        self._asking = asyncio.Lock()
        self._admin: Any = None
        self._cannot_make = ""  # why, once it was tried
        self._groups: dict[str, Any] = {}  # consumers that read nothing, by the group that they ask about

    async def ensure(self, name: str, *, make: bool | None = None) -> None:
        """Check once that the topics of a queue and of its dead letters exist. Raises QueueMissing, Unavailable."""
        if name in self._known:
            return
        async with self._asking:
            make = self._makes if make is None else make
            wanted = [name] if name.endswith(DEAD_LETTER_SUFFIX) else [name + DEAD_LETTER_SUFFIX, name]
            there = await self._ask(lambda: self._open_admin().list_topics(timeout=ANSWER_SECONDS).topics)
            for topic in wanted:
                if topic not in there and make:
                    await self._ask(partial(self._make, topic))
            if name not in there and not make:
                raise QueueMissing(
                    f"topic {name!r} does not exist at {self._shown}: make it with `penstock create-queues`"
                )
            self._known.add(name)

    async def count_brokers(self) -> int:
        """Raises Unavailable."""
        return await self._ask(lambda: len(self._open_admin().list_topics(timeout=ANSWER_SECONDS).brokers))

    async def lag(self, name: str) -> int:
        """Records behind the group's positions, over all partitions. Raises Unavailable."""
        async with self._asking:
            return await self._ask(lambda: self._lag(name))

    async def close(self) -> None:
        groups, self._groups, self._admin = self._groups, {}, None
        for consumer in groups.values():
            await asyncio.to_thread(consumer.close)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await ask(question, f"Kafka at {self._shown} is unavailable or rejected the request")

    # In a thread

    def _open_admin(self) -> Any:
        if self._admin is None:
            library: Any = importlib.import_module("confluent_kafka.admin")
            config = client_config(self._settings)
            self._admin = library.AdminClient(config, logger=config.pop("logger"))
        return self._admin

    def _make(self, topic: str) -> None:
        admin = self._open_admin()
        if not self._cannot_make:
            self._cannot_make = self._create(topic)
            if not self._cannot_make:
                return
        # Brokers may make topics that are asked for, though they do not let us make them.
        found = admin.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
        if found.error is not None and found.error.name() != "LEADER_NOT_AVAILABLE":
            raise QueueMissing(
                f"topic {topic!r} does not exist at {self._shown} and cannot be made: {self._cannot_make}"
            )

    def _create(self, topic: str) -> str:
        """Returns why it could not be made, "" when it exists."""
        library: Any = importlib.import_module("confluent_kafka.admin")
        partitions, copies = self._settings.kafka_partitions, self._settings.kafka_replication
        new = library.NewTopic(topic, num_partitions=partitions, replication_factor=copies)
        made = self._open_admin().create_topics([new], request_timeout=_MAKE_SECONDS)[topic]
        try:
            made.result(2 * _MAKE_SECONDS)
        except confluent().KafkaException as exc:
            name = exc.args[0].name() if exc.args else ""
            return "" if name == "TOPIC_ALREADY_EXISTS" else error_text(exc)
        except TimeoutError:
            return "no answer"
        log.info("topic_made", topic=topic, partitions=partitions)
        return ""

    def _lag(self, name: str) -> int:
        consumer = self._groups.get(name)
        if consumer is None:
            consumer = self._groups[name] = open_client("Consumer", consumer_config(self._settings, name))
        return sum(max(0, end - start) for start, end in unread_ranges(consumer, name).values())
