"""The Kafka clients against librdkafka's mock cluster, which speaks the protocol of the real one."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

import confluent_kafka
import pytest

from penstock.brokers.base import Message, Outgoing
from penstock.brokers.kafka import consumer
from penstock.brokers.kafka.consumer import KafkaConsumer
from penstock.brokers.kafka.library import consumer_config, producer_config
from penstock.brokers.kafka.messages import Partition, Position, Received, Record
from penstock.brokers.kafka.producer import KafkaProducer
from penstock.brokers.kafka.queue import KafkaTransport
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, load_settings
from tests.kafka import PARTITIONS, PROMPT, MockKafka

LIMIT_SECONDS = 60
_PRODUCE, _MSG_SIZE_TOO_LARGE, _OUT_OF_ORDER_SEQUENCE_NUMBER = 0, 10, 45  # a request and errors of the protocol
_ILLEGAL_GENERATION, _TOPIC_AUTHORIZATION_FAILED, _NOT_CONTROLLER = 22, 29, 41


@pytest.fixture
def kafka_settings(kafka: MockKafka) -> Settings:
    return load_settings(kafka_brokers=kafka.brokers, kafka_session_timeout_seconds=2)


@pytest.fixture
async def producer(kafka_settings: Settings) -> AsyncIterator[KafkaProducer]:
    producer = KafkaProducer(producer_config(kafka_settings))
    yield producer
    await producer.close()


class Members:
    """Consumers of one group, closed at the end."""

    def __init__(self, settings: Settings, topics: list[str]) -> None:
        self._settings, self._topics, self._group = settings, topics, f"g-{secrets.token_hex(4)}"
        self._opened: list[KafkaConsumer] = []

    async def join(self, **callbacks: Any) -> KafkaConsumer:
        member = KafkaConsumer(consumer_config(self._settings, self._group) | PROMPT, self._topics, **callbacks)
        await member.open()
        self._opened.append(member)
        return member

    async def close(self) -> None:
        for member in self._opened:
            await member.close()


def after(record: Received) -> Position:
    return Position(record.topic, record.partition, record.offset + 1)


async def take(consumer: KafkaConsumer, count: int) -> list[Received]:
    """So many records, however many receives that takes."""
    records: list[Received] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(records) < count:
            records += await consumer.receive(max_records=1000, wait_seconds=0.1)
    return records


async def test_what_is_published_is_read_with_key_headers_and_tombstones(
    kafka: MockKafka, kafka_settings: Settings, producer: KafkaProducer
) -> None:
    topic = kafka.topic()
    sent = [
        Record(topic, b"text", b"k"),
        Record(topic, b"\x00\xff", b"k", headers=[("a", b"\x00"), ("b", None), ("a", b"again")]),
        Record(topic, None, b"k"),
        Record(topic, b"", None, partition=3),
    ]
    deliveries = await producer.send(sent)
    assert [delivery.error for delivery in deliveries] == [None] * 4
    assert deliveries[3].partition == 3
    members = Members(kafka_settings, [topic])
    seen = await take(await members.join(), 4)
    await members.close()
    by_key = [record for record in seen if record.key == b"k"]
    assert [(record.value, list(record.headers)) for record in by_key] == [
        (b"text", []), (b"\x00\xff", [("a", b"\x00"), ("b", None), ("a", b"again")]), (None, []),
    ]  # fmt: skip
    assert {record.partition for record in by_key} == {deliveries[0].partition}
    assert [(record.key, record.value, record.partition) for record in seen if record.key is None] == [(None, b"", 3)]


async def test_many_callers_share_one_producer_and_each_gets_its_own_answers(
    kafka: MockKafka, producer: KafkaProducer
) -> None:
    topic = kafka.topic()

    async def send(caller: int) -> list[tuple[int, int]]:
        answers = await producer.send([Record(topic, b"%d" % n, b"%d" % caller) for n in range(20)])
        assert all(answer.error is None for answer in answers)
        return [(answer.partition, answer.offset) for answer in answers]

    places = await asyncio.gather(*(send(caller) for caller in range(100)))
    assert all(offsets == sorted(offsets) for offsets in places)  # what one caller sends keeps its order
    assert len({place for offsets in places for place in offsets}) == 2000
    assert len(kafka.read(topic, count=2000)) == 2000


async def test_a_record_that_is_too_large_is_refused_and_harms_no_other(
    kafka: MockKafka, producer: KafkaProducer
) -> None:
    topic = kafka.topic()
    large = Record(topic, b"x" * 2_000_000, b"k")
    answers = await producer.send([Record(topic, b"1", b"k"), large, Record(topic, b"2", b"k")])
    assert [(answer.error is None, answer.refused) for answer in answers] == [
        (True, False), (False, True), (True, False),
    ]  # fmt: skip
    assert "MSG_SIZE_TOO_LARGE" in str(answers[1].error)


async def test_brokers_that_are_away_are_told_after_the_delivery_time_and_the_record_may_be_sent_again() -> None:
    settings = load_settings(kafka_brokers="127.0.0.1:1", kafka_delivery_timeout_seconds=1)
    producer = KafkaProducer(producer_config(settings))
    (answer,) = await producer.send([Record("t", b"1")])
    assert answer.error is not None
    assert not answer.refused
    await producer.close(0)


async def test_a_producer_that_the_library_gives_up_is_replaced_and_nobody_waits_for_it_for_ever(
    kafka: MockKafka, producer: KafkaProducer
) -> None:
    topic = kafka.topic()
    (first,) = await producer.send([Record(topic, b"1", partition=0)])
    kafka.fail_next(_PRODUCE, _OUT_OF_ORDER_SEQUENCE_NUMBER)
    async with asyncio.timeout(LIMIT_SECONDS):
        (second,) = await producer.send([Record(topic, b"2", partition=0)])
        (third,) = await producer.send([Record(topic, b"3", partition=0)])
    assert (first.error, third.error) == (None, None)
    assert second.error is not None
    assert not second.refused
    assert [record.value() for record in kafka.read(topic, count=2)] == [b"1", b"3"]


async def test_closing_reports_what_has_not_arrived() -> None:
    producer = KafkaProducer(producer_config(load_settings(kafka_brokers="127.0.0.1:1")))
    sending = asyncio.create_task(producer.send([Record("t", b"1")]))
    await asyncio.sleep(0)
    await producer.close(0)
    (answer,) = await sending
    assert answer.error is not None


async def test_a_group_goes_on_behind_what_was_committed(
    kafka: MockKafka, kafka_settings: Settings, producer: KafkaProducer
) -> None:
    topic = kafka.topic()
    await producer.send([Record(topic, b"%d" % n, partition=0) for n in range(10)])
    members = Members(kafka_settings, [topic])
    first = await members.join()
    seen = await take(first, 10)
    assert await first.commit([after(seen[6])]) == []
    assert await first.committed([Partition(topic, 0)]) == [Position(topic, 0, 7)]
    assert await first.bounds(Partition(topic, 0)) == (0, 10)
    await first.close()
    second = await members.join()
    assert [record.offset for record in await take(second, 3)] == [7, 8, 9]
    await second.seek(Position(topic, 0, 9))
    assert [record.offset for record in await take(second, 1)] == [9]
    await members.close()


async def test_members_share_partitions_and_what_is_revoked_can_still_be_committed(
    kafka: MockKafka, kafka_settings: Settings, producer: KafkaProducer
) -> None:
    """A busy machine may be late for a group, which then refuses the commit: so the group has five chances."""
    for _ in range(5):
        topic = kafka.topic()
        await producer.send([Record(topic, b"%d" % n, partition=n) for n in range(PARTITIONS)])
        if await _second_member_joins(Members(kafka_settings, [topic])):
            return
    raise AssertionError("no commit was taken while partitions were being revoked")


async def _second_member_joins(members: Members) -> bool:
    """Whether the first could commit what it had to give up; what it could not is read again, and nothing else."""
    done: dict[Partition, Position] = {}
    revoked: list[Partition] = []
    lost: list[Partition] = []

    def revoke(partitions: Sequence[Partition]) -> list[Position]:
        revoked.extend(partitions)
        return [done[partition] for partition in partitions]

    first = await members.join(on_revoked=revoke, on_lost=lost.extend)
    for record in await take(first, PARTITIONS):
        done[Partition(record.topic, record.partition)] = after(record)
    second = await members.join()
    again: list[Received] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await second.assignment() or len(await first.assignment() + await second.assignment()) > PARTITIONS:
            again += await first.receive(max_records=10, wait_seconds=0.1)
            again += await second.receive(max_records=10, wait_seconds=0.1)
    positions = await second.committed(list(done))
    firsts = await first.assignment()
    await members.close()
    committed = [Partition(*one[:2]) for one in positions]
    assert [one[:3] for one in positions] == [done[partition][:3] for partition in committed]
    assert not [record for record in again if Partition(record.topic, record.partition) in committed]
    assert set(firsts) <= set(lost)  # it was notified of what it left
    return sorted(revoked) == sorted(committed) != []


class RefusedOnce:
    """The library's consumer in a group that changes: it refuses the first commit, and the partitions stay."""

    def __init__(self, consumer: Any) -> None:
        self._consumer, self.refused = consumer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def commit(self, **given: Any) -> Any:
        if not self.refused:
            self.refused = 1
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(_ILLEGAL_GENERATION))
        return self._consumer.commit(**given)


