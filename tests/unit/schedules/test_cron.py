"""Cron expressions against an oracle that goes over every minute of two years, written without the library."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedules import cron
from penstock.schedules.cron import CronError, Timing, elapsed, every_seconds, read_zone, timing

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe")
FIRST, LAST = datetime(2025, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ANCHOR = datetime(2025, 1, 1, tzinfo=UTC)


def fires(when: Timing, after: datetime, until: datetime) -> Iterator[datetime]:
    """Every instant after one through the other."""
    instant = when.next_after(after)
    while instant is not None and instant <= until:
        yield instant
        instant = when.next_after(instant)


def at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# The oracle: what every minute of two years shows on a wall clock, and which of them a person would want


HALF = timedelta(minutes=30)  # a clock changes at the beginning of a half hour, by whole half hours
Halves = dict[datetime, list[tuple[datetime, timedelta]]]


@cache
def wall_halves(zone: str) -> tuple[Halves, Halves]:
    """When the clock shows the beginning of each half hour from FIRST on, and the first time that it does.

    Each by what the clock shows: the instants, with the time that passes from one of its minutes to the next. A half
    hour that is jumped over has the first instant after the gap for all of its minutes.
    """
    shown: Halves = {}
    first: Halves = {}
    info = ZoneInfo(zone)
    instant = FIRST
    last = None
    while instant < LAST:
        wall, end = (at.astimezone(info).replace(tzinfo=None) for at in (instant, instant + HALF - MINUTE))
        assert end - wall == HALF - MINUTE
        jumped = wall if last is None else last + HALF
        while jumped < wall:
            first.setdefault(jumped, [(instant, timedelta(0))])
            jumped += HALF
        last = wall
        shown.setdefault(wall, []).append((instant, MINUTE))
        first.setdefault(wall, [(instant, MINUTE)])
        instant += HALF
    return shown, first


def numbers(field: str, low: int, high: int) -> set[int]:
    result: set[int] = set()
    for term in field.split(","):
        span, _, step = term.partition("/")
        if span == "*":
            start, end = low, high
        else:
            start_text, _, end_text = span.partition("-")
            start = int(start_text)
            end = int(end_text) if end_text else high if step else start
        result |= set(range(start, end + 1, int(step or 1)))
    return result


def fits(fields: list[str]) -> set[date]:
    """The dates of the two years, and a day around them, that a plain expression means."""
    days, months = numbers(fields[2], 1, 31), numbers(fields[3], 1, 12)
    weekdays = {day % 7 for day in numbers(fields[4], 0, 7)}
    both = fields[2].startswith("*") or fields[4].startswith("*")
    dates = set()
    day = FIRST.date() - timedelta(days=2)
    while day < LAST.date() + timedelta(days=2):
        of_month, of_week = day.day in days, day.isoweekday() % 7 in weekdays
        if day.month in months and ((of_month and of_week) if both else (of_month or of_week)):
            dates.add(day)
        day += timedelta(days=1)
    return dates


def expected(expression: str, zone: str) -> list[datetime]:
    fields = expression.split()
    minutes, hours, dates = numbers(fields[0], 0, 59), numbers(fields[1], 0, 23), fits(fields)
    shown, first = wall_halves(zone)
    running = fields[0].startswith("*") or fields[1].startswith("*") or len(minutes) == 60 or len(hours) == 24
    found = {
        instant + minute % 30 * pace
        for day in dates
        for hour in hours
        for minute in minutes
        for instant, pace in (shown if running else first).get(
            datetime(day.year, day.month, day.day, hour, minute // 30 * 30), ()
        )
    }
    return sorted(found - {FIRST})


SPARSE = [
    "*/20 2 * * *", "30 2 * * *", "0 2 * * *", "15,45 1-3 * * *", "0 3 * * *", "0 0 29 2 *", "0 12 13 * 5",
    "5 1 31 * *", "0 9-17/4 * * 1-5", "45 1 1-7 * 0", "0 0 */10 * 1", "59 23 28-31 * *", "1/7 4 * 3,10 *",
    "0-59 2 * * 0",
]  # fmt: skip
DENSE = ["*/20 * * * *", "0 * * * *", "17 */3 * * *", "10-50/40 0-23 * * *"]  # the same every day but at a change


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", SPARSE)
def test_every_fire_of_two_years_is_that_of_the_oracle(expression: str, zone: str) -> None:
    seen = list(fires(timing(expression, zone, ANCHOR), FIRST, LAST - MINUTE))
    assert seen == expected(expression, zone)


def changes(zone: str) -> list[datetime]:
    """A day before each change of the clock in the two years, or less."""
    info, day = ZoneInfo(zone), timedelta(days=1)
    days = [FIRST + number * day for number in range(1, (LAST - FIRST) // day)]
    found = [at for at in days if at.astimezone(info).utcoffset() != (at + day).astimezone(info).utcoffset()]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("expression", DENSE)
def test_every_fire_around_each_change_is_that_of_the_oracle(expression: str, zone: str) -> None:
    """And around the new year."""
    oracle, when, days = expected(expression, zone), timing(expression, zone, ANCHOR), timedelta(days=5)
    for middle in (*changes(zone), datetime(2026, 1, 1, tzinfo=UTC)):
        start, end = middle - days, middle + days
        assert list(fires(when, start, end)) == [instant for instant in oracle if start < instant <= end]


@pytest.mark.parametrize("zone", ZONES)
def test_every_minute_fires_in_real_time_through_both_changes(zone: str) -> None:
    """Two days before each change and after it, in each zone: no minute is left out and none comes twice."""
    for change in changes(zone):
        start, end = change - timedelta(days=2), change + timedelta(days=3)
        seen = list(fires(timing("* * * * *", zone, ANCHOR), start, end))
        assert seen == [start + n * MINUTE for n in range(1, int((end - start) / MINUTE) + 1)]


# Daylight saving, in words


def test_a_time_in_a_gap_fires_once_at_the_first_instant_after_it() -> None:
    for expression in ("30 2 * * *", "0 30 2 * * *", "15,30,45 2 * * *", "*/10 30 2 * * *"):
        found = list(
            fires(timing(expression, "Europe/Berlin", ANCHOR), utc("2026-03-29T00:00"), utc("2026-03-29T12:00"))
        )
        assert found == [utc("2026-03-29T01:00")], expression  # 03:00 in Berlin


def test_a_time_in_a_gap_and_the_end_of_the_gap_are_one_fire() -> None:
    found = list(
        fires(timing("0,30 2,3 * * *", "Europe/Berlin", ANCHOR), utc("2026-03-29T00:00"), utc("2026-03-29T12:00"))
    )
    assert found == [utc("2026-03-29T01:00"), utc("2026-03-29T01:30")]


def test_a_time_that_comes_twice_fires_the_first_time() -> None:
    for expression in ("30 2 * * *", "0 30 2 * * *"):
        found = list(
            fires(timing(expression, "Europe/Berlin", ANCHOR), utc("2026-10-24T22:00"), utc("2026-10-25T22:00"))
        )
        assert found == [utc("2026-10-25T00:30")], expression


def test_an_hourly_one_fires_in_both_of_the_repeated_hours() -> None:
    for expression in ("0 * * * *", "@hourly", "0 0-23 * * *", "0 0 * * * *"):
        found = list(
            fires(timing(expression, "Europe/Berlin", ANCHOR), utc("2026-10-24T23:30"), utc("2026-10-25T02:30"))
        )
        assert found == [utc(f"2026-10-25T0{hour}:00") for hour in range(3)], expression


def test_a_change_of_half_an_hour_repeats_half_an_hour() -> None:
    # On 5 April 2026 Lord Howe goes back from 02:00 to 01:30.
    zone = "Australia/Lord_Howe"
    fixed = list(fires(timing("45 1 * * *", zone, ANCHOR), utc("2026-04-04T12:00"), utc("2026-04-05T06:00")))
    assert fixed == [utc("2026-04-04T14:45")]
    running = list(fires(timing("45 * * * *", zone, ANCHOR), utc("2026-04-04T14:30"), utc("2026-04-04T16:30")))
    assert running == [utc("2026-04-04T14:45"), utc("2026-04-04T15:15"), utc("2026-04-04T16:15")]


def test_every_goes_by_elapsed_time_whatever_the_zone() -> None:
    when = timing("@every 1h30m", "Europe/Berlin", utc("2026-03-28T22:00"))
    found = list(fires(when, utc("2026-03-28T22:00"), utc("2026-03-29T04:00")))
    assert found == [utc("2026-03-28T22:00") + timedelta(minutes=90 * n) for n in range(1, 5)]


PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
_ROW = re.compile(r"\| `([^`]+)` \| (\S+/\S+) \| (\S+Z) \| ((?:\S+Z(?:, )?)+) \|")
PROMISED = _ROW.findall(PAGE.read_text("utf-8"))


@pytest.mark.parametrize(("expression", "zone", "after", "instants"), PROMISED)
def test_the_page_on_schedules_tells_when_each_of_its_examples_fires(
    expression: str, zone: str, after: str, instants: str
) -> None:
    promised = [datetime.fromisoformat(text) for text in instants.split(", ")]
    when = timing(expression, zone, datetime.fromisoformat(after))
    assert list(fires(when, datetime.fromisoformat(after), promised[-1])) == promised


def test_the_page_on_schedules_has_examples_of_each_kind() -> None:
    assert len(PROMISED) == 7


# Odd expressions


@pytest.mark.parametrize(
    ("expression", "after", "next_at"),
    [
        ("0 0 29 2 *", "2026-01-01", "2028-02-29"),
        ("0 0 29 2 *", "2096-03-01", "2104-02-29"),  # 2100 is no leap year
        ("0 0 13 * FRI", "2026-11-01", "2026-11-06"),  # either
        ("0 0 */2 * FRI", "2026-11-01", "2026-11-13"),  # both: one of the two begins with a star
        ("0 0 L * *", "2026-02-01", "2026-02-28"),
        ("0 0 LW * *", "2026-01-01", "2026-01-30"),
        ("0 0 * * 5L", "2026-11-01", "2026-11-27"),
        ("0 0 * * MON#2", "2026-11-01", "2026-11-09"),
        ("0 0 * * 0", "2026-11-02", "2026-11-08"),
        ("0 0 * * 7", "2026-11-02", "2026-11-08"),
        ("0 0 1 jan,Jul *", "2026-02-01", "2026-07-01"),
        ("0 0 * * mon-fri", "2026-11-07", "2026-11-09"),
        ("@yearly", "2026-11-07", "2027-01-01"),
        ("@MONTHLY", "2026-11-07", "2026-12-01"),
        ("@weekly", "2026-11-07", "2026-11-08"),
        ("@daily", "2026-11-07", "2026-11-08"),
        ("  0   0  1 1 *  ", "2026-11-07", "2027-01-01"),
        ("0 0 31 2 MON", "2026-11-07", "2027-02-01"),  # a Monday in February: the date never is
    ],
)
def test_next_after(expression: str, after: str, next_at: str) -> None:
    assert timing(expression, "UTC", ANCHOR).next_after(utc(after)) == utc(next_at)


def test_six_fields_begin_with_the_seconds() -> None:
    found = list(fires(timing("*/20 5 * * * *", "UTC", ANCHOR), utc("2026-01-01T00:00"), utc("2026-01-01T01:00")))
    assert found == [utc("2026-01-01T00:05") + timedelta(seconds=n) for n in (0, 20, 40)]


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("0 0 30 2 *", ["day-of-month '30'", "month '2'"]),
        ("0 0 31 4,6,9,11 *", ["day-of-month '31'", "month '4,6,9,11'"]),
        ("61 * * * *", ["minute '61'", "0 to 59"]),
        ("0 24 * * *", ["hour '24'", "0 to 23"]),
        ("0 0 0 * *", ["day-of-month '0'"]),
        ("0 0 * 13 *", ["month '13'"]),
        ("0 0 * * 8", ["day-of-week '8'"]),
        ("60 * * * * *", ["second '60'"]),
        ("5-1 * * * *", ["minute '5-1'"]),
        ("*/0 * * * *", ["minute '*/0'"]),
        ("0 0 15W * *", ["day-of-month '15W'"]),
        ("0 0 * *", ["5 fields", "not 4"]),
        ("", ["5 fields", "not 0"]),
        ("@fortnightly", ["'@fortnightly'", "@daily"]),
        ("@every", ["@every 90s", "'@every'"]),
        ("@every 0s", ["1 s", "'@every 0s'"]),
        ("@every 90", ["@every 90s"]),
        ("@every 99999999d", ["ten years"]),
        ("* * * * * " + "1," * 200, ["characters long", "200"]),
    ],
)
def test_a_wrong_expression_names_the_value_and_what_would_do(expression: str, words: list[str]) -> None:
    with pytest.raises(CronError) as caught:
        timing(expression, "UTC", ANCHOR)
    assert caught.value.field == "expression"
    assert [word for word in words if word not in caught.value.problem] == []


@pytest.mark.parametrize(
    "zone",
    ["", "Europe/Berlim", "../../etc/passwd", "/etc/passwd", "Europe", "x\0y", "é" * 500, "Europe/" * 600 + "Berlin"],
)
def test_a_wrong_zone_is_named(zone: str) -> None:
    with pytest.raises(CronError) as caught:
        read_zone(zone)
    assert caught.value.field == "timezone"
    assert "no IANA zone" in caught.value.problem


@pytest.mark.parametrize("zone", ["localtime", "posixrules", "posix/UTC", "right/Europe/Berlin"])
def test_a_zone_that_each_host_may_have_of_its_own_is_refused(zone: str) -> None:
    """By `right`, leap seconds count: a fixed time would be half a minute early."""
    with pytest.raises(CronError, match="no IANA zone") as caught:
        read_zone(zone)
    assert f"did you mean {zone}" not in caught.value.problem


def test_the_nearest_zone_is_named() -> None:
    with pytest.raises(CronError, match=r"did you mean Europe/Berlin\?"):
        timing("@every 5s", "Europe/Berlim", ANCHOR)


def test_the_files_of_the_zones_are_read_once_for_thousands_of_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import, or schedules whose zone is gone, would hold up all fires: each reading takes 30 ms."""
    looks: list[str] = []
    monkeypatch.setattr(cron, "available_timezones", lambda: looks.append("all") or {"Europe/Rome"})
    for _ in range(1000):
        with pytest.raises(CronError, match=r"did you mean Europe/Rome\?"):
            read_zone("Europe/Romee")
    assert len(looks) == 1


