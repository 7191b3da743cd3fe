"""Schedules from topics into Postgres: what each record means, and that each counts once, also after a kill."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import confluent_kafka
import fastavro
import pytest

from penstock.api.rejected import retry_rejected
from penstock.brokers.kafka.messages import Received
from penstock.compat import delayed_records
from penstock.compat.topics.process import ClockworkFeed, Feed, ScheduleFeed, Source, SourceRecord
from penstock.compat.topics.schedules import Undecodable, read_json
from penstock.db.pool import Store
from penstock.local.postgres import EmbeddedPostgres
from penstock.protocol.errors import SettingsError, Unavailable
from penstock.runtime.loop import Loop
from penstock.settings.model import Settings, load_settings
from tests.forking import forked_commands
from tests.integration.roles import role_of
from tests.kafka import PROMPT, MockKafka

LIMIT_SECONDS = 60
FUTURE_MS = 4_000_000_000_000
EXPIRED = [("schedule:expired", b"true")]

FIELDS = [
    {"name": "time", "type": "long"},
    {"name": "topic", "type": "string"},
    {"name": "key", "type": "bytes"},
    {"name": "value", "type": ["null", "bytes"]},
    {"name": "headers", "type": {"type": "map", "values": "bytes"}},
]


def in_json(time_ms: int, *, value: bytes | None = b"v", headers: dict[str, bytes] | None = None, **more: Any) -> bytes:
    """A schedule as kafka-message-scheduler's clients write it."""

    def text(given: bytes) -> str:
        return base64.b64encode(given).decode()

    body: dict[str, Any] = {"time": time_ms, "topic": "target", "key": text(b"\xffk")}
    if value is not None:
        body["value"] = text(value)
    if headers is not None:
        body["headers"] = {name: text(one) for name, one in headers.items()}
    return json.dumps(body | more).encode()


def in_avro(
    time_ms: int, *, value: bytes | None = b"v", headers: dict[str, bytes] | None = None, fields: int = 5
) -> bytes:
    schema = fastavro.parse_schema({"type": "record", "name": f"Schedule{fields}", "fields": FIELDS[:fields]})
    into = io.BytesIO()
    record = {"time": time_ms, "topic": "target", "key": b"\xffk", "value": value, "headers": headers or {}}
    fastavro.schemaless_writer(into, schema, {field["name"]: record[field["name"]] for field in FIELDS[:fields]})
    return into.getvalue()


@pytest.fixture
def topics(kafka: MockKafka) -> dict[str, str]:
    return {"json": kafka.topic("json"), "avro": kafka.topic("avro", partitions=1)}


@pytest.fixture
def source_settings(kafka: MockKafka, database_url: str, topics: dict[str, str]) -> Settings:
    return load_settings(
        database_url=database_url,
        kafka_brokers=kafka.brokers,
        kafka_session_timeout_seconds=2,
        kafka_source_json_topics=topics["json"],
        kafka_source_avro_topics=topics["avro"],
        kafka_source_group=f"g-{secrets.token_hex(4)}",
    )


def is_caught_up(source: Source) -> bool:
    """Whether it owns partitions, and has read all of them to their ends."""
    return bool(source._states) and all(state.caught_up for state in source._states.values())


