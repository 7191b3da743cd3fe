"""Messages that a commit leaves."""

from __future__ import annotations

from penstock.brokers.base import Message
from penstock.protocol.errors import Locked, TooSlow
from penstock.tasks.consumer import Uncommitted


def test_a_message_waits_in_one_place_although_its_reports_fail_in_two_ways() -> None:
    message = Message("m", "r", "[]", 1, None, {})
    for errors in ((Locked("a row"), TooSlow("a statement")), (TooSlow("a statement"), Locked("a row"))):
        left = Uncommitted()
        for error in errors:
            left.add(message, error)
        assert [*left.locked, *left.slow] == [message]
