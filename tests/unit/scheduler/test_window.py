from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.db.pool import Store
from penstock.protocol.task import BEGINNING, Claimed
from penstock.scheduler.window import _ROUTES_KEPT, ClaimWindow, Throughput
from penstock.tasks.claim import InFlight

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
AGED_SECONDS = 2.0  # as count_in_flight has it
FLOOR, LIMIT = 1000, 100_000


def window(*, floor: int = FLOOR, limit: int = LIMIT, seconds: float = 1.0) -> ClaimWindow:
    settings: Any = SimpleNamespace(in_flight_floor=floor, in_flight_limit=limit, in_flight_seconds=seconds)
    store: Any = None  # its figures are given to it
    return ClaimWindow(store, settings, Throughput(store), None)


def found(count: int, aged: int = 0, now: float = 0.0) -> InFlight:
    return InFlight(count, aged, EPOCH + timedelta(seconds=now - AGED_SECONDS))


def count(window: ClaimWindow, tasks: int, now: float, *, aged: int = 0, takes: float = 0.0) -> None:
    window.count_since(now - takes)
    window.counted(found(tasks, aged, now), now - takes, now)


# Room


def test_a_new_window_is_counted_before_it_is_used_and_has_its_floor() -> None:
    new = window()
    assert new.wants_count(0)
    assert new.full_for_seconds(0) == 0
    count(new, 300, 0)
    assert (new.size, new.in_flight, new.room) == (FLOOR, 300, FLOOR - 300)


def test_what_is_claimed_or_set_aside_takes_room() -> None:
    used = window()
    count(used, 0, 0)
    used.reserved += 400
    assert used.room == FLOOR - 400
    used.reserved -= 400
    used.in_flight += 400
    assert used.room == FLOOR - 400
    used.in_flight += 5 * FLOOR  # other schedulers, other windows
    assert used.room == 0


def test_a_floor_above_the_limit_gives_way() -> None:
    assert window(floor=1000, limit=7).size == 7


# Size


def test_the_window_follows_what_is_settled_up_and_down() -> None:
    adaptive = window()
    count(adaptive, 0, 0)
    now = 0.0
    sizes = {}
    for rate in (20_000, 200, 1_000_000):
        for _ in range(25):
            now += 0.1
            adaptive.in_flight += rate // 10
            count(adaptive, 0, now)
        sizes[rate] = adaptive.size
    assert sizes[20_000] == pytest.approx(20_000, rel=0.01)
    assert sizes[200] == FLOOR
    assert sizes[1_000_000] == LIMIT


def test_the_seconds_of_throughput_are_a_setting() -> None:
    patient = window(seconds=3)
    count(patient, 0, 0)
    patient.pace, patient.run_seconds = 5000, 0.0
    count(patient, 0, 1)
    assert patient.size == 15_000


def test_tasks_that_run_long_are_kept_in_flight_twice_over() -> None:
    long = window()
    long.pace, long.run_seconds = 500, 10
    count(long, 5000, 0)
    assert long.size == 500 * (1 + 2 * 10)


def test_tasks_found_gone_by_a_whole_count_are_no_burst_of_throughput() -> None:
    """They were carried over for a while; taken for what was settled since the last count, they would blow it up."""
    steady = window()
    steady.pace, steady.run_seconds = 1000, 1
    count(steady, 3000, 0, aged=3000)
    for now in (0.2, 0.4, 0.6, 0.8):
        steady.in_flight += 200
        steady.count_since(now)
        steady.counted(found(200, aged=200, now=now), now, now)  # none of these is gone, as far as it looked
    assert steady.in_flight == 3000 + 4 * 200
    count(steady, 3000, 2)
    assert (steady.size, steady.in_flight) == (3000, 3000)


# Counting


def test_a_count_begins_where_the_last_one_ended_and_with_the_oldest_task_once_a_second() -> None:
    counting = window()
    assert counting.count_since(0) == BEGINNING.run_at
    counting.counted(found(100, aged=30, now=0), 0, 0)
    assert counting.count_since(0.5) == EPOCH - timedelta(seconds=AGED_SECONDS)
    counting.counted(found(50, aged=5, now=0.5), 0.5, 0.5)
    assert counting.in_flight == 30 + 50
    assert counting.count_since(0.9) == EPOCH + timedelta(seconds=0.5 - AGED_SECONDS)
    counting.counted(found(40, aged=0, now=0.9), 0.9, 0.9)
    assert counting.in_flight == 30 + 5 + 40
    assert counting.count_since(1.0) == BEGINNING.run_at
    counting.counted(found(60, aged=10, now=1), 1, 1)
    assert counting.in_flight == 60


def test_a_whole_count_that_was_slow_is_not_soon_repeated() -> None:
    slow = window()
    count(slow, 0, 10, takes=2)
    assert slow.count_since(10 + 39) != BEGINNING.run_at
    assert slow.count_since(10 + 41) == BEGINNING.run_at


def test_with_room_left_a_count_is_good_for_a_second() -> None:
    roomy = window()
    count(roomy, 10, 0)
    assert not roomy.wants_count(0.9)
    assert roomy.wants_count(1.0)


