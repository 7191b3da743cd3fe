"""Messages of Kafka that others than Penstock wrote."""

from __future__ import annotations

from dataclasses import replace

from penstock.brokers.base import MESSAGE_ID
from penstock.brokers.kafka.messages import Received

FIRST = Received(
    topic="penstock-inbound", partition=0, offset=0, key=None, value=b"{}", headers=[], timestamp_ms=1_700_000_000_000
)


def test_a_record_of_a_topic_that_was_made_again_is_another_message() -> None:
    again = replace(FIRST, timestamp_ms=1_700_000_100_000)
    first, second = FIRST.message("r", 0), again.message("r", 0)
    assert first.id != second.id
    assert MESSAGE_ID.fullmatch(first.id)
    assert MESSAGE_ID.fullmatch(replace(FIRST, timestamp_ms=None, offset=2**63 - 1).message("r", 0).id)


def test_a_record_keeps_its_id_when_it_is_read_or_written_again() -> None:
    written = FIRST.again("penstock-inbound", 1)
    rewritten = replace(FIRST, offset=7, timestamp_ms=1_700_000_200_000, headers=list(written.headers))
    assert FIRST.message("r", 0).id == FIRST.message("s", 1).id == rewritten.message("t", 0).id
