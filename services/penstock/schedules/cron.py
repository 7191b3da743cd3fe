"""Cron expressions and zones to instants, without I/O.

cronsim matches the fields with the wall clock; changes of the zone's offset are handled here. An expression is
*running* if its minute or its hour field begins with ``*`` or covers its whole range (``*/5 * * * *``,
``0 * * * *``, ``* 0-23 * * *``): it fires whenever the wall clock matches, so it continues in real time through a
repeated hour, and pauses in a skipped one. Every other is *fixed* (``30 2 * * *``): each time of day fires once; a
skipped one fires at the first instant after the gap, a repeated one fires the first time. An expression that begins
with ``@robfig`` is read as robfig/cron reads it (:mod:`penstock.schedules.robfig`), and is always running.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError

from penstock.protocol.spelling import did_you_mean
from penstock.schedules import robfig
from penstock.schedules.robfig import CronError as CronError

EXPRESSION_MAX_CHARS = 200
ROBFIG = "@robfig "  # begins an expression of that dialect
LONGEST_EVERY_SECONDS = 10 * 366 * 86_400
COUNTED = 10_000  # elapsed instants of a cron expression; counting stops there
MACROS = {name: fields.removeprefix("0 ") for name, fields in robfig.MACROS.items()}  # without the seconds
_FIELDS = {
    "second": "0 to 59",
    "minute": "0 to 59",
    "hour": "0 to 23",
    "day-of-month": "1 to 31, L or LW",
    "month": "1 to 12 or JAN to DEC",
    "day-of-week": "0 to 7 or SUN to SAT, 5L, MON#2",
}
_EVERY = re.compile(r"@every\s+((?:[0-9]{1,9}[dhms])+)", re.ASCII)
_PART = re.compile(r"([0-9]+)([dhms])")
_UNIT_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_SECOND = timedelta(seconds=1)
_LONGEST_SEARCH_YEARS = 60
_ZONE_MAX_CHARS = 100
_HOSTS_OWN = re.compile(r"localtime|posixrules|(posix|right)/.*")  # of which each host makes its own, or none
_REMEMBERED = 32  # of each of the expressions, of which a process keeps thousands
_SHARED = 64


class Elapsed(NamedTuple):
    """Elapsed instants: their number, as far as counted, and the newest, oldest first."""

    total: int
    newest: tuple[datetime, ...]


class Every:
    """``anchor``, and every so many seconds after it."""

    def __init__(self, seconds: int, anchor: datetime) -> None:
        self._seconds = seconds
        whole = anchor.astimezone(UTC).replace(microsecond=0)
        self._anchor = whole if whole == anchor else whole + _SECOND

    def next_after(self, instant: datetime) -> datetime | None:
        steps = (instant - self._anchor) // timedelta(seconds=self._seconds) + 1
        try:
            return self._anchor + timedelta(seconds=max(0, steps) * self._seconds)
        except OverflowError:
            return None

    def elapsed(self, first: datetime, until: datetime, keep: int) -> Elapsed:
        """As :func:`elapsed`, but always counts all."""
        step = timedelta(seconds=self._seconds)
        total = (until - first) // step + 1
        return Elapsed(total, tuple(first + place * step for place in range(max(0, total - keep), total)))


class Cron:
    """A cron expression in a zone; not thread-safe."""

    def __init__(self, expression: str, timezone: str) -> None:
        self._zone = read_zone(timezone)
        self._matches = _read(expression)
        minute, hour = self._matches.parts[1:3]
        self._running = (
            expression.startswith(ROBFIG) or minute.startswith("*") or hour.startswith("*")
            or len(self._matches.minutes) == 60 or len(self._matches.hours) == 24
        )  # fmt: skip
        # Thousands of schedules share an expression, and ask the same.
        self.next_after = lru_cache(_REMEMBERED)(self._next_after)

    def _next_after(self, instant: datetime) -> datetime | None:
        after = instant.astimezone(UTC).replace(microsecond=0)
        try:
            return self._next_running(after) if self._running else self._next_fixed(after)
        except OverflowError:  # the end of the calendar
            return None

    def _next_running(self, after: datetime) -> datetime | None:
        """Search from one change of the zone's offset to the next."""
        start, wall = after, after.astimezone(self._zone).replace(tzinfo=None)
        while start.year - after.year < _LONGEST_SEARCH_YEARS:
            offset = _offset(self._zone, start)
            change = _next_change(self._zone, start)
            match = self._match_after(wall)
            if match is None:
                return None
            found = match.replace(tzinfo=UTC) - offset
            if found < change:
                return found
            start = change
            wall = (change + _offset(self._zone, change)).replace(tzinfo=None) - _SECOND
        return None

    def _next_fixed(self, after: datetime) -> datetime | None:
        wall = self._match_after(after.astimezone(self._zone).replace(tzinfo=None))
        while wall is not None:
            found = wall.replace(tzinfo=self._zone).astimezone(UTC)
            if found.astimezone(self._zone).replace(tzinfo=None) != wall:  # in a gap: the first instant after it
                found = _next_change(self._zone, wall.replace(tzinfo=self._zone, fold=1).astimezone(UTC))
            if found > after:
                return found
            wall = self._match_after(wall)
        return None

    def _match_after(self, wall: datetime) -> datetime | None:
        """The first later match of the fields, on a wall clock without changes of the offset."""
        self._matches.dt = wall
        return next(self._matches, None)