async def test_messages_whose_delivery_the_group_does_not_keep_come_all_the_same(kafka: MockKafka) -> None:
    """No other member receives what is in the partitions that a member of a changing group keeps."""
    transport = KafkaTransport(load_settings(transport_url=f"kafka://{kafka.brokers}", kafka_session_timeout_seconds=6))
    name = kafka.topic()
    kafka.make(name + DEAD_LETTER_SUFFIX)
    queue = transport.queue(name, label="outbound")
    bodies = {str(n) for n in range(20)}
    try:
        assert await queue.receive(wait_seconds=0, visibility_seconds=30) == []
        reader: Any = queue._reader
        reader._consumer._consumer = refusing = RefusedOnce(reader._consumer._consumer)
        await queue.send([Outgoing(body, {}) for body in sorted(bodies)])
        came: set[str] = set()
        async with asyncio.timeout(LIMIT_SECONDS):
            while came != bodies:
                messages = await queue.receive(wait_seconds=1, visibility_seconds=30)
                came |= {message.body for message in messages}
                assert await queue.delete(messages) == []
        assert refusing.refused
    finally:
        await transport.close()


@pytest.fixture
async def transport(kafka: MockKafka) -> AsyncIterator[KafkaTransport]:
    settings = load_settings(transport_url=f"kafka://{kafka.brokers}", kafka_session_timeout_seconds=6)
    transport = KafkaTransport(settings)
    yield transport
    await transport.close()