class Driver:
    """Runs sources as their process does, pass after pass, until something is so."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.opened: list[Source] = []

    async def open(self, settings: Settings, feed: Feed | None = None) -> Source:
        source = Source(name="kafka-source", store=self._store, feed=feed or ScheduleFeed(settings), settings=settings)
        source._consumer._config = dict(source._consumer._config) | PROMPT
        await source.open()
        self.opened.append(source)
        return source

    async def until(self, source: Source, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not (found := condition()) or (asyncio.iscoroutine(found) and not await found):
                try:
                    await source.run_once()
                except Unavailable:
                    await asyncio.sleep(0.05)

    async def catch_up(self, source: Source) -> None:
        """Until it has read all that there is."""
        await self.until(source, lambda: is_caught_up(source))


@pytest.fixture
async def driver(postgres: EmbeddedPostgres, database_url: str) -> AsyncIterator[Driver]:
    """Of sources that have the rights of their process and no others."""
    with role_of("kafka-source", postgres, database_url) as url:
        store = Store(url, application_name="penstock-test")
        driver = Driver(store)
        yield driver
        for source in driver.opened:
            await source.close()
        await store.close()


@pytest.fixture
async def fired(store: Store, sql: Any) -> Any:
    """Fires what is due; returns the payloads of all tasks so far, in their order."""

    async def fire() -> list[dict[str, Any]]:
        fired_now = 1
        while fired_now:
            async with store.transaction() as session:
                fired_now = await delayed_records.publish_due(session) or 0
            await sql.execute("delete from penstock.ordering_head")  # as if each had settled
        return [json.loads(row[0]) for row in await sql.fetch("select payload from penstock.task order by id")]

    return fire


async def armed(sql: Any) -> dict[bytes, tuple[str, bool]]:
    """Delayed records: by key the value that will be published, and whether it is held."""
    rows = await sql.fetch("select key, record, held from penstock.armed")
    return {row["key"]: (json.loads(row["record"]).get("value_base64"), row["held"]) for row in rows}


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


@pytest.mark.parametrize("form", ["json", "avro", "avro-without-headers"])
async def test_every_kind_of_record_does_what_the_contract_says(
    form: str, kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any, fired: Any
) -> None:
    topic = topics[form.partition("-")[0]]
    headers = None if form == "avro-without-headers" else {"h": b"\x00\x01"}

    def written(time_ms: int, value: bytes | None = b"v") -> bytes:
        if form == "json":
            return in_json(time_ms, value=value, headers=headers)
        return in_avro(time_ms, value=value, headers=headers, fields=4 if headers is None else 5)

    source = await driver.open(source_settings)
    await driver.catch_up(source)
    kafka.write(
        topic,
        (b"future", written(FUTURE_MS)),
        (b"past", written(1000)),
        (b"negative", written(-1)),
        (b"null", written(1000, None)),
        (b"replaced", written(1000, b"old")),
        (b"replaced", written(FUTURE_MS, b"new")),
        (b"cancelled", written(1000)),
        (b"cancelled", None),
        (b"unknown", None),
        (b"undecodable", written(FUTURE_MS)),
        (b"undecodable", b"\x00junk"),
        (b"far", written(2**63 - 1)),
        (b"last", written(FUTURE_MS, b"last")),
    )

    async def has_all() -> bool:
        total = await sql.fetchval("select sum(next_offset) from penstock.kafka_position where topic = $1", topic)
        return bool(total == 13)

    await driver.until(source, has_all)
    assert await armed(sql) == {
        b"future": (b64(b"v"), False),
        b"past": (b64(b"v"), False),
        b"negative": (b64(b"v"), False),
        b"null": (None, False),
        b"replaced": (b64(b"new"), False),
        b"far": (b64(b"v"), False),
        b"last": (b64(b"last"), False),
    }
    payloads = {base64.b64decode(one["then"][0]["key_base64"]): one for one in await fired()}
    assert payloads.keys() == {b"past", b"negative", b"null"}
    sent = {
        "topic": "target", "key_base64": b64(b"\xffk"), "due_at": 1000, "value_base64": b64(b"v"),
    } | ({} if headers is None else {"headers_base64": {"h": b64(b"\x00\x01")}})  # fmt: skip
    assert payloads[b"past"]["records"] == [sent]
    tombstone = payloads[b"past"]["then"][0]
    assert tombstone.pop("partition") in range(4)
    assert tombstone == {
        "topic": topic, "key_base64": b64(b"past"), "value": None, "headers": {"schedule:expired": "true"},
    }  # fmt: skip
    assert payloads[b"null"]["records"][0]["value"] is None
    assert "value_base64" not in payloads[b"null"]["records"][0]


@pytest.mark.parametrize(
    "value",
    [in_json(1, key="YQ="),
     b"", b"{}", b"[]", b"null", b"\xff", b'{"time":"1","topic":"t","key":"aw=="}', in_json(1, key="not base64!"),
     in_json(1, value=None) + b" {", in_json(2**63), in_json(1, topic="no topic"), in_json(1, topic="__own"),
     in_json(1, headers=None, topic=""), b"[" * 100_000],
    ids=["half-padded",
         "empty", "object", "array", "null", "no-utf8", "time-is-text", "no-base64", "two", "large-time", "bad-topic",
         "own-topic", "no-topic", "deep"],
)  # fmt: skip
@pytest.mark.parametrize("on_undecodable", ["cancel", "keep"])
async def test_what_cannot_be_read_cancels_unless_told_otherwise_and_stops_nothing(
    value: bytes, on_undecodable: str, topics: dict[str, str], source_settings: Settings, store: Store, sql: Any
) -> None:  # fmt: skip
    """Through the feed alone, whose records a consumer would bring."""
    feed = ScheduleFeed(
        load_settings(
            **source_settings.model_dump(exclude_unset=True) | {"kafka_source_on_undecodable": on_undecodable}
        )
    )

    def taken(key: bytes, body: bytes) -> SourceRecord:
        return SourceRecord(Received(topics["json"], 0, 0, key, body, (), None), behind=False, is_first_read=False)

    async with store.transaction() as session:
        await feed.store(session, [taken(b"a", in_json(FUTURE_MS)), taken(b"b", in_json(FUTURE_MS))])
    async with store.transaction() as session:
        await feed.store(session, [taken(b"a", value), taken(b"c", in_json(FUTURE_MS))])
    assert set(await armed(sql)) == ({b"b", b"c"} if on_undecodable == "cancel" else {b"a", b"b", b"c"})


async def test_a_schedule_over_the_limit_is_rejected_and_cancels_nothing(
    topics: dict[str, str], source_settings: Settings, store: Store, sql: Any
) -> None:
    feed = ScheduleFeed(source_settings)
    large = in_json(1, value=b"x" * 300_000)
    for value in (in_json(FUTURE_MS), large):
        async with store.transaction() as session:
            await feed.store(
                session, [SourceRecord(Received(topics["json"], 3, 17, b"a", value, (), None), False, False)]
            )
    assert set(await armed(sql)) == {b"a"}
    (row,) = await sql.fetch("select id, source, body, reason from penstock.rejected")
    assert (row["source"], bytes(row["body"])) == ("kafka-source", large)
    assert f"schedule 'a' of {topics['json']}/3 at offset 17" in row["reason"]
    assert "PENSTOCK_PAYLOAD_LIMIT_BYTES" in row["reason"]
    replayed = await retry_rejected(store, [row["id"]], source_settings)
    assert [(one.id, "publish a corrected record" in one.reason) for one in replayed.still_rejected] == [
        (row["id"], True)
    ]
    assert await sql.fetchval("select count(*) from penstock.rejected") == 1


def test_base64_needs_no_padding() -> None:
    for size in range(1, 7):
        given = in_json(5, key=b64(bytes(range(size))).rstrip("="), value=None)
        assert read_json(given).key == bytes(range(size))
    for wrong in ("YQ=", "YWJj=", "Y", "YQ==YQ==", "Y Q=="):
        with pytest.raises(Undecodable):
            read_json(in_json(5, key=wrong, value=None))


async def test_nothing_fires_of_what_a_later_record_takes_back_before_the_topic_was_read(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any, fired: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By a small receive, so that what is past is stored and held long before its cancel is read."""
    monkeypatch.setattr("penstock.compat.topics.process.RECORDS_AT_ONCE", 2)
    past = [(b"%d" % n, in_json(1000)) for n in range(20)]
    kafka.write(topics["json"], *past, (b"due", in_json(1000)))
    kafka.write(topics["json"], *((key, None) for key, _ in past[:10]))
    kafka.write(topics["json"], *((key, None) for key, _ in past[10:]), headers=[("Schedule:Expired", b"TRUE")])
    source = await driver.open(source_settings)

    async def has_some() -> bool:
        return bool(await sql.fetchval("select count(*) from penstock.armed"))

    await driver.until(source, has_some)
    assert await fired() == []
    await driver.catch_up(source)
    assert set(await armed(sql)) == {b"due"}
    assert [base64.b64decode(one["then"][0]["key_base64"]) for one in await fired()] == [b"due"]


