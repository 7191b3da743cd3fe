"""What goes to Kafka and comes from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Headers = Sequence[tuple[str, bytes | None]]


class Partition(NamedTuple):
    topic: str
    partition: int


class Position(NamedTuple):
    """``offset`` is that of the next record to read, as Kafka keeps it for a group, with a note of the group's own."""

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


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of a record: its place (-1 where the broker gave none), or the reason why it is not there.

    refused: the broker, or the client, will never take this record as it is; otherwise trying again may work.
    """

    partition: int = -1
    offset: int = -1
    error: str | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A record that was read. ``timestamp_ms`` is by the clock of whoever the topic says, None if there is none."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None

    @property
    def next_position(self) -> Position:
        """What to commit once this record is done with."""
        return Position(self.topic, self.partition, self.offset + 1)