Timing = Every | Cron
"""Recurring instants, aware, in UTC, on whole seconds; ``next_after``: None if there is none within fifty years."""
_cron = lru_cache(maxsize=16_384)(Cron)


def timing(expression: str, timezone: str, anchor: datetime) -> Timing:
    """The instants of an expression in a zone. anchor: start of ``@every``. Raises CronError."""
    seconds = every_seconds(expression)
    if seconds is not None:
        read_zone(timezone)
        return Every(seconds, anchor)
    return _cron(expression.strip(), timezone)


def every_seconds(expression: str) -> int | None:
    """The interval of ``@every 1h30m``; None for any other expression. Raises CronError."""
    if len(expression) > EXPRESSION_MAX_CHARS:
        raise CronError("expression", f"is {len(expression)} characters long; the limit is {EXPRESSION_MAX_CHARS}")
    if expression.startswith(ROBFIG):
        return robfig.every_seconds(expression.removeprefix(ROBFIG))
    text = expression.strip().lower()
    if not text.startswith("@every"):
        return None
    match = _EVERY.fullmatch(text)
    seconds = sum(int(n) * _UNIT_SECONDS[unit] for n, unit in _PART.findall(match[1])) if match else 0
    if not 1 <= seconds <= LONGEST_EVERY_SECONDS:
        problem = f"must be like @every 90s or @every 1h30m, of 1 s to ten years, not {_shown(expression)}"
        raise CronError("expression", problem)
    return seconds


@lru_cache(maxsize=2048)
def read_zone(timezone: str) -> ZoneInfo:
    """A zone of the IANA database. Raises CronError with the nearest name."""
    try:
        # Of too long a name, each part of a path would be imported as a package in the one before.
        if len(timezone) > _ZONE_MAX_CHARS or _HOSTS_OWN.fullmatch(timezone):
            raise ValueError
        return ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        hint = _nearest_zone(timezone[:_ZONE_MAX_CHARS])
        raise CronError("timezone", f"{_shown(timezone)} is no IANA zone{hint}") from None


@lru_cache(maxsize=_SHARED)  # all files of the zones are read, and thousands of schedules may have one that is wrong
def _nearest_zone(timezone: str) -> str:
    return did_you_mean(timezone, available_timezones() - {"localtime"}) or ", such as Europe/Berlin or UTC"


def elapsed(when: Timing, first: datetime, until: datetime, keep: int, counted: int = COUNTED) -> Elapsed:
    """Count the instants from ``first`` through ``until``, of a cron to ``counted`` at most, and keep the newest."""
    return when.elapsed(first, until, keep) if isinstance(when, Every) else _walk(when, first, until, keep, counted)