@pytest.mark.parametrize(("text", "seconds"), [("@every 90s", 90), ("@every 1h30m", 5400), ("@every 2d", 172_800)])
def test_every_is_read(text: str, seconds: int) -> None:
    assert every_seconds(text) == seconds


def test_a_year_of_fires_leaves_little_of_each_expression_in_memory() -> None:
    """A process keeps thousands of expressions, each fired once a day."""
    crons = [timing(f"{n} 7 3 * * *", "UTC", ANCHOR) for n in range(60)]
    tracemalloc.start()
    try:
        for day in range(365):
            for when in crons:
                when.next_after(FIRST + timedelta(days=day))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / len(crons) < 10_000


# Properties


@given(st.text(max_size=40) | st.from_regex(r"[0-9*/,\-LW#A-Z]{1,6}( [0-9*/,\-LW#A-Z]{1,6}){4,5}", fullmatch=True))
def test_any_text_is_an_expression_or_a_cron_error(text: str) -> None:
    try:
        when = timing(text, "Europe/Berlin", ANCHOR)
    except CronError:
        return
    found = when.next_after(FIRST)
    assert found is None or found > FIRST


FIELDS = st.tuples(
    st.sampled_from(["*", "*/7", "0", "30", "5,10", "0-20"]),
    st.sampled_from(["*", "*/2", "0", "1-3", "2", "23"]),
    st.sampled_from(["*", "1", "29-31", "L"]),
    st.sampled_from(["*", "3", "10,11"]),
    st.sampled_from(["*", "SUN", "1-5"]),
)


