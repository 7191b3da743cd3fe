from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import logging.config
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from penstock.runtime.logs import TaskLogFilter, bind_task, log, setup_logging, setup_root


@pytest.fixture(autouse=True)
def _logging_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.disabled = False  # which dictConfig has set
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def set_up(process: str, *, level: str) -> None:
    """As a worker does whose application has set up nothing itself."""
    logging.getLogger().handlers.clear()  # those of pytest
    setup_logging(process, level=level)
    setup_root(process, level=level)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_line_is_an_event_with_fields_after_time_level_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("scheduler")
    log.info("dispatched", tasks=3, drained=False, reason=None, text='say "a b"')
    (line,) = lines(capsys)
    stamp, rest = line.split(" ", 1)
    assert stamp.startswith("timestamp=2")
    assert stamp.endswith("Z")
    assert rest == r'level=info event=dispatched process=scheduler tasks=3 drained=false reason= text="say \"a b\""'


def test_lines_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("scheduler", level="warning")
    log.info("quiet")
    log.warning("loud")
    (line,) = lines(capsys)
    assert "event=loud" in line


@pytest.mark.parametrize("form", ["logfmt", "json"])
@pytest.mark.parametrize(
    "value", ["two\nlines", "carriage\rreturn", "\x0b\x0c\x1c\x85\u2028\u2029", "half \ud800 pair", "nul\0"]
)
def test_a_line_stays_a_line_whatever_a_value_holds(capsys: pytest.CaptureFixture[str], form: str, value: str) -> None:
    setup_logging("worker", form=form)
    log.info("seen", value=value, after="here")
    (line,) = lines(capsys)
    assert "here" in line


def test_a_field_cannot_be_forged_by_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    log.info("seen", value='x" level=error event=forged y="')
    (line,) = lines(capsys)
    assert r'value="x\" level=error event=forged y=\""' in line


def test_json_lines_are_objects_and_take_any_value(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker", form="json")
    log.info("seen", value={1}, text='"\x7f\x1b\n')
    (line,) = lines(capsys)
    entry = json.loads(line)
    assert "\x7f" not in line
    assert entry["text"] == '"\x7f\x1b\n'
    assert (entry["event"], entry["process"], entry["level"], entry["value"]) == ("seen", "worker", "info", "{1}")


class _Wordless:
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("form", ["logfmt", "json"])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"two words": 7}, {"logfmt": "two_words=7", "json": '"two words": 7'}),
        ({"counts": {(1, 2): 3}}, {"logfmt": 'counts="{(1, 2): 3}"', "json": '"counts": "{(1, 2): 3}"'}),
        ({"mean": float("nan")}, {"logfmt": "mean=nan", "json": '"mean": "nan"'}),
        (
            {"value": _Wordless()},
            {
                "logfmt": 'value="_Wordless without a text: ZeroDivisionError"',
                "json": '"value": "_Wordless without a text: ZeroDivisionError"',
            },
        ),
        ({"digits": 10**5000}, dict.fromkeys(("logfmt", "json"), "int without a text: ValueError")),
    ],
)
def test_no_field_loses_its_line(
    capsys: pytest.CaptureFixture[str], form: str, fields: dict[str, Any], shown: dict[str, str]
) -> None:
    setup_logging("worker", form=form)
    log.info("seen", **fields, after="here")
    (line,) = lines(capsys)
    assert shown[form] in line
    assert "here" in line


def test_a_traceback_is_one_field_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("pass_failed", error="ValueError")
    (line,) = lines(capsys)
    assert "event=pass_failed" in line
    assert "Traceback (most recent call last)" in line
    assert "ValueError: boom" in line