async def test_the_mark_of_a_fired_schedule_takes_back_nothing_that_was_armed_since(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any
) -> None:
    source = await driver.open(source_settings)
    await driver.catch_up(source)
    kafka.write(topics["avro"], (b"a", in_avro(FUTURE_MS)))
    kafka.write(topics["avro"], (b"a", None), headers=EXPIRED)
    kafka.write(topics["avro"], (b"b", in_avro(FUTURE_MS)))

    async def has_b() -> bool:
        return b"b" in await armed(sql)

    await driver.until(source, has_b)
    assert set(await armed(sql)) == {b"a", b"b"}


async def test_a_source_that_begins_anew_goes_on_where_the_last_one_was_and_fires_nothing_twice(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, fired: Any
) -> None:
    """The second one is given the partitions while the group knows no positions: those in Postgres count."""
    kafka.write(topics["json"], *((b"%d" % n, in_json(1000)) for n in range(30)))
    first = await driver.open(source_settings)
    await driver.catch_up(first)
    assert len(await fired()) == 30
    driver.opened.remove(first)
    for state in first._states.values():
        state.is_committed = True  # as after a kill: nothing more is committed to Kafka
    await first.close()
    second = await driver.open(source_settings)
    await driver.catch_up(second)
    kafka.write(topics["json"], (b"new", in_json(1000)))
    seen: list[Any] = []

    async def has_new() -> bool:
        seen[:] = await fired()
        return len(seen) > 30

    await driver.until(second, has_new)
    assert len(seen) == 31