@given(FIELDS, st.sampled_from(ZONES), st.integers(0, 2 * 365 * 86_400), st.integers(0, 999_999))
@settings(max_examples=200)
def test_the_next_fire_is_later_whole_and_the_same_from_anywhere_before_it(
    fields: tuple[str, ...], zone: str, seconds: int, microseconds: int
) -> None:
    when = timing(" ".join(fields), zone, ANCHOR)
    after = FIRST + timedelta(seconds=seconds, microseconds=microseconds)
    found = when.next_after(after)
    assert found is not None
    assert found > after
    assert found.microsecond == 0
    assert when.next_after(after + (found - after) / 2) == found
    assert when.next_after(found - timedelta(microseconds=1)) == found


@given(st.integers(1, 100_000), st.integers(0, 10_000_000), st.integers(0, 999_999))
def test_every_keeps_its_distance_from_its_anchor(interval: int, seconds: int, microseconds: int) -> None:
    when = timing(f"@every {interval}s", "UTC", ANCHOR)
    after = ANCHOR + timedelta(seconds=seconds, microseconds=microseconds)
    found = when.next_after(after)
    assert found is not None
    assert timedelta() < found - after <= timedelta(seconds=interval)
    assert (found - ANCHOR).total_seconds() % interval == 0


# Instants that have passed


