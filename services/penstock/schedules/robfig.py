"""The cron dialect of robfig/cron 1.2.0, by its default parser, as an expression of :mod:`~penstock.schedules.cron`.

Seconds come first and the day of the week is optional; ``?`` is ``*`` in any field, ``N/step`` continues to the end
of the field, and ``@every`` takes durations as Go writes them. The same is accepted, oddities included.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

MACROS = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
}
_DURATION = re.compile(r"([-+]?)((?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|ms|s|m|h))+)", re.ASCII)
_PART = re.compile(r"([0-9.]+)([a-z]+)")
_MICRO = str.maketrans("\u00b5\u03bc", "uu")  # the two signs for micro
_UNIT_SECONDS = {
    "ns": Decimal("1e-9"), "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "m": Decimal(60),
    "h": Decimal(3600),
}  # fmt: skip
_LONGEST_SECONDS = Decimal(2**63 - 1) / 10**9
_NUMBER = re.compile(r"\+?[0-9]{1,9}", re.ASCII)
_TERM = re.compile(r"(?:([*?])(?:-[^/]*)?|([^/-]+)(?:-([^/-]+))?)(?:/(\+?[0-9]{1,9}))?", re.ASCII)


class CronError(ValueError):
    """An expression or a zone is wrong; ``field`` is ``expression`` or ``timezone``, ``problem`` says what to do."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class _Field(NamedTuple):
    name: str
    low: int
    high: int
    names: Mapping[str, int]


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_FIELDS = (
    _Field("second", 0, 59, {}),
    _Field("minute", 0, 59, {}),
    _Field("hour", 0, 23, {}),
    _Field("day-of-month", 1, 31, {}),
    _Field("month", 1, 12, {name: place for place, name in enumerate(_MONTHS, 1)}),
    _Field("day-of-week", 0, 6, {name: place for place, name in enumerate(_DAYS)}),
)


@lru_cache(maxsize=4096)  # thousands of schedules share a spec, and each fire asks
def every_seconds(spec: str) -> int | None:
    """The interval of ``@every 1h30m10s``, one second or more; None for other expressions. Raises CronError."""
    if not spec.startswith("@every "):
        return None
    text = spec.removeprefix("@every ")
    if text in ("0", "+0", "-0"):
        return 1
    match = _DURATION.fullmatch(text.translate(_MICRO))
    if match is None:
        raise CronError("expression", f"must be like @every 90s or @every 1h30m10s, not {spec[:60]!r}")
    seconds = sum(Decimal(number) * _UNIT_SECONDS[unit] for number, unit in _PART.findall(match[2]))
    if seconds > _LONGEST_SECONDS:
        raise CronError("expression", f"must be of no more than 292 years, not {spec[:60]!r}")
    return 1 if match[1] == "-" else max(1, int(seconds))


def translate(spec: str) -> str:
    """Six equivalent fields for cronsim, as lists of numbers; not for ``@every``. Raises CronError."""
    if spec.startswith("@"):
        if spec not in MACROS:
            raise CronError("expression", f"{spec[:60]!r} is unknown; there are {', '.join(MACROS)} and @every 90s")
        return MACROS[spec]
    given = spec.split()
    if len(given) not in (5, 6):
        raise CronError("expression", f"must have 5 or 6 fields, the seconds first, not {len(given)}: {spec[:60]!r}")
    texts = [*given, "*"] if len(given) == 5 else given
    return " ".join(_field(text, field) for text, field in zip(texts, _FIELDS, strict=True))


def is_shifted(spec: str) -> bool:
    """Whether it has five fields as a crontab, whose first is read as seconds here."""
    return not spec.startswith("@") and len(spec.split()) == 5


def _field(text: str, field: _Field) -> str:
    """A field that both dialects read alike. A star in it comes first: both decide by that about the fields of days."""
    values: set[int] = set()
    starred = ""
    for part in filter(None, text.split(",")):
        first, last, step, star = _part(part, field)
        values.update(range(first, last + 1, step))
        if star and (not starred or step == 1):
            starred = "*" if step == 1 else f"*/{step}"
    if not values:
        raise CronError("expression", f"has no value for {field.name}: {text[:60]!r}")
    if starred == "*":
        return starred
    return ",".join(filter(None, (starred, *map(str, sorted(values)))))


def _part(text: str, field: _Field) -> tuple[int, int, int, bool]:
    """First, last, step, and whether it is a star; what follows a hyphen after a star is ignored."""
    term = _TERM.fullmatch(text)
    if term is not None:
        star, begin, end, steps = term.groups()
        first = field.low if star else _value(begin, field)
        last = field.high if star or (steps and end is None) else _value(end or begin, field)
        step = int(steps or 1)
        if step > 0 and field.low <= first <= last <= field.high:
            return first, last, step, bool(star)
    problem = f"has {field.name} {text[:60]!r}; it may be {field.low} to {field.high}"
    if field.names:
        problem += f" or {next(iter(field.names))} to {list(field.names)[-1]}"
    raise CronError("expression", f"{problem}, with * ? , - and /")


def _value(text: str, field: _Field) -> int:
    """-1 for what is no value."""
    number = int(text) if _NUMBER.fullmatch(text) else -1
    return field.names.get(text.lower(), number)
