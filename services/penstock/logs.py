"""Log lines: an event name plus fields, as logfmt (or JSON), one line each, on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from penstock import tracecontext
from penstock.printable import printable


def setup_logging(process: str, *, level: str = "info", form: str = "logfmt") -> None:
    """Configure logging for this process once; ``process`` is bound to every line.

    Lines of libraries pass through the same renderer at warning and above, as event ``library_log``.
    """
    threshold = logging.getLevelName(level.upper())
    render: Any = (
        structlog.processors.JSONRenderer(default=str)
        if form == "json"
        else structlog.processors.LogfmtRenderer(
            key_order=["timestamp", "level", "event", "process"], drop_missing=True, bool_as_flag=False
        )
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _trace_ids,
        _exception_text,
        render,
        _one_line,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    root = logging.getLogger()
    root.handlers[:] = [_ToStructlog(process)]
    root.setLevel(logging.WARNING)


def get_logger() -> Any:
    """The logger: ``log.info("event_name", field=value)``."""
    return structlog.get_logger()


def _trace_ids(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Of the span that the line is written in, where there is one."""
    trace = tracecontext.current()
    if trace is not None:
        event.setdefault("trace_id", trace.trace_id)
        event.setdefault("span_id", trace.span_id)
    return event


def _exception_text(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Fold a traceback into one field, so that a line stays a line."""
    if event.pop("exc_info", None):
        formatted = structlog.processors.format_exc_info(_logger, _name, {"exc_info": True})
        event["traceback"] = formatted.get("exception", "")
    return event


def _one_line(_logger: Any, _name: str, line: str) -> str:
    """The renderer leaves all but newlines as they are; a value must not be able to forge a line of its own."""
    return printable(line, one_line=True)


class _ToStructlog(logging.Handler):
    def __init__(self, process: str) -> None:
        super().__init__(logging.WARNING)
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        log = get_logger()
        fields: dict[str, Any] = {"process": self._process, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            fields["exception"] = repr(record.exc_info[1])
        log.log(record.levelno, "library_log", **fields)
