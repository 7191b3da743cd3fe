"""What a due schedule does: which instants run, which are misfires, when it is due next; without I/O."""

import json
import re
import zlib
from datetime import datetime, timedelta
from typing import NamedTuple

from penstock.protocol.answers import Missed
from penstock.protocol.views import timestamp
from penstock.schedules.cron import COUNTED, Timing, elapsed

JOB_PREFIX = "scheduler0:"  # of the names of schedules that fire jobs of scheduler0's API; reserved for it
MAX_MISSED_LIMIT = 1000
FEW_COUNTED = 500  # misfires of a cron expression are counted up to this where at most one of them runs
_KEPT = MAX_MISSED_LIMIT + 1  # of the elapsed instants: all that can run, and one that does not
_PLACE = re.compile(r"\{\{\s*(scheduled_time|schedule|run)\s*\}\}")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?')  # of JSON text; with the colon it is a name and no value


class Misfires(NamedTuple):
    """Skipped instants: their number, the oldest, the newest."""

    instants: int
    since: datetime
    until: datetime


class Next(NamedTuple):
    """The next instant, and when it is due, with its jitter."""

    at: datetime | None
    due: datetime | None


class Rule(NamedTuple):
    """When and how a schedule fires. max_lateness_seconds: None: unlimited."""

    name: str
    timing: Timing
    start_at: datetime | None
    end_at: datetime | None
    jitter_seconds: float
    missed: Missed
    max_missed: int
    max_lateness_seconds: float | None

    def due(self, instant: datetime) -> datetime:
        """The instant with its jitter, which is always the same for one instant."""
        if not self.jitter_seconds:
            return instant
        share = zlib.crc32(f"{self.name}\n{int(instant.timestamp())}".encode()) / 2**32
        return instant + timedelta(seconds=self.jitter_seconds * share)

    def next_after(self, instant: datetime) -> Next:
        """The first later instant within start and end, if any."""
        if self.start_at is not None and instant < self.start_at:
            instant = self.start_at - timedelta(microseconds=1)
        found = self.timing.next_after(instant)
        if found is None or (self.end_at is not None and found > self.end_at):
            return Next(None, None)
        return Next(found, self.due(found))


class Plan(NamedTuple):
    """What a round does about one schedule: instants to run, oldest first; misfires; the new state of its clock."""

    run: list[datetime]
    misfires: Misfires | None
    last: datetime
    next: Next


def plan(rule: Rule, next_at: datetime, now: datetime, grace_seconds: float, most: int | None = None) -> Plan:
    """Decide about a schedule whose ``next_at`` is due by ``now``. grace_seconds: what is no later is not missed.

    most: how many instants this round may run; those behind them have a round of their own. None: all.
    """
    longest = float("inf") if rule.max_lateness_seconds is None else rule.max_lateness_seconds
    tolerance = min(grace_seconds, longest)
    following = rule.next_after(next_at)
    alone = following.due is None or following.due > now
    if alone and now - rule.due(next_at) <= timedelta(seconds=tolerance):
        return Plan([next_at], None, next_at, following)  # nearly always
    # Instants within the jitter of now may not be due yet: they have rounds of their own.
    until = now - timedelta(seconds=rule.jitter_seconds)
    if rule.end_at is not None:
        until = min(until, rule.end_at)
    # Instants are whole seconds: those on time, and one that is not, are no more than this.
    keep = _KEPT if rule.missed is Missed.ALL else min(_KEPT, int(tolerance) + 2)
    counted = COUNTED if rule.missed is Missed.ALL else max(FEW_COUNTED, keep)
    total, seen = elapsed(rule.timing, next_at, max(until, next_at), keep, counted)
    lateness = {instant: (now - rule.due(instant)).total_seconds() for instant in seen}  # jitter mixes their order
    on_time = [instant for instant in seen if lateness[instant] <= tolerance]
    if rule.missed is Missed.ALL:
        run = [instant for instant in seen if lateness[instant] <= longest][-rule.max_missed :]
    elif rule.missed is Missed.ONE and not on_time:
        later = rule.next_after(seen[-1]).due  # once that is due, it is the newest
        is_newest = later is None or not 0 <= (now - later).total_seconds() <= longest
        run = [instant for instant in seen if is_newest and lateness[instant] <= longest][-1:]
    else:
        run = on_time
    if most is not None and len(run) > most:
        run = run[:most]
        behind = sum(instant > run[-1] for instant in seen)
        total, seen = total - behind, seen[:-behind]
    chosen = set(run)
    left = [instant for instant in seen if instant not in chosen]
    misfires = Misfires(total - len(run), next_at, left[-1] if left else next_at) if total > len(run) else None
    return Plan(run, misfires, seen[-1], rule.next_after(seen[-1]))


def run_name(schedule_id: int, instant: datetime) -> str:
    """One name for each run of each schedule: ``7:2030-01-31T08:00:00.000000Z``."""
    return f"{schedule_id}:{timestamp(instant)}"


def render(payload: str, name: str, schedule_id: int, instant: datetime) -> str:
    """The payload with ``{{scheduled_time}}``, ``{{schedule}}`` and ``{{run}}`` filled in, inside its string values.

    Nothing else changes, names of members included. What is filled in is not scanned again, and cannot end its string.
    """
    if "{{" not in payload:
        return payload
    values = {
        "scheduled_time": timestamp(instant),
        "schedule": json.dumps(name)[1:-1],
        "run": run_name(schedule_id, instant),
    }

    def fill(match: re.Match[str]) -> str:
        text = match[0]
        return text if "{{" not in text or match[1] else _PLACE.sub(lambda place: values[place[1]], text)

    return _STRING.sub(fill, payload)