async def test_a_record_that_is_larger_than_those_of_a_queue_may_be_given_back(
    kafka: MockKafka, transport: KafkaTransport
) -> None:
    """Brokers take a little more from another program than librdkafka sends by default."""
    name = kafka.topic(partitions=1)
    kafka.make(name + DEAD_LETTER_SUFFIX)
    theirs = confluent_kafka.Producer({"bootstrap.servers": kafka.brokers, "message.max.bytes": 2_000_000})
    theirs.produce(name, b"x" * 1_048_000)
    assert theirs.flush(60) == 0
    queue = transport.queue(name, label="inbound")
    counts = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(counts) < 2:
            for message in await queue.receive(wait_seconds=1, visibility_seconds=30):
                counts.append(message.receive_count)
                await queue.release([message])
    assert counts == [1, 2]


async def test_messages_whose_batch_is_over_the_limit_of_the_topic_are_sent_again_alone_and_no_others(
    kafka: MockKafka, transport: KafkaTransport
) -> None:
    name = kafka.topic()
    kafka.make(name + DEAD_LETTER_SUFFIX)
    queue = transport.queue(name, label="results")
    await queue.send([Outgoing("first", {})])
    kafka.fail_next(_PRODUCE, _MSG_SIZE_TOO_LARGE)
    assert (await queue.send([Outgoing(str(n), {}) for n in range(40)])).failed == []
    assert (await queue.depth()).visible == 41
    kafka.fail_next(_PRODUCE, _MSG_SIZE_TOO_LARGE, _MSG_SIZE_TOO_LARGE)
    assert (await queue.send([Outgoing("large", {})])).refused == {0}


