"""Checks that parameters of several methods share. Each raises InvalidParams, naming the parameter."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.protocol import task
from penstock.protocol.errors import InvalidParams
from penstock.protocol.json_text import utf8_size

TaskId = int | str
MAX_IDS = 1000
MAX_LIST = 1000
LONGEST_DELAY_SECONDS = 100 * 366 * 86_400.0
HIGHEST_ID = 2**63 - 1
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Characters that no name or key may hold: control characters, and surrogates, which Postgres cannot store."""


@dataclass(frozen=True, slots=True)
class Checked:
    """On a field of a method's parameters: the check of its value, unless that is None. Raises InvalidParams."""

    check: Callable[[Any, str], object]  # given the value and the field's name


def between(low: float, high: float, unit: str = "") -> Checked:
    """A check of a number, both bounds included. unit: stands behind the bounds in the error."""

    def check(number: float, name: str) -> None:
        if not low <= number <= high:
            raise InvalidParams(name, f"must be between {low:.0f} and {high:.0f}{unit}, not {number}")

    return Checked(check)


def read_id(value: TaskId, name: str) -> int:
    if isinstance(value, str):
        if not value.isascii() or not value.isdigit() or len(value) > 19:
            raise InvalidParams(name, f"must be a task's number, not {value[:60]!r}")
        value = int(value)
    if not 0 <= value <= HIGHEST_ID:
        raise InvalidParams(name, f"must be between 0 and {HIGHEST_ID}")
    return value


def read_ids(values: list[TaskId], name: str = "ids") -> list[int]:
    if not 1 <= len(values) <= MAX_IDS:
        raise InvalidParams(name, f"must hold 1 to {MAX_IDS} ids, not {len(values)}")
    return [read_id(value, f"{name}[{position}]") for position, value in enumerate(values)]


def read_cursor(cursor: str | None, name: str = "cursor") -> int | None:
    return None if cursor is None else read_id(cursor, name)


def read_cursors(cursor: str | None, name: str = "cursor") -> list[int]:
    """The numbers of a cursor that has several."""
    return [] if cursor is None else [read_id(part, name) for part in cursor.split("-", MAX_LIST)]


def read_action(action: str) -> str:
    if not action:
        raise InvalidParams("action", "is empty")
    if len(action) > task.ACTION_MAX_CHARS:
        raise InvalidParams("action", f"is {len(action)} characters long; the limit is {task.ACTION_MAX_CHARS}")
    if action.startswith("rpc."):
        raise InvalidParams("action", "must not begin with rpc., which JSON-RPC reserves")
    return read_name(action, "action", task.ACTION_MAX_CHARS)


def read_key(key: str | None, name: str) -> str | None:
    return None if key is None else read_name(key, name, task.KEY_MAX_CHARS)


def read_name(text: str, name: str, max_chars: int) -> str:
    """A name or key, checked. Indexes hold these, some together, and bound an entry in bytes: 3 a character."""
    check_chars(text, name, max_chars=max_chars)
    size, most = utf8_size(text), max_chars * 3
    if size > most:
        raise InvalidParams(name, f"has {size} bytes in UTF-8; the limit is {most}")
    return text


def check_chars(text: str, name: str, *, max_chars: int) -> None:
    if not 1 <= len(text) <= max_chars:
        raise InvalidParams(name, f"must have 1 to {max_chars} characters, not {len(text)}")
    if CONTROL.search(text):
        raise InvalidParams(name, "holds a control character")


def read_instant(value: str | int | None, name: str = "run_at") -> datetime | None:
    if value is None:
        return None
    try:
        instant = (
            datetime.fromtimestamp(value / 1000, UTC) if isinstance(value, int) else msgspec.convert(value, datetime)
        )
    except (ValueError, OverflowError, OSError):
        forms = "RFC 3339 such as 2030-01-31T08:00:00Z, or epoch milliseconds"
        raise InvalidParams(name, f"must be {forms}, not {str(value)[:60]!r}") from None
    if instant.tzinfo is None:
        raise InvalidParams(name, f"needs a zone, such as Z or +01:00: {value!r}")
    if not task.BEGINNING.run_at <= instant < datetime.max.replace(tzinfo=UTC):
        # The driver writes the first instant of year 1 as minus infinity, before which no claim can begin to look, and
        # the last one there is as infinity, with which Postgres cannot calculate.
        raise InvalidParams(name, f"is out of range: {value!r}")
    return instant.astimezone(UTC)


def check_seconds(seconds: float | None, name: str, *, most: float = LONGEST_DELAY_SECONDS) -> None:
    if seconds is not None and not 0 < seconds <= most:
        raise InvalidParams(name, f"must be above 0 and at most {most:.0f} seconds, not {seconds}")


def check_labels(
    labels: Mapping[str, str],
    name: str = "labels",
    *,
    most: int = task.MAX_LABELS,
    name_chars: int = task.LABEL_NAME_MAX_CHARS,
    value_chars: int = task.LABEL_VALUE_MAX_CHARS,
) -> None:
    """The bounds are those of a task by default."""
    if len(labels) > most:
        raise InvalidParams(name, f"are {len(labels)}; the limit is {most}")
    no_control = "characters, none of them a control character"
    for label, value in labels.items():
        if not 1 <= len(label) <= name_chars or CONTROL.search(label):
            raise InvalidParams(name, f"need names of 1 to {name_chars} {no_control}, not {label[:60]!r}")
        if len(value) > value_chars or CONTROL.search(value):
            raise InvalidParams(f"{name}.{label}", f"must have at most {value_chars} {no_control}")


def like_pattern(pattern: str) -> str:
    """A pattern in which ``*`` stands for anything, as a pattern of SQL's LIKE."""
    return re.sub(r"([\\%_])", r"\\\1", pattern).replace("*", "%")


ID = Checked(read_id)
IDS = Checked(read_ids)
KEY = Checked(read_key)
ACTION = Checked(lambda action, _name: read_action(action))
LABELS = Checked(check_labels)
LIMIT = between(1, MAX_LIST)
NUMBERED = Checked(read_cursor)  # a cursor that is a number
PRIORITY = between(task.PRIORITY_MIN, task.PRIORITY_MAX)
REASON = Checked(lambda reason, name: check_chars(reason, name, max_chars=task.REASON_MAX_CHARS))
SECONDS = Checked(check_seconds)
SPAN = between(0, LONGEST_DELAY_SECONDS, " seconds")
