from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.brokers.kafka.group_reader import Progress
from penstock.protocol.errors import SettingsError
from penstock.settings.broker_urls import parse_broker_url
from penstock.settings.model import load_settings


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "shown"),
    [
        ("sqs://", "sqs", (), "sqs://"),
        ("amqp://guest:pw@mq", "amqp", ("mq:5672",), "amqp://mq:5672"),
        ("amqps://u:p%40w@mq/v%2Fh?heartbeat=5", "amqp", ("mq:5671",), "amqps://mq:5671/v%2Fh"),
        ("amqp://[::1]:5673/", "amqp", ("[::1]:5673",), "amqp://[::1]:5673/"),
        ("kafka://a,b:9093", "kafka", ("a:9092", "b:9093"), "kafka://a:9092,b:9093"),
    ],
)
def test_a_url_is_taken_apart_and_shown_without_secrets(
    url: str, kind: str, hosts: tuple[str, ...], shown: str
) -> None:
    broker = parse_broker_url(url)
    assert (broker.kind, broker.hosts, broker.shown) == (kind, hosts, shown)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://x", "must begin with sqs://"),
        ("rabbit", "must begin with sqs://"),
        ("sqs://eu-central-1", "PENSTOCK_SQS_ENDPOINT_URL"),
        ("amqp://", "amqp://user:password@host:port/vhost"),
        ("amqp://u:s3cr3t@x@y", "%40"),
        ("amqp://u:s3cr3t/x@host/", "%2F"),
        ("amqp://u:s3cr3t@host:port/", "%3A"),
        ("amqp://a:1,b:2/", "amqp://user:password@host:port/vhost"),
        ("kafka://", "kafka://host:port,host:port"),
        ("kafka://u:s3cr3t@host:9092", "PENSTOCK_KAFKA_"),
        ("kafka://host:9092?x=y", "PENSTOCK_KAFKA_"),
    ],
)
def test_what_is_no_url_of_a_broker_is_told_without_its_secrets(url: str, said: str) -> None:
    with pytest.raises(SettingsError) as told:
        load_settings(transport_url=url)
    assert said in str(told.value)
    assert "PENSTOCK_TRANSPORT_URL" in str(told.value)
    assert "s3cr3t" not in str(told.value)


def test_errors_of_libraries_are_scrubbed() -> None:
    broker = parse_broker_url("amqp://u:p%40w0rd@mq/?password=other")
    assert broker.scrub("no way to u:p%40w0rd@mq with p@w0rd or other") == "no way to u:***@mq with *** or ***"


def test_a_url_of_sqs_is_no_name_of_another_brokers_queue() -> None:
    with pytest.raises(SettingsError, match=r"inbound_queue .* is a URL of SQS"):
        load_settings(transport_url="amqp://mq", inbound_queue="https://sqs.eu-central-1.amazonaws.com/1/x")


def test_settings_show_nothing_of_the_url() -> None:
    assert "s3cr3t" not in repr(load_settings(transport_url="amqp://u:s3cr3t@mq"))


# What may be committed of a partition


@given(st.permutations(range(12)), st.integers(0, 12))
def test_what_is_committed_stands_behind_what_is_all_done(order: list[int], done: int) -> None:
    progress = Progress(100)
    for offset in range(100, 112):
        progress.hand_out(offset)
    finished = {100 + number for number in order[:done]}
    for offset in finished:
        progress.finish(offset)
    expected = next((offset for offset in range(100, 112) if offset not in finished), 112)
    assert progress.position == expected


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=8))
def test_deliveries_are_counted_over_lives_by_the_note_alone(lives: list[tuple[int, int]]) -> None:
    """Each life hands out so many records from where the last one stood, finishes so many of the first, and dies."""
    position, note = 0, ""
    handed: dict[int, int] = {}
    for count, done in lives:
        progress = Progress(position, note)
        for offset in range(position, position + count):
            assert progress.hand_out(offset) == handed.get(offset, 0)
            handed[offset] = handed.get(offset, 0) + 1
        for offset in range(position, position + min(done, count)):
            progress.finish(offset)
        if count:
            assert progress.position is not None
            position, note = progress.position, progress.note


@pytest.mark.parametrize("note", ["", "x", "1:2:3", "a:b", "1", ":"])
def test_a_note_of_somebody_else_counts_nothing(note: str) -> None:
    assert Progress(5, note).hand_out(5) == 0
