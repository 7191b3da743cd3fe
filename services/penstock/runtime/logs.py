"""Log lines: an event name plus fields, as logfmt (or JSON), one line each, on standard error.

Penstock logs by the logger ``penstock`` of the standard library. The root logger is the application's: its lines are
written too where it has set up nothing itself.
"""

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from penstock.protocol import trace_context

_TREE = "penstock"
_NO_TASK = {"task_id": None, "claim": None, "action": None}
_TASK: ContextVar[Mapping[str, int | str | None]] = ContextVar("task", default=_NO_TASK)
_PROCESS: ContextVar[str | None] = ContextVar("process", default=None)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"asctime", "message", "taskName"}
# Penstock's own libraries: below warning they log every request, and at debug its content.
_QUIET = dict.fromkeys(
    ("aiobotocore", "aiohttp", "aiormq", "asyncio", "botocore", "httpcore", "httpx", "urllib3", "uvicorn"),
    logging.WARNING,
) | {"asyncpg.pool": logging.ERROR}  # it warns of each try to reach an unavailable Postgres, with a traceback

# They move a terminal's cursor, write to its clipboard or title, change the direction of text, or are no characters.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_LINES = re.compile(f"[{_CONTROL}]")
_ONE_LINE = re.compile(f"[\t\n{_CONTROL}]")


def setup_logging(process: str, *, level: str = "info", form: str = "logfmt") -> None:
    """Have Penstock's lines written from this level on; ``process`` is on every line."""
    tree = logging.getLogger(_TREE)
    tree.handlers[:] = [_handler(process, form)]
    tree.setLevel(level.upper())
    tree.propagate = False


def setup_root(process: str, *, level: str = "warning", form: str = "logfmt") -> None:
    """Have the lines of all other loggers written too, unless the application has handlers of its own by now."""
    import structlog

    for name in (_TREE, f"{_TREE}.task"):
        logging.getLogger(name).disabled = False  # dictConfig disables loggers that it does not name
    root = logging.getLogger()
    if root.handlers:
        return
    root.addHandler(_handler(process, form))
    root.setLevel(level.upper())
    for name, least in _QUIET.items():
        library = logging.getLogger(name)
        if library.level == logging.NOTSET:
            library.setLevel(least)
    if not structlog.is_configured():
        structlog.configure(
            processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
            wrapper_class=structlog.stdlib.BoundLogger,
            logger_factory=structlog.stdlib.LoggerFactory(),
        )


def bind_task(task_id: int | None, claim: int | None, action: str) -> None:
    """Have lines that are logged in this context, of the event loop or a thread, name a task; None in a batch."""
    _TASK.set({"task_id": task_id, "claim": claim, "action": action})


def bind_process(name: str) -> None:
    """Have lines that are logged in this context name this process, of several that one program runs."""
    _PROCESS.set(name)


class TaskLogFilter(logging.Filter):
    """Adds ``task_id``, ``claim`` and ``action`` to records, for handlers of ``logging`` that are set up elsewhere.

    Of a line logged in a handler they are its task's, otherwise None; of a batched handler there is ``action`` alone.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in _TASK.get().items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


class _Lazy:
    """The logger, made when it first logs: its library takes longer to import than all else that an action needs."""

    def __init__(self, called: str) -> None:
        self._standard = logging.getLogger(called)

    def debug(self, event: str, **fields: Any) -> None:
        # Every pass has such a line, which is hardly ever wanted, and the library takes 2 us to see that.
        if self._standard.isEnabledFor(logging.DEBUG):
            self.log(logging.DEBUG, event, **fields)

    def __getattr__(self, name: str) -> Any:
        import structlog

        logger = structlog.wrap_logger(
            self._standard,
            processors=[structlog.stdlib.filter_by_level, _to_record],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
        )
        method = getattr(logger, name)
        setattr(self, name, method)  # so that it is asked for once
        return method


log: Any = _Lazy(_TREE)
"""The logger of all modules: ``log.info("event_name", field=value)``."""

task_log: Any = _Lazy(f"{_TREE}.task")
"""The logger of handlers, `ctx.log`, whose lines belong to the output of their task."""


class _Event(dict[str, Any]):
    """The message of a record of ours: an event and its fields, printable text for other handlers."""

    def __str__(self) -> str:
        text = " ".join(_text(value) if name == "event" else f"{name}={_text(value)}" for name, value in self.items())
        return printable(text)


def message_of(record: logging.LogRecord) -> str:
    """The message of a record that a task logs, without the fields that name the task."""
    if not isinstance(record.msg, _Event):
        return record.getMessage()
    return str(_Event((name, value) for name, value in record.msg.items() if name not in _NO_TASK))


def _to_record(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> tuple[tuple[_Event], dict[str, Any]]:
    exc_info = event.pop("exc_info", None)
    return (_Event({"event": event.pop("event"), **event}),), {"exc_info": exc_info}


def _handler(process: str, form: str) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(process, form))
    return handler


class _Lines(logging.Formatter):
    """Records as lines, a traceback folded into one field."""

    def __init__(self, process: str, form: str) -> None:
        import structlog

        super().__init__()
        self._process = process
        self._form = form
        self._render: Any = structlog.processors.JSONRenderer(default=str, allow_nan=False)
        if form != "json":
            order = ["timestamp", "level", "event", "process"]
            self._render = structlog.processors.LogfmtRenderer(key_order=order, drop_missing=True, bool_as_flag=False)

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, _Event):
            event: dict[str, Any] = dict(record.msg)
        else:
            event = {"event": "log", "logger": record.name, "message": record.getMessage()}
        event["timestamp"] = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        event["level"] = record.levelname.lower()
        event["process"] = _PROCESS.get() or self._process
        bound = {name: value for name, value in _TASK.get().items() if value is not None}
        added = {name: value for name, value in vars(record).items() if name not in _STANDARD and name.isidentifier()}
        trace = trace_context.current()
        ids = {} if trace is None else {"trace_id": trace.trace_id, "span_id": trace.span_id}
        for name, value in (*bound.items(), *added.items(), *ids.items()):
            event.setdefault(name, value)
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            event["stack"] = record.stack_info
        try:
            line: str = self._render(None, "", event)
        except Exception:  # a name with a blank, NaN in JSON, a value without text: the line must not be lost for it
            line = self._render(None, "", {re.sub("[\0- ]", "_", name): _text(value) for name, value in event.items()})
        # The renderer changes newlines alone; a value must not be able to forge a line of its own.
        return printable_json(line) if self._form == "json" else printable(line, one_line=True)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as exc:
        return f"{type(value).__name__} without a text: {type(exc).__name__}"


def printable(text: str, *, one_line: bool = False) -> str:
    """The text with control characters as escapes such as ``\\x1b``; newlines and tabs stay unless ``one_line``."""
    return (_ONE_LINE if one_line else _LINES).sub(lambda match: ascii(match[0])[1:-1], text)


def printable_json(text: str) -> str:
    """JSON text with the same characters as JSON escapes, which leaves its meaning."""
    return _LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