def test_lines_of_other_loggers_are_written_with_their_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker", level="info")
    logger = logging.getLogger("myapp.tasks")
    logger.debug("chatter")
    logger.info("sent %s", "mail", extra={"to": "a@example.org"})
    try:
        raise OSError("gone")
    except OSError:
        logger.exception("lost connection")
    structlog.get_logger("myapp").info("by_structlog", n=1)
    sent, lost, other = lines(capsys)
    assert 'level=info event=log process=worker logger=myapp.tasks message="sent mail" to=a@example.org' in sent
    assert (
        'level=error event=log process=worker logger=myapp.tasks message="lost connection" traceback="Traceback' in lost
    )
    assert "OSError: gone" in lost
    assert "level=info event=by_structlog process=worker n=1" in other


def test_libraries_of_ours_are_heard_from_warning_on(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker", level="debug")
    logging.getLogger("botocore.auth").debug("the signature")
    logging.getLogger("botocore.auth").warning("the clock is wrong")
    (line,) = lines(capsys)
    assert "the clock is wrong" in line


def test_the_driver_does_not_say_again_that_postgres_is_unavailable(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker", level="debug")
    logging.getLogger("asyncpg.pool").warning("Failed to restore the pool connection floor; retrying")
    logging.getLogger("asyncpg.pool").error("an error")
    (line,) = lines(capsys)
    assert "an error" in line


def test_what_the_application_has_set_up_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("worker")
    logging.config.dictConfig(
        {
            "version": 1,
            "filters": {"task": {"()": "penstock.TaskLogFilter"}},
            "formatters": {"mine": {"format": "mine %(levelname)s %(message)s task=%(task_id)s"}},
            "handlers": {"err": {"class": "logging.StreamHandler", "formatter": "mine", "filters": ["task"]}},
            "root": {"level": "DEBUG", "handlers": ["err"]},
        }
    )
    setup_root("worker", level="info")

    def task() -> None:
        bind_task(7, 2, "resize")
        logging.getLogger("theirs").debug("hello")
        log.info("ours", n=1)

    contextvars.copy_context().run(task)
    mine, ours = lines(capsys)
    assert mine == "mine DEBUG hello task=7"
    assert "level=info event=ours process=worker n=1 task_id=7 claim=2 action=resize" in ours


def test_a_filter_keeps_what_the_application_says_itself() -> None:
    record = logging.makeLogRecord({"task_id": "theirs"})
    assert TaskLogFilter().filter(record)
    assert (record.task_id, record.claim) == ("theirs", None)  # type: ignore[attr-defined]


async def test_every_line_names_the_task_it_is_logged_for_in_threads_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("worker", level="info")

    async def one(task_id: int) -> None:
        bind_task(task_id, 1, "resize")
        await asyncio.sleep(0)
        await asyncio.to_thread(logging.getLogger("myapp").info, "in a thread")

    await asyncio.gather(one(1), one(2))
    logging.getLogger("myapp").info("of no task")
    *named, none = lines(capsys)
    assert sorted(line.partition("task_id=")[2] for line in named) == [f"{n} claim=1 action=resize" for n in (1, 2)]
    assert "task_id" not in none


def test_a_line_of_ours_is_text_for_handlers_of_others() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(handler)
    log.error("queue_lost", queue="inbound", reason="away")
    assert [record.getMessage() for record in records] == ["queue_lost queue=inbound reason=away"]


def test_setting_up_twice_doubles_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        set_up("worker", level="info")
    logging.getLogger("some.library").warning("once")
    log.info("once")
    assert len(lines(capsys)) == 2


def test_lines_written_inside_a_span_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    setup_logging("worker")
    with TracerProvider().get_tracer("app").start_as_current_span("work") as span:
        log.info("inside")
    log.info("outside")
    inside, outside = lines(capsys)
    context = span.get_span_context()
    assert inside.endswith(f"trace_id={context.trace_id:032x} span_id={context.span_id:016x}")
    assert "trace_id" not in outside


def test_what_other_handlers_are_given_can_be_written_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("task_failed", message="half a \ud800 pair and \x1b[2J")
    (record,) = caplog.records
    assert record.getMessage() == r"task_failed message=half a \ud800 pair and \x1b[2J"
    record.getMessage().encode()