async def test_records_whose_storing_failed_are_read_again(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any
) -> None:
    feed = ScheduleFeed(source_settings)
    store_well, failures = feed.store, iter([True, True])

    async def store_badly(session: Any, taken: Any) -> None:
        await store_well(session, taken)
        if next(failures, False):
            raise Unavailable("as if Postgres were unavailable")

    feed.store = store_badly  # type: ignore[method-assign]
    source = await driver.open(source_settings, feed)
    await driver.catch_up(source)
    kafka.write(topics["json"], *((b"%d" % n, in_json(FUTURE_MS)) for n in range(20)))

    async def has_all() -> bool:
        return len(await armed(sql)) == 20

    await driver.until(source, has_all)


async def test_two_that_believe_a_partition_to_be_theirs_store_each_record_once(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any, fired: Any
) -> None:
    """Two groups of Kafka's with the positions of one: each reads everything, as a zombie and its successor would."""
    first = await driver.open(source_settings)
    second = Source(
        name="kafka-source", store=first._store, feed=ScheduleFeed(source_settings),
        settings=load_settings(**source_settings.model_dump(exclude_unset=True)),
    )  # fmt: skip
    second._consumer._config = dict(second._consumer._config) | PROMPT | {"group.id": f"g-{secrets.token_hex(4)}"}
    await second.open()
    driver.opened.append(second)
    kafka.write(topics["json"], *((b"%d" % n, in_json(1000)) for n in range(300)))
    seen: Counter[bytes] = Counter()
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(seen) < 300 or not (is_caught_up(first) and is_caught_up(second)):
            for source in (first, second):
                try:
                    await source.run_once()
                except Unavailable:
                    await asyncio.sleep(0.05)
            seen = Counter(base64.b64decode(one["then"][0]["key_base64"]) for one in await fired())
    assert set(seen.values()) == {1}


