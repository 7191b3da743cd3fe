"""What is to be done about a schedule that is due: which instants run, which are missed, when it is due next. Pure."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from penstock.schedules.cron import COUNTED, Timing, passed

JOB_PREFIX = "scheduler0:"
"""Begins the names of schedules that fire jobs of scheduler0's API, which alone makes them."""
MAX_MISSED_LIMIT = 1000
FEW_COUNTED = 500
"""How far missed instants of a cron expression are counted where at most one of them is made up for."""
_KEPT = MAX_MISSED_LIMIT + 1  # of the instants that have passed: all that can be run, and one that is not
_PLACE = re.compile(r"\{\{\s*(scheduled_time|schedule|run)\s*\}\}")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?')  # of JSON text; with the colon it is a name and no value


class Missed(StrEnum):
    """What becomes of instants at which nothing could be fired: none, the newest, or all of them are made up for."""

    SKIP = "skip"
    ONE = "one"
    ALL = "all"


class Overlap(StrEnum):
    """What a fire does while the task before it is not settled: go on, record a skip, or wait in line."""

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE = "queue"


class Lost(NamedTuple):
    """Instants that are not made up for: how many, the oldest, the newest."""

    instants: int
    since: datetime
    until: datetime


class Next(NamedTuple):
    """The instant to be fired next, and when it is due: with its jitter."""

    at: datetime | None
    due: datetime | None


@dataclass(frozen=True, slots=True)
class Rule:
    """When and how a schedule fires. Times in seconds; max_lateness_seconds: None for any."""

    name: str
    timing: Timing
    start_at: datetime | None
    end_at: datetime | None
    jitter_seconds: float
    missed: Missed
    max_missed: int
    max_lateness_seconds: float | None

    def due(self, instant: datetime) -> datetime:
        """The instant with its jitter, which is the same whoever asks and whenever."""
        if not self.jitter_seconds:
            return instant
        share = zlib.crc32(f"{self.name}\n{int(instant.timestamp())}".encode()) / 2**32
        return instant + timedelta(seconds=self.jitter_seconds * share)

    def next_after(self, instant: datetime) -> Next:
        """The first instant later than that one, within start and end; nothing when there is none."""
        if self.start_at is not None and instant < self.start_at:
            instant = self.start_at - timedelta(microseconds=1)
        found = self.timing.next_after(instant)
        if found is None or (self.end_at is not None and found > self.end_at):
            return Next(None, None)
        return Next(found, self.due(found))


class Plan(NamedTuple):
    """What a round does about one schedule: instants to run, oldest first; those lost; where its clock goes."""

    run: list[datetime]
    lost: Lost | None
    last: datetime
    next: Next


def plan(rule: Rule, next_at: datetime, now: datetime, grace_seconds: float) -> Plan:
    """Decide about a schedule whose ``next_at`` is due by ``now``.

    grace_seconds: an instant no later than this is on time, whatever the policy says about missed ones.
    """
    following = rule.next_after(next_at)
    alone = following.due is None or following.due > now
    if alone and now - rule.due(next_at) <= timedelta(seconds=_tolerance(rule, grace_seconds)):
        return Plan([next_at], None, next_at, following)  # nearly always
    # What lies within the jitter of now may not be due yet: it has rounds of its own.
    until = now - timedelta(seconds=rule.jitter_seconds)
    if rule.end_at is not None:
        until = min(until, rule.end_at)
    tolerance = _tolerance(rule, grace_seconds)
    # Instants are whole seconds: those on time, and one that is not, are no more than this.
    keep = _KEPT if rule.missed is Missed.ALL else min(_KEPT, int(tolerance) + 2)
    counted = COUNTED if rule.missed is Missed.ALL else max(FEW_COUNTED, keep)
    total, seen = passed(rule.timing, next_at, max(until, next_at), keep, counted)
    longest = float("inf") if rule.max_lateness_seconds is None else rule.max_lateness_seconds
    lateness = {instant: (now - rule.due(instant)).total_seconds() for instant in seen}  # jitter mixes their order
    on_time = [instant for instant in seen if lateness[instant] <= tolerance]
    if rule.missed is Missed.ALL:
        run = [instant for instant in seen if lateness[instant] <= longest][-rule.max_missed :]
    elif rule.missed is Missed.ONE and not on_time:
        run = [instant for instant in seen if lateness[instant] <= longest][-1:]
    else:
        run = on_time
    chosen = set(run)
    left = [instant for instant in seen if instant not in chosen]
    lost = Lost(total - len(run), next_at, left[-1] if left else next_at) if total > len(run) else None
    return Plan(run, lost, seen[-1], rule.next_after(seen[-1]))


def _tolerance(rule: Rule, grace_seconds: float) -> float:
    return grace_seconds if rule.max_lateness_seconds is None else min(grace_seconds, rule.max_lateness_seconds)


def run_name(schedule_id: int, instant: datetime) -> str:
    """One name for each run of each schedule: ``7:2030-01-31T08:00:00.000000Z``."""
    return f"{schedule_id}:{_text(instant)}"


def render(payload: str, name: str, schedule_id: int, instant: datetime) -> str:
    """The payload with ``{{scheduled_time}}``, ``{{schedule}}`` and ``{{run}}`` filled in, inside its string values.

    Names of members stay as they are, and so does every other character of the text. What is filled in is not read
    again, and cannot end the string that it stands in.
    """
    if "{{" not in payload:
        return payload
    values = {
        "scheduled_time": _text(instant),
        "schedule": json.dumps(name)[1:-1],
        "run": run_name(schedule_id, instant),
    }

    def fill(match: re.Match[str]) -> str:
        text = match[0]
        return text if "{{" not in text or match[1] else _PLACE.sub(lambda place: values[place[1]], text)

    return _STRING.sub(fill, payload)


def _text(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def queue_of(schedule_id: int) -> str:
    """The ordering key of a schedule whose fires wait for each other and that names none."""
    return f"schedule:{schedule_id}"