def test_elapsed_counts_and_keeps_the_newest() -> None:
    when = timing("*/10 * * * *", "UTC", ANCHOR)
    first = utc("2026-01-01T00:00")
    found = elapsed(when, first, utc("2026-01-01T01:05"), 3)
    assert found.total == 7
    assert found.newest == (utc("2026-01-01T00:40"), utc("2026-01-01T00:50"), utc("2026-01-01T01:00"))


@pytest.mark.parametrize(("expression", "total"), [("* * * * * *", cron.COUNTED), ("@every 1s", 365 * 86_400 + 1)])
def test_elapsed_finds_the_newest_of_a_year_of_seconds_without_walking_through_them(
    expression: str, total: int
) -> None:
    when = timing(expression, "Europe/Berlin", ANCHOR)
    until = utc("2026-06-01T00:00:00")
    found = elapsed(when, utc("2025-06-01T00:00"), until, 100)
    assert found.total == total
    assert found.newest == tuple(until - timedelta(seconds=n) for n in reversed(range(100)))


def test_elapsed_finds_the_newest_of_bursts_far_apart() -> None:
    when = timing("* * 1 1 *", "UTC", ANCHOR)
    until = utc("2036-12-01T00:00")
    found = elapsed(when, utc("2020-01-01T00:00"), until, 5)
    assert found.total == cron.COUNTED
    assert found.newest == tuple(utc(f"2036-01-01T23:5{n}") for n in range(5, 10))