async def test_instances_that_are_killed_leave_their_partitions_to_the_others_and_nothing_is_lost_or_doubled(
    kafka: MockKafka, source_settings: Settings, topics: dict[str, str], fired: Any
) -> None:
    """Three processes, of which two are killed in the midst of it, the second while it reads what the first left."""
    total = 3000
    environ = os.environ | {
        "PENSTOCK_DATABASE_URL": source_settings.require_database_url,
        "KAFKA_BROKERS": kafka.brokers,
        "SCHEDULE_TOPICS": topics["avro"],
        "JSON_SCHEDULE_TOPICS": topics["json"],
        "CONSUMER_GROUP_ID": source_settings.kafka_source_group,
        "PENSTOCK_KAFKA_SESSION_TIMEOUT_SECONDS": "2",
        "PENSTOCK_METRICS_PORT": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with forked_commands():
        processes = [
            subprocess.Popen([sys.executable, "-m", "penstock", "kafka-source"], env=environ, stderr=subprocess.DEVNULL)
            for _ in range(3)
        ]
    seen: Counter[bytes] = Counter()

    async def look() -> int:
        seen.clear()
        seen.update(base64.b64decode(one["then"][0]["key_base64"]) for one in await fired())
        return len(seen)

    async def wait_for(count: int) -> None:
        deadline = time.monotonic() + 2 * LIMIT_SECONDS
        while await look() < count:
            assert time.monotonic() < deadline, f"{len(seen)} of {count}"
            await asyncio.sleep(0.1)

    try:
        for part in range(3):
            begin = part * total // 3
            await asyncio.to_thread(
                kafka.write, topics["json"],
                *((b"%d" % n, in_json(1000)) for n in range(begin, begin + total // 3)),
            )  # fmt: skip
            if part < 2:
                await wait_for(begin + 1)
                processes[part].send_signal(signal.SIGKILL)
        await wait_for(total)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert set(seen.values()) == {1}
    assert len(seen) == total


async def test_a_topic_that_was_made_anew_is_read_from_its_start(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any
) -> None:
    for partition in range(4):
        await sql.execute(
            "insert into penstock.kafka_position values ($1, $2, $3, 1000, true)",
            source_settings.kafka_source_group, topics["json"], partition,
        )  # fmt: skip
    kafka.write(topics["json"], (b"a", in_json(FUTURE_MS)), (b"published before", in_json(1000)))
    kafka.write(topics["json"], (b"published before", None), headers=EXPIRED)
    await driver.catch_up(await driver.open(source_settings))
    assert set(await armed(sql)) == {b"a"}
    assert await sql.fetchval("select bool_and(complete) from penstock.kafka_position")


async def test_a_topic_that_is_made_anew_while_it_is_read_is_read_from_its_start(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any
) -> None:
    """As the source sees it: records come again from the first offset on, since there is none where it was."""
    source = await driver.open(source_settings)
    await driver.catch_up(source)
    await sql.execute("update penstock.kafka_position set next_offset = 1000 where topic = $1", topics["json"])
    for partition, state in source._states.items():
        state.next = 1000 if partition.topic == topics["json"] else state.next
    kafka.write(topics["json"], (b"a", in_json(FUTURE_MS)))

    async def has_it() -> bool:
        return set(await armed(sql)) == {b"a"} and is_caught_up(source)

    await driver.until(source, has_it)


async def test_a_source_that_was_overtaken_without_a_record_behind_catches_up_all_the_same(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any
) -> None:
    kafka.write(topics["avro"], (b"a", in_avro(FUTURE_MS)))
    source = await driver.open(source_settings)
    await driver.until(source, lambda: source._states)
    await sql.execute("update penstock.kafka_position set next_offset = 1 where topic = $1", topics["avro"])
    for partition, state in source._states.items():
        state.next = 0 if partition.topic == topics["avro"] else state.next
        state.is_at_end = state.is_aligned = True
    await driver.catch_up(source)


async def test_the_same_key_in_two_topics_is_two_schedules(
    kafka: MockKafka, topics: dict[str, str], source_settings: Settings, driver: Driver, sql: Any
) -> None:
    kafka.write(topics["json"], (b"a", in_json(FUTURE_MS)))
    kafka.write(topics["avro"], (b"a", in_avro(FUTURE_MS)))
    await driver.catch_up(await driver.open(source_settings))
    assert await sql.fetchval("select count(*) from penstock.armed where key = 'a'") == 2


async def test_the_process_starts_without_postgres_positions_or_brokers_and_stops_when_told(
    source_settings: Settings, store: Store, driver: Driver
) -> None:
    away = load_settings(**source_settings.model_dump(exclude_unset=True) | {"kafka_brokers": "127.0.0.1:1"})
    source = Source(name="kafka-source", store=store, feed=ScheduleFeed(away), settings=away)
    loop = Loop(source, passes=1, grace_seconds=5)
    running = asyncio.create_task(loop.run())
    await asyncio.sleep(0.2)
    loop.stop()
    assert await asyncio.wait_for(running, LIMIT_SECONDS) == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "no topics to read schedules from: set PENSTOCK_KAFKA_SOURCE_JSON_TOPICS"),
        ({"kafka_source_json_topics": "a,b", "kafka_source_avro_topics": "b"}, "b is given as a topic of JSON and of"),
        ({"kafka_source_json_topics": "a", "kafka_publish_topics": "orders"}, "tombstones .*'a' is not among PENSTOCK"),
        ({"kafka_source_avro_topics": "__a"}, "tombstones .*is one of Kafka's own"),
    ],
    ids=["none", "both", "not-allowed", "kafkas-own"],
)  # fmt: skip
def test_topics_that_cannot_be_are_told(given: dict[str, str], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        ScheduleFeed(load_settings(**given))


# clockwork's create topic


def request(key: str, **more: Any) -> bytes:
    body = {
        "clientId": "c", "scheduleKey": key, "orderingKey": "o", "taskData": f"data of {key}",
        "delivery": {"topic": "out"}, "scheduleTime": FUTURE_MS,
    }  # fmt: skip
    return json.dumps(body | more).encode()


@pytest.fixture
def clockwork_settings(kafka: MockKafka, database_url: str) -> Settings:
    return load_settings(
        database_url=database_url, kafka_brokers=kafka.brokers, kafka_session_timeout_seconds=2,
        clockwork_create_topic=kafka.topic("create", partitions=1), clockwork_group=f"g-{secrets.token_hex(4)}",
    )  # fmt: skip


async def test_the_create_topic_is_a_second_door_and_what_it_cannot_take_stops_nothing(
    kafka: MockKafka, clockwork_settings: Settings, driver: Driver, sql: Any
) -> None:
    source = await driver.open(clockwork_settings, ClockworkFeed(clockwork_settings))
    kafka.write(
        clockwork_settings.clockwork_create_topic,
        (b"o", request("1")), (b"o", request("1")), (b"o", b"{"), (b"o", None), (b"o", request("2", delivery=None)),
        (b"o", request("3", delivery={"topic": "no topic"})), (b"o", request("4", taskData="\0")), (b"o", request("5")),
    )  # fmt: skip
    await driver.catch_up(source)
    rows = await sql.fetch("select record from penstock.armed order by id")
    assert [json.loads(row[0]).get("value") for row in rows] == ["data of 1", None, "data of 5"]


def commit(kafka: MockKafka, group: str, topic: str, offset: int) -> None:
    """As clockwork itself did."""
    theirs = confluent_kafka.Consumer({"bootstrap.servers": kafka.brokers, "group.id": group})
    theirs.commit(offsets=[confluent_kafka.TopicPartition(topic, 0, offset)], asynchronous=False)
    theirs.close()


async def test_the_create_topic_is_read_from_where_clockworks_own_group_was(
    kafka: MockKafka, clockwork_settings: Settings, driver: Driver, sql: Any
) -> None:
    topic = clockwork_settings.clockwork_create_topic
    kafka.write(topic, *((b"o", request(str(n))) for n in range(5)))
    commit(kafka, clockwork_settings.clockwork_group, topic, 3)
    await driver.catch_up(await driver.open(clockwork_settings, ClockworkFeed(clockwork_settings)))
    rows = await sql.fetch("select record from penstock.armed order by id")
    assert [json.loads(row[0])["value"] for row in rows] == ["data of 3", "data of 4"]


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_create_topic_that_ends_before_the_offset_of_its_group_is_read_from_its_start(
    is_known: bool, kafka: MockKafka, clockwork_settings: Settings, driver: Driver, sql: Any
) -> None:
    topic, group = clockwork_settings.clockwork_create_topic, clockwork_settings.clockwork_group
    kafka.write(topic, *((b"o", request(str(n))) for n in range(2)))
    commit(kafka, group, topic, 1000)
    if is_known:
        await sql.execute("insert into penstock.kafka_position values ($1, $2, 0, 1000, true)", group, topic)
    await driver.catch_up(await driver.open(clockwork_settings, ClockworkFeed(clockwork_settings)))
    rows = await sql.fetch("select record from penstock.armed order by id")
    assert [json.loads(row[0])["value"] for row in rows] == ["data of 0", "data of 1"]
