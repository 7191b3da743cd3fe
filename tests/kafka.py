"""A Kafka for tests: librdkafka's mock cluster, which speaks the real protocol to any process of this machine.

It knows groups and their rebalances, idempotent producers and headers, no transactions. A topic is made when it is
first asked for, with four partitions. ``python -m tests.kafka`` runs one alone and prints its address.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import secrets
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

PARTITIONS = 4  # of a topic that was not created with another number
_PRODUCER = 0
_END, _TOPIC, _PARTITION, _VALUE, _FLAGS, _HEADER, _COPY = 0, 1, 3, 4, 7, 9, 2  # of rd_kafka_producev
PROMPT = {"fetch.wait.max.ms": 10}
"""For consumers: the mock answers a fetch that finds nothing after so long, whatever comes; else after 500."""
_JOIN_DELAY_MS = 200  # the first join of a group waits so long for other members; 3000 by default


class MockKafka:
    """One mock cluster; ``brokers`` is its address. Its topics and groups are kept in memory until :meth:`stop`."""

    def __init__(self, brokers: int = 1) -> None:
        self._library = _librdkafka()
        error = ctypes.create_string_buffer(256)
        self._client = self._library.rd_kafka_new(_PRODUCER, self._library.rd_kafka_conf_new(), error, len(error))
        assert self._client, error.value
        self._cluster = self._library.rd_kafka_mock_cluster_new(self._client, brokers)
        assert self._cluster, "no mock cluster"
        self._library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, _JOIN_DELAY_MS)
        self.brokers = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def topic(self, name: str = "t", *, partitions: int = PARTITIONS) -> str:
        """A new topic; returns its name, which is like no other."""
        name = f"{name}-{secrets.token_hex(4)}"
        assert self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1) == 0
        return name

    def make(self, name: str, *, partitions: int = PARTITIONS) -> None:
        """A topic of this name, if there is none; the admin's request for it is not among those that a mock knows."""
        self._library.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)

    def set_down(self, broker: int = 1) -> None:
        """Close this broker's connections and take no others."""
        self._library.rd_kafka_mock_broker_set_down(self._cluster, broker)

    def set_up(self, broker: int = 1) -> None:
        self._library.rd_kafka_mock_broker_set_up(self._cluster, broker)

    def fail_next(self, api_key: int, *codes: int) -> None:
        """The next requests of this kind are answered with these error codes of the protocol, each once."""
        array = (ctypes.c_int * len(codes))(*codes)
        self._library.rd_kafka_mock_push_request_errors_array(self._cluster, api_key, len(codes), array)

    def write(self, topic: str, *records: tuple[bytes | None, bytes | None], headers: Any = None) -> None:
        """Write pairs of key and value, in order, by a client that is not ours."""
        producer = confluent_kafka.Producer({"bootstrap.servers": self.brokers, "partitioner": "murmur2_random"})
        failed: list[Any] = []
        for key, value in records:
            while True:
                try:
                    producer.produce(
                        topic, value, key, headers=headers, on_delivery=lambda e, _m: e and failed.append(e)
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
        assert producer.flush(60) == 0
        assert not failed, failed

    def write_with_header(self, topic: str, value: bytes, header: bytes) -> None:
        """Write a record to partition 0 with a header of this name, which Python's client would encode itself."""
        library, number = self._library, ctypes.c_int
        options = library.rd_kafka_conf_new()
        library.rd_kafka_conf_set(options, b"bootstrap.servers", self.brokers.encode(), None, 0)
        producer = library.rd_kafka_new(_PRODUCER, options, None, 0)
        error = library.rd_kafka_producev(
            ctypes.c_void_p(producer), number(_TOPIC), ctypes.c_char_p(topic.encode()), number(_PARTITION), number(0),
            number(_VALUE), ctypes.c_char_p(value), ctypes.c_size_t(len(value)), number(_FLAGS), number(_COPY),
            number(_HEADER), ctypes.c_char_p(header), ctypes.c_char_p(b"x"), ctypes.c_ssize_t(1), number(_END),
        )  # fmt: skip
        assert error == 0
        assert library.rd_kafka_flush(producer, 60_000) == 0
        library.rd_kafka_destroy(producer)

    def read(self, topics: Sequence[str] | str, *, count: int, seconds: float = 60) -> list[Any]:
        """The records of whole topics, read by a client that is not ours: as soon as there are so many."""
        return self.reader(topics).take(count, seconds=seconds)

    def reader(self, topics: Sequence[str] | str) -> Reader:
        """What reads these topics from their start."""
        return Reader(self.brokers, [topics] if isinstance(topics, str) else topics)


class Reader:
    """Reads every partition of its topics without a group; ``records`` are all that it has seen."""

    def __init__(self, brokers: str, topics: Sequence[str]) -> None:
        config = {"bootstrap.servers": brokers, "group.id": "reader", "enable.auto.commit": False} | PROMPT
        self._consumer = confluent_kafka.Consumer(config)
        found = [self._consumer.list_topics(topic, timeout=30).topics[topic] for topic in topics]
        self._consumer.assign(
            [confluent_kafka.TopicPartition(one.topic, number, 0) for one in found for number in one.partitions]
        )
        self.records: list[Any] = []

    def take(self, count: int, *, seconds: float = 60) -> list[Any]:
        """All records, as soon as there are ``count`` of them; fails the test when there never are."""
        deadline = time.monotonic() + seconds
        while len(self.records) < count:
            assert time.monotonic() < deadline, f"waited {seconds:g} s for {count} records, saw {len(self.records)}"
            self.look(0.1)
        return self.records

    def look(self, seconds: float = 0.0) -> list[Any]:
        """What has come by now; waits so long for one more."""
        for message in self._consumer.consume(10_000, seconds):
            if message.error() is None:
                self.records.append(message)
        return self.records

    def close(self) -> None:
        self._consumer.close()


def _librdkafka() -> Any:
    """The library that confluent_kafka has loaded itself: the one in its wheel, or the system's."""
    folder = Path(confluent_kafka.__file__).parent.with_name("confluent_kafka.libs")
    bundled = sorted(folder.glob("librdkafka*"))
    name = str(bundled[0]) if bundled else ctypes.util.find_library("rdkafka")
    assert name, "no librdkafka"
    library = ctypes.CDLL(name)
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for function, returns, takes in (
        ("rd_kafka_conf_new", pointer, []),
        ("rd_kafka_new", pointer, [number, pointer, text, ctypes.c_size_t]),
        ("rd_kafka_conf_set", number, [pointer, text, text, text, ctypes.c_size_t]),
        ("rd_kafka_flush", number, [pointer, number]),
        ("rd_kafka_producev", number, None),
        ("rd_kafka_destroy", None, [pointer]),
        ("rd_kafka_mock_cluster_new", pointer, [pointer, number]),
        ("rd_kafka_mock_cluster_bootstraps", text, [pointer]),
        ("rd_kafka_mock_topic_create", number, [pointer, text, number, number]),
        ("rd_kafka_mock_broker_set_down", number, [pointer, ctypes.c_int32]),
        ("rd_kafka_mock_broker_set_up", number, [pointer, ctypes.c_int32]),
        ("rd_kafka_mock_group_initial_rebalance_delay_ms", None, [pointer, ctypes.c_int32]),
        ("rd_kafka_mock_push_request_errors_array", None, [pointer, ctypes.c_int16, ctypes.c_size_t, pointer]),
    ):
        declared = getattr(library, function)
        declared.restype, declared.argtypes = returns, takes
    return library


@pytest.fixture(scope="session")
def kafka() -> MockKafka:
    """One Kafka for the run; topics of a test are made by ``kafka.topic()``.

    It ends with the process: the library sometimes aborts the whole process as it takes the cluster apart.
    """
    return MockKafka()


if __name__ == "__main__":
    print(MockKafka().brokers, flush=True)
    signal.pause()