async def test_a_record_with_a_header_whose_name_is_not_utf_8_comes_without_headers(
    kafka: MockKafka, transport: KafkaTransport
) -> None:
    """Those read with it would be passed over, and never come."""
    name = kafka.topic(partitions=1)
    kafka.make(name + DEAD_LETTER_SUFFIX)
    kafka.write(name, *[(None, b"0")] * 20, headers={"kind": b"a"})  # after a few, Python makes such calls otherwise
    kafka.write_with_header(name, b"1", b"gr\xfc\xdfe")
    kafka.write(name, (None, b"2"), headers={"kind": b"c"})
    queue = transport.queue(name, label="inbound")
    came: list[Message] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(came) < 22:
            came += await queue.receive(wait_seconds=1, visibility_seconds=30)
    assert [(one.body, one.attributes) for one in came[19:]] == [("0", {"kind": "a"}), ("1", {}), ("2", {"kind": "c"})]


class RefusesFirst:
    """The library's client of a cluster that makes all topics but the first, for which it has this error code."""

    def __init__(self, admin: Any, kafka: MockKafka, code: int) -> None:
        self._admin, self._kafka, self._code = admin, kafka, code
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admin, name)

    def create_topics(self, topics: Sequence[Any], **_given: Any) -> dict[str, Future[None]]:
        (name,) = [topic.topic for topic in topics]
        made: Future[None] = Future()
        if self.asked:
            self._kafka.make(name)
            made.set_result(None)
        else:
            made.set_exception(confluent_kafka.KafkaException(confluent_kafka.KafkaError(self._code)))
        self.asked.append(name)
        return {name: made}


async def test_a_topic_that_could_not_be_made_is_made_by_the_next_call(
    kafka: MockKafka, transport: KafkaTransport
) -> None:
    await transport.greet()
    transport._admin = admin = RefusesFirst(transport._admin, kafka, _NOT_CONTROLLER)
    name = f"t-{secrets.token_hex(4)}"
    queue = transport.queue(name, label="outbound")
    with pytest.raises(Unavailable, match="NOT_CONTROLLER"):
        await queue.depth()
    assert (await queue.depth()).visible == 0
    dead = name + DEAD_LETTER_SUFFIX
    assert admin.asked == [dead, dead, name]


async def test_a_topic_that_was_deleted_since_is_made_again_once_it_is_counted(
    kafka: MockKafka, transport: KafkaTransport
) -> None:
    await transport.greet()
    transport._admin = RefusesFirst(transport._admin, kafka, _NOT_CONTROLLER)
    transport._admin.asked.append("another")
    name = f"t-{secrets.token_hex(4)}"
    transport._known.add(name)
    queue = transport.queue(name, label="outbound")
    with pytest.raises(Unavailable, match="UNKNOWN_TOPIC_OR_PART"):
        await queue.depth()
    assert (await queue.depth()).visible == 0


async def test_a_topic_that_we_may_not_make_is_left_to_brokers_that_make_what_is_asked_for(
    kafka: MockKafka, transport: KafkaTransport
) -> None:
    await transport.greet()
    transport._admin = admin = RefusesFirst(transport._admin, kafka, _TOPIC_AUTHORIZATION_FAILED)
    name = f"t-{secrets.token_hex(4)}"
    assert (await transport.queue(name, label="outbound").depth()).visible == 0
    assert admin.asked == [name + DEAD_LETTER_SUFFIX, name]


