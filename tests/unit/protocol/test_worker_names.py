"""Names that workers go by."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.errors import SettingsError
from penstock.protocol.message_attributes import WORKER_ATTRIBUTE, WORKER_NAME_MAX_CHARS, check_worker_name, worker_of
from penstock.protocol.reports import (
    Failed,
    Progress,
    RunTimes,
    Succeeded,
    Unreadable,
    Waiting,
    decode_reports,
    encode_error,
    encode_notification,
    encode_progress,
    encode_result,
)
from penstock.protocol.requests import join_batch
from penstock.settings.model import load_settings
from penstock.worker.result_sender import name_of_process


@pytest.mark.parametrize("name", ["a", "web-1:4711", "two words", "x" * WORKER_NAME_MAX_CHARS])
def test_a_name_is_taken_as_it_is(name: str) -> None:
    assert check_worker_name(name) == worker_of({WORKER_ATTRIBUTE: name}) == name
    assert load_settings(worker_name=name).worker_name == name


@pytest.mark.parametrize("name", [" a", "a ", "a\n", "a\0b", "\u00e4", "\ud800", "x" * (WORKER_NAME_MAX_CHARS + 1)])
def test_what_can_be_no_name_is_an_error_in_settings_and_ignored_in_a_message(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 100 printable ASCII characters"):
        check_worker_name(name)
    with pytest.raises(SettingsError, match="PENSTOCK_WORKER_NAME"):
        load_settings(worker_name=name)
    assert worker_of({WORKER_ATTRIBUTE: name}) is None


def test_an_empty_name_is_none() -> None:
    assert load_settings(worker_name="").worker_name is None
    assert worker_of({WORKER_ATTRIBUTE: ""}) is None
    assert worker_of({}) is None


@given(st.text())
def test_whatever_a_message_says_is_a_name_or_ignored(text: str) -> None:
    told = worker_of({WORKER_ATTRIBUTE: text})
    assert told is None or check_worker_name(told) == text


def test_a_process_is_named_by_its_machine_and_number() -> None:
    name = name_of_process()
    assert check_worker_name(name).endswith(f":{os.getpid()}")


@pytest.mark.parametrize("room", [0, 1], ids=["alone", "in a batch"])
def test_every_report_of_a_message_carries_its_sender(room: int) -> None:
    for text, kind in [
        (encode_result("1:2", "3"), Succeeded),
        (encode_result("1:2", "3", ['{"action":"b"}']), Succeeded),
        (encode_error("1:2", -1, "no", {}), Failed),
        (encode_progress("1:2"), Progress),
        (encode_notification("wait", id="1:2", token="t", timeout=1), Waiting),
        (encode_notification("wait", id="1:2", token="", timeout=1), Failed),
    ]:
        body = join_batch([text] * (room + 1))
        for worker in (None, "one:7"):
            reports = decode_reports(body, batch_limit=10, worker=worker)
            assert [(type(one), getattr(one, "worker", "?")) for one in reports] == [(kind, worker)] * (room + 1)


def test_what_is_of_no_task_is_read_as_before() -> None:
    told, junk = decode_reports(
        join_batch([encode_notification("run_times", actions={"a": (1, 1.0)}), "[]"]), batch_limit=10, worker="w"
    )
    assert (type(told), type(junk)) == (RunTimes, Unreadable)
