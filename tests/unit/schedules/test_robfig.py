"""The dialect of robfig/cron 1.2.0 against an oracle that walks over every second or minute, written on its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.schedules.cron import EXPRESSION_MAX_CHARS, ROBFIG, CronError, timing
from penstock.schedules.robfig import every_seconds, is_shifted

ANCHOR = datetime(2026, 1, 1, tzinfo=UTC)
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)
BOUNDS = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
NAMES = [
    {}, {}, {}, {},
    {name: n for n, name in enumerate(MONTHS, 1)},
    {name: n for n, name in enumerate(DAYS)},
]  # fmt: skip


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# The oracle: bits of each field and the test of a moment, as the manual of the library has them


def read(field: str, place: int) -> tuple[set[int], bool]:
    """Values, and whether there is a star."""
    low, high = BOUNDS[place]
    found: set[int] = set()
    star = False
    for term in field.split(","):
        span, _, step = term.partition("/")
        if span in ("*", "?"):
            star, first, last = True, low, high
        else:
            ends = [NAMES[place].get(end.upper()) or int(NAMES[place].get(end.upper(), end)) for end in span.split("-")]
            first, last = ends[0], ends[-1]
            if step and len(ends) == 1:
                last = high
        found |= {n for n in range(first, last + 1) if (n - first) % int(step or 1) == 0}
    return found, star


def matching(spec: str, zone: str, after: datetime, until: datetime, step: timedelta) -> Iterator[datetime]:
    fields = spec.split()
    fields += ["*"] * (6 - len(fields))
    seconds, minutes, hours, days, months, weekdays = (read(field, place) for place, field in enumerate(fields))
    info = ZoneInfo(zone)
    instant = after
    while (instant := instant + step) <= until:
        wall = instant.astimezone(info)
        on_day, on_weekday = wall.day in days[0], wall.isoweekday() % 7 in weekdays[0]
        day = (on_day and on_weekday) if days[1] or weekdays[1] else (on_day or on_weekday)
        if (
            wall.second in seconds[0] and wall.minute in minutes[0] and wall.hour in hours[0]
            and wall.month in months[0] and day
        ):  # fmt: skip
            yield instant


def fires(spec: str, zone: str, after: datetime, until: datetime) -> Iterator[datetime]:
    when = timing(ROBFIG + spec, zone, ANCHOR)
    instant = when.next_after(after)
    while instant is not None and instant <= until:
        yield instant
        instant = when.next_after(instant)


YEAR = [
    "0 30 2 * * *", "0 */30 1-3 * * *", "0 0 0 13 * FRI", "0 0 0 */2 * fri", "0 0 0 13 * *", "0 0 12 ? * mon-fri/2",
    "0 15 5/6 1-7 Jan-JUN/2 sun", "0 5/20 ? * * *", "0 9 * * *", "0 0 12 * * 3,sat", "0 0 0 31 * ?",
    "0 0 0 1,*/10 * tue",
    "0 59 23 28-31 feb,dec *", "0 0 0 1-31 * 1", "0 45 1 * 4,10 0-6",
]  # fmt: skip


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
@pytest.mark.parametrize("spec", YEAR)
def test_every_fire_around_both_changes_of_clocks_is_that_of_the_oracle(spec: str, zone: str) -> None:
    """A time that is skipped does not run, and one that comes twice runs twice, whatever the fields."""
    for start, end in (("2026-03-01", "2026-04-20"), ("2026-10-01", "2026-11-15")):
        after, until = utc(start), utc(end)
        assert list(fires(spec, zone, after, until)) == list(matching(spec, zone, after, until, MINUTE))


def terms(place: int) -> st.SearchStrategy[str]:
    low, high = BOUNDS[place]
    number = st.integers(low, high).map(str)
    if NAMES[place]:
        number |= st.sampled_from([*NAMES[place], *(name.lower() for name in NAMES[place])])
    step = st.one_of(st.just(""), st.integers(1, high).map(lambda n: f"/{n}"))
    pair = st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda p: f"{min(p)}-{max(p)}")
    span = st.one_of(st.sampled_from(["*", "?"]), number, pair)
    term = st.tuples(span, step).map("".join)
    return st.lists(term, min_size=1, max_size=3).map(",".join)


@given(st.tuples(*(terms(place) for place in range(3))), st.tuples(terms(3), terms(5)))
@settings(max_examples=60)
def test_random_fields_fire_as_the_oracle_says(clock: tuple[str, ...], days: tuple[str, str]) -> None:
    spec = " ".join((*clock, days[0], "*", days[1]))
    assume(len(ROBFIG + spec) <= EXPRESSION_MAX_CHARS)
    after = utc("2026-05-31T23:59:00")
    until = after + timedelta(minutes=75)
    assert list(fires(spec, "UTC", after, until)) == list(matching(spec, "UTC", after, until, SECOND))


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ("@every 1m", 60), ("@every 1h30m10s", 5410), ("@every 1.5h", 5400), ("@every 90s", 90), ("@every 1ms", 1),
        ("@every 0", 1), ("@every 1s999ms", 1), ("@every 2500ms", 2), ("@every -5m", 1), ("@every .5m", 30),
        ("@every 3000000us", 3), ("@every 3000000\u00b5s", 3), ("@every 3000000\u03bcs", 3),
        ("@every 87600h", 315360000),
    ],
)  # fmt: skip
def test_every_takes_durations_as_go_writes_them(spec: str, seconds: int) -> None:
    when = timing(ROBFIG + spec, "Europe/Berlin", ANCHOR)
    assert when.next_after(ANCHOR) == ANCHOR + timedelta(seconds=seconds)
    assert when.next_after(ANCHOR + timedelta(seconds=seconds)) == ANCHOR + timedelta(seconds=2 * seconds)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("@yearly", "0 0 0 1 1 *"), ("@annually", "0 0 0 1 1 *"), ("@monthly", "0 0 0 1 * *"),
        ("@weekly", "0 0 0 * * 0"), ("@daily", "0 0 0 * * *"), ("@midnight", "0 0 0 * * *"), ("@hourly", "0 0 * * * *"),
    ],
)  # fmt: skip
def test_names_are_what_they_say(name: str, spec: str) -> None:
    after, until = utc("2026-12-01"), utc("2027-02-02")
    assert list(fires(name, "Europe/Berlin", after, until)) == list(
        matching(spec, "Europe/Berlin", after, until, MINUTE)
    )


@pytest.mark.parametrize(
    "spec",
    [
        "", " ", "* * * *", "* * * * * * *", "60 * * * * *", "* 60 * * * *", "* * 24 * * *", "* * * 0 * *",
        "* * * 32 * *",
        "* * * * 0 *", "* * * * 13 *", "* * * * * 7", "* * * * * sunday", "5-1 * * * * *", "1-2-3 * * * * *",
        "*/0 * * * * *", "*/x * * * * *", "1/2/3 * * * * *", "-1 * * * * *", ", * * * * *", "* * * L * *",
        "* * * 15W * *",
        "* * * * * 5#2", "* * * * * 5L", "@reboot", "@Daily", "@every", "@every 1d", "@every x", "@every 1 m",
        "@every 1m ", "@every 9999999h", "TZ=UTC 0 0 0 * * *", "CRON_TZ=UTC 0 0 0 * * *", "0 0 0 30 2 *", "x" * 201,
    ],
)  # fmt: skip
def test_what_the_parser_refuses_is_refused(spec: str) -> None:
    with pytest.raises(CronError) as caught:
        timing(ROBFIG + spec, "UTC", ANCHOR)
    assert caught.value.field == "expression"


@pytest.mark.parametrize(
    ("spec", "same"),
    [("*-9 0 0 * * *", "* 0 0 * * *"), ("1,,2 0 0 * * *", "1,2 0 0 * * *"), ("+5 05 0 * * *", "5 5 0 * * *")],
)
def test_oddities_of_the_parser_are_taken(spec: str, same: str) -> None:
    after, until = utc("2026-01-01"), utc("2026-01-01T01:00:00")
    found = list(fires(spec, "UTC", after - SECOND, until))
    assert found
    assert found == list(matching(same, "UTC", after - SECOND, until, SECOND))


def test_five_fields_are_told_from_six() -> None:
    assert is_shifted("0 9 * * *")
    assert not is_shifted("0 0 9 * * *")
    assert not is_shifted("@every 1m")


def test_a_number_without_a_unit_is_refused_in_no_time() -> None:
    with pytest.raises(ValueError, match="must be like @every 90s"):
        every_seconds("@every " + "1" * 500_000)