class RevokedMidway:
    """The library's consumer, of which a partition is revoked when its first record is taken and no other yet."""

    def __init__(self, record: Any) -> None:
        self._record, self._revoke = record, lambda _consumer, _partitions: None

    def subscribe(self, topics: list[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._revoke = on_revoke

    def assignment(self) -> list[Any]:
        return []

    def poll(self, seconds: float) -> Any:
        return self._record

    def consume(self, count: int, seconds: float) -> list[Any]:
        self._revoke(self, [confluent_kafka.TopicPartition(self._record.topic(), self._record.partition())])
        return []

    def close(self) -> None: ...


async def test_a_record_of_a_partition_that_goes_meanwhile_is_not_received(
    kafka: MockKafka, kafka_settings: Settings, producer: KafkaProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the ones before it, were the partition to come back, it would have them passed over."""
    topic = kafka.topic()
    await producer.send([Record(topic, b"1", partition=0)])
    (record,) = kafka.read(topic, count=1)
    monkeypatch.setattr(consumer, "open_client", lambda kind, config: RevokedMidway(record))
    lost: list[Partition] = []
    member = KafkaConsumer(consumer_config(kafka_settings, "g"), [topic], on_lost=lost.extend)
    await member.open()
    assert await member.receive(max_records=10, wait_seconds=0) == []
    assert lost == [Partition(topic, 0)]
    await member.close()


async def test_a_call_does_not_wait_for_the_receive_that_waits_for_records(
    kafka: MockKafka, kafka_settings: Settings, producer: KafkaProducer
) -> None:
    topic = kafka.topic(partitions=1)
    await producer.send([Record(topic, b"1")])
    members = Members(kafka_settings, [topic])
    consumer = await members.join()
    (record,) = await take(consumer, 1)
    receiving = asyncio.create_task(consumer.receive(max_records=1, wait_seconds=LIMIT_SECONDS))
    assert await consumer.commit([after(record)]) == []
    assert [one.offset for one in await consumer.committed([Partition(topic, 0)])] == [record.offset + 1]
    assert not receiving.done()
    await producer.send([Record(topic, b"2")])
    assert [one.value for one in await receiving] == [b"2"]
    await members.close()


async def test_a_consumer_that_is_closed_says_so(kafka: MockKafka, kafka_settings: Settings) -> None:
    topic = kafka.topic(partitions=1)
    consumer = await Members(kafka_settings, [topic]).join()
    await consumer.close()
    await consumer.close()  # once more changes nothing
    with pytest.raises(Unavailable, match="this consumer is closed"):
        await consumer.commit([Position(topic, 0, 1)])


async def test_what_is_paused_stays_until_it_is_resumed(
    kafka: MockKafka, kafka_settings: Settings, producer: KafkaProducer
) -> None:
    topic = kafka.topic(partitions=1)
    await producer.send([Record(topic, b"1")])
    members = Members(kafka_settings, [topic])
    consumer = await members.join()
    await take(consumer, 1)
    await consumer.pause()
    await producer.send([Record(topic, b"2")])
    assert await consumer.receive(max_records=10, wait_seconds=1) == []
    await consumer.resume()
    assert [record.value for record in await take(consumer, 1)] == [b"2"]
    await members.close()


async def test_a_consumer_whose_brokers_are_away_says_so() -> None:
    consumer = KafkaConsumer(consumer_config(load_settings(kafka_brokers="127.0.0.1:1"), "g"), ["t"])
    await consumer.open()
    with pytest.raises(Unavailable, match="Kafka gives no records"):
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                assert await consumer.receive(max_records=1, wait_seconds=0.1) == []
    await consumer.close()


async def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    producer = KafkaProducer(producer_config(load_settings(kafka_brokers="127.0.0.1:1")))
    with pytest.raises(SettingsError, match=r"pip install 'penstock\[kafka\]'"):
        await producer.send([Record("t", b"1")])


def test_passwords_are_handed_to_the_library_and_shown_nowhere() -> None:
    settings = load_settings(
        kafka_brokers="b:9093", kafka_security_protocol="sasl_ssl", kafka_sasl_username="me",
        kafka_sasl_password="hunter2",
    )  # fmt: skip
    assert producer_config(settings)["sasl.password"] == "hunter2"
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kafka_security_protocol": "sasl_ssl"}, "needs kafka_sasl_username and kafka_sasl_password"),
        ({"kafka_sasl_password": "secret"}, "kafka_sasl_password is not sent with plaintext"),
        ({"kafka_ssl_ca_file": __file__}, r"kafka_ssl_\* is not looked at with plaintext"),
        ({"kafka_security_protocol": "ssl", "kafka_ssl_key_file": __file__}, "go together"),
        ({"kafka_ssl_ca_file": "/nowhere"}, "no file that can be read"),
    ],
)
def test_settings_that_do_not_fit_together_are_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told) as raised:
        load_settings(**given)
    assert "secret" not in str(raised.value)


def test_no_brokers_is_told() -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_KAFKA_BROKERS is not set"):
        producer_config(load_settings())
