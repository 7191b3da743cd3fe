"""Records of Kafka, messages as records, and the topics that tasks may publish to."""

import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from penstock.brokers.base import MESSAGE_ID, Limits, Message, Outgoing, Unsent
from penstock.protocol.json_text import body_bytes
from penstock.settings.model import Settings

LIMITS = Limits(
    max_message_bytes=990_000,  # brokers take a record of 1 MB by default, and ours has headers more
    max_call_messages=10,
    # Nothing behind a leased record can be committed, and all of it would be delivered again after a crash.
    max_extend_seconds=600,
    deletes_overdue=True,
    outlives_connection=False,
    makes_queues=True,
)
ID_HEADER = "penstock_id"
SENT_HEADER = "penstock_sent_ms"  # epoch
RECEIVES_HEADER = "penstock_receives"  # of a record that was written again: how often the message was received before
_OURS = (ID_HEADER, SENT_HEADER, RECEIVES_HEADER)
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

Headers = Sequence[tuple[str, bytes | None]]


class Partition(NamedTuple):
    topic: str
    partition: int


class Position(NamedTuple):
    """``offset`` is that of the next record to read, as Kafka keeps it for a group; ``note`` is kept beside it."""

    topic: str
    partition: int
    offset: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """A record to publish. ``value`` None is a tombstone; ``partition`` None leaves the choice to the key."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None


Write = Callable[[Sequence[Record]], Awaitable[list[Unsent | None]]]  # None for each record that the brokers have


@dataclass(frozen=True, slots=True)
class Delivery:
    """The place of a published record, -1 where the broker gave none, or the error. refused: a retry is refused too.
    in_batch: for the size of a batch, which the broker refuses whole."""

    partition: int = -1
    offset: int = -1
    error: str | None = None
    refused: bool = False
    in_batch: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A record that was read. ``timestamp_ms`` is by the clock that the topic is set to, None if there is none."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None

    @property
    def topic_partition(self) -> Partition:
        return Partition(self.topic, self.partition)

    @property
    def receives(self) -> int:
        """How often the message was received as another record."""
        return self._number(RECEIVES_HEADER) or 0

    def again(self, topic: str, receives: int) -> Record:
        """The record to write instead of this one, which was received so often."""
        ours = {ID_HEADER: self._message_id(), RECEIVES_HEADER: str(receives)}
        if (sent := self._sent_ms()) is not None:
            ours[SENT_HEADER] = str(sent)
        headers = [(name, value) for name, value in self.headers if name not in _OURS]
        headers += [(name, text.encode()) for name, text in ours.items()]
        return Record(topic, self.value, self.key, headers=headers)

    def message(self, receipt: str, times_before: int) -> Message:
        """times_before: how often this record was handed out."""
        sent = self._sent_ms()
        attributes = {}
        for name, value in self.headers:
            if name not in _OURS:
                with suppress(UnicodeDecodeError):
                    attributes[name] = (value or b"").decode()
        return Message(
            id=self._message_id(),
            receipt=receipt,
            body=(self.value or b"").decode("utf-8", "surrogateescape"),
            receive_count=1 + times_before + self.receives,
            sent_at=None if sent is None else sent / 1000,
            attributes=attributes,
        )

    def _message_id(self) -> str:
        """The id of its first writing, or topic, place and time: a topic that is made again begins at offset 0 too."""
        given = (dict(self.headers).get(ID_HEADER) or b"").decode("ascii", "replace")
        if MESSAGE_ID.fullmatch(given):
            return given
        topic = hashlib.sha256(self.topic.encode()).hexdigest()[:16]
        return f"{topic}-{self.partition}-{self.offset}-{self.timestamp_ms or 0}"

    def _sent_ms(self) -> int | None:
        sent = self._number(SENT_HEADER)
        return self.timestamp_ms if sent is None else sent

    def _number(self, header: str) -> int | None:
        digits = dict(self.headers).get(header) or b""
        return int(digits) if digits.isdigit() and len(digits) < 18 else None


def record_of(topic: str, message: Outgoing) -> Record:
    headers = [(name, value.encode()) for name, value in message.attributes.items() if name not in _OURS]
    headers += [(ID_HEADER, secrets.token_hex(16).encode()), (SENT_HEADER, str(round(time.time() * 1000)).encode())]
    return Record(topic, body_bytes(message.body), headers=headers)


def topic_problem(topic: str, settings: Settings) -> str | None:
    """Why tasks and schedules may not publish to a topic, and what to do; None where they may."""
    if not _TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
        return (
            f"topic {topic[:300]!r} is no name of a topic: use letters, digits, dots, dashes, underscores, "
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