def test_a_full_window_waits_until_a_share_of_it_can_have_become_free() -> None:
    full = window()
    full.pace, full.run_seconds = 10_000, 0
    count(full, 10_000, 0)
    assert full.size == full.in_flight
    assert full.full_for_seconds(0) == pytest.approx(0.05)
    assert not full.wants_count(0.04)
    assert full.full_for_seconds(0.06) == 0
    assert full.wants_count(0.06)


def test_a_full_window_with_nothing_settled_is_counted_again_at_once() -> None:
    full = window()
    count(full, FLOOR, 0)
    assert full.full_for_seconds(0) == 0
    assert full.wants_count(0)


def test_counting_takes_a_twentieth_of_the_time_at_the_most() -> None:
    slow = window()
    count(slow, 0, 0)
    slow.in_flight += FLOOR
    slow.count_since(0.1)
    slow.counted(found(FLOOR, now=0.5), 0.1, 0.5)
    assert not slow.wants_count(0.5 + 7.9)
    assert slow.wants_count(0.5 + 8.1)


def test_a_slow_count_is_repeated_before_a_quarter_can_have_settled() -> None:
    busy = window()
    busy.pace, busy.run_seconds = 10_000, 0
    count(busy, 0, 0)
    busy.in_flight += 10_000
    busy.count_since(0.1)
    busy.counted(found(10_000, now=0.5), 0.1, 0.5)
    assert not busy.wants_count(0.5 + 0.24)
    assert busy.wants_count(0.5 + 0.26)


def test_a_window_that_has_run_low_grows_at_once_to_what_was_settled_but_tenfold_at_most() -> None:
    low = window()
    count(low, 0, 0)
    sizes = []
    for now, left in ((0.1, 200), (0.2, 1600)):
        low.in_flight += low.size
        count(low, left, now)
        sizes.append(low.size)
    assert sizes == [8 * FLOOR, 66 * FLOOR]
    burst = window()
    count(burst, 0, 0)
    burst.in_flight += 5 * FLOOR
    count(burst, 0, 0.1)
    assert burst.size == 10 * FLOOR


def test_the_routes_of_a_bounded_number_of_actions_are_kept() -> None:
    throughput = Throughput(Store("postgresql://nowhere"))
    throughput.saw(Claimed(n, n, f"a{n}", "{}", None, 0.0, False, "video") for n in range(_ROUTES_KEPT + 1))
    assert len(throughput._route_of) == _ROUTES_KEPT
    assert throughput._route_of[f"a{_ROUTES_KEPT}"] == "video"


# A pipeline with a clock of its own


@dataclass
class Seen:
    """From the second half: the share of slots at work, and the most tasks in flight."""

    busy: float
    most: int


def run_pipeline(*, slots: int, run_seconds: float, seconds: float, count_seconds: float = 0.001) -> Seen:
    """A scheduler that claims whatever there is room for, and a fleet that runs so many tasks at once, each so long."""
    tick, way_seconds, pace_seconds = 0.02, 0.05, 10.0
    tested = window()
    queue: deque[tuple[float, int]] = deque()
    running: list[tuple[float, int]] = []
    claimed_at: dict[int, float] = {}
    ended: deque[float] = deque()
    paced_at, now, number = -1.0, 0.0, 0
    busy: list[int] = []
    most = 0
    while now < seconds:
        while running and running[0][0] <= now:
            del claimed_at[heapq.heappop(running)[1]]
            ended.append(now)
        while queue and queue[0][0] <= now and len(running) < slots:
            heapq.heappush(running, (now + run_seconds, queue.popleft()[1]))
        if now - paced_at >= 0.5:
            paced_at = now
            while ended and ended[0] < now - pace_seconds:
                ended.popleft()
            tested.pace, tested.run_seconds = len(ended) / pace_seconds, run_seconds if ended else 0.0
        if not tested.full_for_seconds(now):
            if tested.wants_count(now):
                since = (tested.count_since(now) - EPOCH).total_seconds()
                young = [at for at in claimed_at.values() if at >= since]
                tested.counted(
                    found(len(young), sum(at < now - AGED_SECONDS for at in young), now), now, now + count_seconds
                )
            room = min(2000, tested.room)
            for _ in range(room):
                claimed_at[number] = now
                queue.append((now + way_seconds, number))
                number += 1
            tested.in_flight += room
        if now > seconds / 2:
            busy.append(len(running))
            most = max(most, len(claimed_at))
        now += tick
    return Seen(sum(busy) / len(busy) / slots, most)


@pytest.mark.parametrize(
    ("slots", "run_seconds", "seconds"),
    [(100, 0.02, 6), (100, 0.5, 10), (1000, 1.0, 30), (3000, 3.0, 60), (2000, 10.0, 120)],
)
def test_workers_are_kept_busy_and_no_more_is_in_flight_than_that_needs(
    slots: int, run_seconds: float, seconds: float
) -> None:
    seen = run_pipeline(slots=slots, run_seconds=run_seconds, seconds=seconds)
    assert seen.busy > 0.95
    throughput = slots / run_seconds
    assert seen.most < max(FLOOR, 1.3 * throughput * (1 + 2 * run_seconds)) + 2000


def test_workers_are_kept_busy_while_counts_are_slow() -> None:
    seen = run_pipeline(slots=400, run_seconds=0.02, seconds=10, count_seconds=0.06)
    assert seen.busy > 0.95