class Walked:
    """Counts how often it was asked for the next instant."""

    def __init__(self, expression: str) -> None:
        self._timing = timing(expression, "UTC", ANCHOR)
        self.asked = 0

    def next_after(self, instant: datetime) -> datetime | None:
        self.asked += 1
        return self._timing.next_after(instant)


@pytest.mark.parametrize("expression", ["* * * * *", "* * * * * *", "* * * 1 1 *", "0 0 1 * *", "0 0 29 2 *"])
def test_the_walk_through_what_has_passed_is_bounded_and_shared(expression: str) -> None:
    """A burst of 86,400 seconds once a year included: the walk back stops as soon as it has found far too many."""
    walked = Walked(expression)
    first = walked.next_after(utc("2000-01-01T00:00"))
    assert first is not None
    until = utc("2026-07-01T00:00")
    found = elapsed(walked, first, until, keep=60, counted=300)
    assert found.newest[-1] <= until
    assert len(found.newest) == min(60, found.total)
    assert walked.asked < 10_000
    asked = walked.asked
    assert elapsed(walked, first, until, keep=60, counted=300) == found
    assert walked.asked == asked


@given(st.integers(1, 400), st.integers(1, 30), st.integers(0, 100_000))
def test_every_counts_as_a_walk_would(seconds: int, keep: int, length: int) -> None:
    when = timing(f"@every {seconds}s", "UTC", ANCHOR)
    first = when.next_after(ANCHOR)
    assert first is not None
    until = first + timedelta(seconds=min(length, 200 * seconds))
    walked = [first]
    while (following := when.next_after(walked[-1])) is not None and following <= until:
        walked.append(following)
    assert elapsed(when, first, until, keep) == (len(walked), tuple(walked[-keep:]))
