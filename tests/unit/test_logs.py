from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from penstock.logs import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _logging_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_line_is_an_event_with_fields_after_time_level_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("scheduler")
    get_logger().info("dispatched", tasks=3, drained=False, reason=None, text='say "a b"')
    (line,) = lines(capsys)
    stamp, rest = line.split(" ", 1)
    assert stamp.startswith("timestamp=2")
    assert stamp.endswith("Z")
    assert rest == r'level=info event=dispatched process=scheduler tasks=3 drained=false reason= text="say \"a b\""'


def test_lines_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("scheduler", level="warning")
    get_logger().info("quiet")
    get_logger().warning("loud")
    (line,) = lines(capsys)
    assert "event=loud" in line


@pytest.mark.parametrize("form", ["logfmt", "json"])
@pytest.mark.parametrize(
    "value", ["two\nlines", "carriage\rreturn", "\x0b\x0c\x1c\x85\u2028\u2029", "half \ud800 pair", "nul\0"]
)
def test_a_line_stays_a_line_whatever_a_value_holds(capsys: pytest.CaptureFixture[str], form: str, value: str) -> None:
    setup_logging("worker", form=form)
    get_logger().info("seen", value=value, after="here")
    (line,) = lines(capsys)
    assert "here" in line


def test_a_field_cannot_be_forged_by_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    get_logger().info("seen", value='x" level=error event=forged y="')
    (line,) = lines(capsys)
    assert r'value="x\" level=error event=forged y=\""' in line


def test_json_lines_are_objects_and_take_any_value(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker", form="json")
    get_logger().info("seen", value={1}, text='"')
    (line,) = lines(capsys)
    entry = json.loads(line)
    assert (entry["event"], entry["process"], entry["level"], entry["value"]) == ("seen", "worker", "info", "{1}")


def test_a_traceback_is_one_field_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger().exception("pass_failed", error="ValueError")
    (line,) = lines(capsys)
    assert "event=pass_failed" in line
    assert "Traceback (most recent call last)" in line
    assert "ValueError: boom" in line


def test_lines_of_libraries_come_the_same_way_from_warning_on(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker", level="debug")
    library = logging.getLogger("some.library")
    library.info("chatter")
    try:
        raise OSError("gone")
    except OSError:
        library.exception("lost %s", "connection")
    (line,) = lines(capsys)
    assert "event=library_log" in line
    assert "message=\"lost connection\" exception=OSError('gone')" in line
    assert "logger=some.library" in line
    assert "level=error" in line


def test_setting_up_twice_doubles_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    setup_logging("worker")
    logging.getLogger("some.library").warning("once")
    assert len(lines(capsys)) == 1


def test_lines_written_inside_a_span_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    setup_logging("worker")
    with TracerProvider().get_tracer("app").start_as_current_span("work") as span:
        get_logger().info("inside")
    get_logger().info("outside")
    inside, outside = lines(capsys)
    context = span.get_span_context()
    assert inside.endswith(f"trace_id={context.trace_id:032x} span_id={context.span_id:016x}")
    assert "trace_id" not in outside