@lru_cache(maxsize=_SHARED)  # after an outage thousands of schedules of one expression ask the same in one round
def _walk(when: Timing, first: datetime, until: datetime, keep: int, counted: int) -> Elapsed:
    instants = [first, *islice(_between(when, first, until), counted)]
    if len(instants) <= counted:
        return Elapsed(len(instants), tuple(instants[-keep:]))
    # Too many to count: the newest are searched from the end. Of a stretch that holds far more than wanted, as an
    # expression of rare bursts has, a later part is tried.
    few, many, back = timedelta(), None, timedelta(seconds=keep)
    while True:
        start = max(first, until - back)
        instants = list(islice(_between(when, start, until), 4 * keep + 1))
        if len(instants) > 4 * keep:
            many = back
        elif len(instants) >= keep or start == first:
            return Elapsed(counted, tuple(instants[-keep:]))
        else:
            few = back
        back = back * 4 if many is None else few + (many - few) / 2


def _between(when: Timing, after: datetime, until: datetime) -> Iterator[datetime]:
    instant = when.next_after(after)
    while instant is not None and instant <= until:
        yield instant
        instant = when.next_after(instant)


def _read(expression: str) -> CronSim:
    """Raises CronError, naming the invalid part."""
    if expression.startswith(ROBFIG):
        expression = robfig.translate(expression.removeprefix(ROBFIG))
    elif expression.startswith("@"):
        if expression.lower() not in MACROS:
            known = ", ".join((*MACROS, "@every 90s"))
            raise CronError("expression", f"{_shown(expression)} is unknown; there are {known}")
        expression = MACROS[expression.lower()]
    fields = expression.split()
    if len(fields) not in (5, 6):
        problem = f"must have 5 fields, or 6 with the seconds first, not {len(fields)}: {_shown(expression)}"
        raise CronError("expression", problem)
    try:
        matches = CronSim(expression, datetime(2000, 1, 1))
        next(matches)
    except StopIteration:
        raise CronError("expression", f"{_shown(expression)} never comes: no date fits it") from None
    except (CronSimError, AssertionError) as exc:
        raise CronError("expression", _problem(fields, str(exc))) from None
    return matches


def _problem(fields: list[str], text: str) -> str:
    """The problem of the library's ``Bad <field>``."""
    values = dict(zip(_FIELDS, ["0", *fields] if len(fields) == 5 else fields, strict=True))
    name = text.removeprefix("Bad ")
    if name not in values:
        return f"cannot be read: {_shown(' '.join(fields))}"
    value, month = values[name], values["month"]
    if name == "day-of-month":
        with suppress(CronSimError):
            CronSim(f"0 0 {value} * *", datetime(2000, 1, 1))  # a day of some month
            return f"never comes: day-of-month {_shown(value)} does not exist in month {_shown(month)}"
    return f"has {name} {_shown(value)}; it may be {_FIELDS[name]}, with * , - and /"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def _offset(zone: ZoneInfo, instant: datetime) -> timedelta:
    offset = instant.astimezone(zone).utcoffset()
    assert offset is not None
    return offset


def _next_change(zone: ZoneInfo, after: datetime) -> datetime:
    """The next change of the zone's offset; in a zone without changes, the instant to look again."""
    for year in (after.year, after.year + 1):
        for change in _changes(zone, year):
            if change > after:
                return change
    return datetime(after.year + 2, 1, 1, tzinfo=UTC)


@lru_cache(maxsize=8192)
def _changes(zone: ZoneInfo, year: int) -> tuple[datetime, ...]:
    """The instants of a year (UTC) at which the zone's offset changes, found by day, then by the second."""
    found = []
    low = datetime(year, 1, 1, tzinfo=UTC)
    end = datetime(year + 1, 1, 1, tzinfo=UTC)
    while low < end:
        high = low + timedelta(days=1)
        before = _offset(zone, low)
        if _offset(zone, high) != before:
            seconds = bisect_left(range(86_400), True, key=lambda n: _offset(zone, low + n * _SECOND) != before)
            found.append(low + seconds * _SECOND)
        low = high
    return tuple(found)
