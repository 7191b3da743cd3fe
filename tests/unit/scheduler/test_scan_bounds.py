from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.task import BEGINNING, EVERYTHING, PRIORITY_MAX, PRIORITY_MIN, Position, Stretch
from penstock.scheduler.scan_bounds import LEVELS, ScanBounds

levels = st.integers(PRIORITY_MIN, PRIORITY_MAX) | st.sampled_from([PRIORITY_MIN, -1, 0, 1, PRIORITY_MAX])


def at(second: int, task_id: int = 1) -> Position:
    return Position(datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=second), task_id)


def after(stretches: Sequence[Stretch]) -> dict[int, Position]:
    """Where each priority that has a stretch of its own begins."""
    return {stretch.low: stretch.after for stretch in stretches if stretch.low == stretch.high}


def swept(reached: dict[int, Position], *, is_short: bool = False) -> ScanBounds:
    bounds = ScanBounds()
    bounds.sweep_begins(0)
    bounds.swept(reached, is_short, 0)
    return bounds


# Stretches


def test_before_anything_is_known_everything_is_looked_through_and_a_sweep_is_due() -> None:
    bounds = ScanBounds()
    assert bounds.from_bounds() == bounds.from_front() == EVERYTHING
    assert bounds.sweep_is_due(0)
    assert bounds.levels_are_old(0)


@given(known=st.lists(levels, max_size=LEVELS - 1, unique=True))
def test_stretches_hold_every_priority_once_highest_first(known: list[int]) -> None:
    bounds = swept({level: at(level) for level in known})
    for stretches in (bounds.from_bounds(), bounds.from_front()):
        assert (stretches[0].high, stretches[-1].low) == (PRIORITY_MAX, PRIORITY_MIN)
        for upper, lower in itertools.pairwise(stretches):
            assert lower.high == upper.low - 1
        assert all(stretch.low <= stretch.high for stretch in stretches)
        alone = {stretch.low for stretch in stretches if stretch.low == stretch.high}
        assert set(known) <= alone
        assert all(stretch.after == BEGINNING for stretch in stretches if stretch.low not in known)
    assert {level: position for level, position in after(bounds.from_bounds()).items() if level in known} == {
        level: at(level) for level in known
    }
    assert {stretch.after for stretch in bounds.from_front()} == {BEGINNING}


def test_a_priority_never_seen_stands_between_the_bounds_and_is_looked_through_from_its_beginning() -> None:
    bounds = swept({0: at(5), 9: at(5)})
    (between,) = [stretch for stretch in bounds.from_bounds() if stretch.low <= 4 <= stretch.high]
    assert between == Stretch(1, 8, BEGINNING)


@pytest.mark.parametrize("how", ["by claims", "by looking"])
def test_too_many_priorities_leave_nothing_bounded_until_they_are_fewer(how: str) -> None:
    bounds = swept({0: at(5)})
    many = dict.fromkeys(range(LEVELS), at(9))
    if how == "by claims":
        bounds.claimed(many, False)
    else:
        bounds.set_levels(list(many), 1)
    assert bounds.from_bounds() == bounds.from_front() == EVERYTHING
    bounds.claimed({1: at(10)}, False)
    assert bounds.from_bounds() == EVERYTHING
    bounds.set_levels([1, 0], 11)
    assert after(bounds.from_bounds()).keys() == {1, 0}
    assert after(bounds.from_front()) == {1: BEGINNING, 0: BEGINNING}


# Moving


def test_a_claim_moves_its_bounds_forward_only() -> None:
    bounds = swept({0: at(5), 1: at(5)})
    bounds.claimed({0: at(7)}, False)
    bounds.claimed({0: at(6), 1: at(5, 2)}, False)  # began earlier, ended later
    assert after(bounds.from_bounds()) == {0: at(7), 1: at(5, 2)}


def test_a_sweep_that_is_full_moves_its_bound_back_for_there_may_be_more_behind() -> None:
    bounds = swept({0: at(5), 1: at(5)})
    bounds.sweep_begins(1)
    bounds.swept({0: at(2)}, False, 1)
    assert after(bounds.from_bounds()) == {0: at(2), 1: at(5)}


def test_a_sweep_that_is_short_has_taken_all_and_moves_nothing_back() -> None:
    bounds = swept({0: at(5)})
    bounds.sweep_begins(1)
    bounds.swept({0: at(2)}, True, 1)
    assert after(bounds.from_bounds()) == {0: at(5)}


def test_priorities_no_longer_in_use_lose_their_bounds_and_others_keep_theirs() -> None:
    bounds = swept({0: at(5), 1: at(6), 2: at(7)})
    bounds.set_levels([3, 1], 4)
    assert after(bounds.from_bounds()) == {3: BEGINNING, 2: BEGINNING, 1: at(6)}  # 2 stands alone between two others
    assert not bounds.levels_are_old(13)
    assert bounds.levels_are_old(14)


# Sweeps


def test_a_sweep_is_due_every_second() -> None:
    bounds = swept({0: at(5)})
    assert not bounds.sweep_is_due(0.9)
    assert bounds.sweep_is_due(1)


def test_a_sweep_is_due_at_once_when_a_bounded_claim_found_less_than_it_had_room_for() -> None:
    bounds = swept({0: at(5)})
    bounds.claimed({}, True)
    assert bounds.sweep_is_due(0.1)
    bounds.claimed({0: at(6)}, False)
    assert not bounds.sweep_is_due(0.1)


def test_a_costly_sweep_is_followed_by_a_rest_of_nine_times_its_duration() -> None:
    bounds = ScanBounds()
    bounds.sweep_begins(10)
    assert not bounds.sweep_is_due(10.5)  # it is under way
    bounds.swept({0: at(5)}, True, 11.06)
    assert not bounds.sweep_is_due(11.06 + 8.9)
    assert bounds.sweep_is_due(11.06 + 9.1)


def test_a_process_that_stood_still_in_a_sweep_rests_for_no_more_than_ten_seconds() -> None:
    bounds = ScanBounds()
    bounds.sweep_begins(10)
    bounds.swept({0: at(5)}, True, 3610)
    assert not bounds.sweep_is_due(3619)
    assert bounds.sweep_is_due(3620.1)


def test_looking_back_ends_the_rest() -> None:
    bounds = ScanBounds()
    bounds.sweep_begins(10)
    bounds.swept({0: at(5)}, False, 12)
    bounds.look_back()
    assert bounds.sweep_is_due(12)


# All together: no task is left behind

Task = tuple[int, Position]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-2, 2), st.integers(0, 20)),
        st.tuples(st.just("claim"), st.integers(0, 1), st.integers(1, 4)),
        st.tuples(st.just("sweep begins"), st.integers(0, 1), st.integers(1, 4)),
        st.tuples(st.just("sweep ends"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("time"), st.integers(0, 3), st.just(0)),
    ),
    max_size=60,
)


class Pipeline:
    """Due tasks as a list, and schedulers that look through it as the claim statement does."""

    def __init__(self, schedulers: int) -> None:
        self.tasks: list[Task] = []
        self.bounds = [ScanBounds() for _ in range(schedulers)]
        self.sweeping: list[tuple[Sequence[Stretch], int, float] | None] = [None] * schedulers
        self.now = 0.0
        self.claims: list[list[Task]] = []

    def add(self, priority: int, second: int) -> Task:
        task = (priority, at(second, len(self.tasks) + sum(map(len, self.claims)) + 1))
        self.tasks.append(task)
        return task

    def take(self, stretches: Sequence[Stretch], limit: int) -> tuple[dict[int, Position], bool]:
        found: list[Task] = []
        for low, high, begin in stretches:
            inside = [t for t in self.tasks if low <= t[0] <= high and (low < high or t[1] > begin)]
            found += sorted(inside, key=lambda task: (-task[0], task[1]))
        found = found[:limit]
        self.tasks = [task for task in self.tasks if task not in found]
        self.claims.append(found)
        return dict(found), len(found) < limit

    def claim(self, scheduler: int, limit: int) -> None:
        """One pass: a sweep when it is due, else behind the bounds, and a sweep after that if it found nothing."""
        bounds = self.bounds[scheduler]
        if not bounds.sweep_is_due(self.now):
            bounds.claimed(*self.take(bounds.from_bounds(), limit))
            if self.claims[-1] or not bounds.sweep_is_due(self.now):
                return
        self.sweep_begins(scheduler, limit)
        self.sweep_ends(scheduler)

    def sweep_begins(self, scheduler: int, limit: int) -> None:
        bounds = self.bounds[scheduler]
        if not bounds.sweep_is_due(self.now):
            return
        bounds.sweep_begins(self.now)
        if bounds.levels_are_old(self.now):
            bounds.set_levels(sorted({task[0] for task in self.tasks}, reverse=True), self.now)
        self.sweeping[scheduler] = (bounds.from_front(), limit, self.now)

    def sweep_ends(self, scheduler: int) -> None:
        sweep = self.sweeping[scheduler]
        if sweep is not None:
            self.sweeping[scheduler] = None
            stretches, limit, _ = sweep
            self.bounds[scheduler].swept(*self.take(stretches, limit), self.now)


@given(steps=steps)
def test_no_due_task_is_missed_whatever_comes_before_the_bounds(steps: list[tuple[str, int, int]]) -> None:
    pipeline = Pipeline(schedulers=2)
    added: list[Task] = []
    for kind, first, second in steps:
        if kind == "add":
            added.append(pipeline.add(first, second))
        elif kind == "claim":
            pipeline.claim(first, second)
        elif kind == "sweep begins":
            pipeline.sweep_begins(first, second)
        elif kind == "sweep ends":
            pipeline.sweep_ends(first)
        else:
            pipeline.now += first
    # The first scheduler is gone; the other finds all that is left, by as many claims as it takes.
    pipeline.sweep_ends(1)
    pipeline.now += 9 * 60 + 1
    left = len(pipeline.tasks)
    for _ in range(left + 1):
        pipeline.claim(1, 1)
    assert pipeline.tasks == []
    claimed = [task for claim in pipeline.claims for task in claim]
    assert sorted(claimed) == sorted(added)


@given(steps=steps, priority=st.integers(3, 100))
def test_a_new_urgent_priority_is_seen_by_the_next_claim_behind_the_bounds(
    steps: list[tuple[str, int, int]], priority: int
) -> None:
    pipeline = Pipeline(schedulers=1)
    for kind, first, second in steps:
        if kind == "add":
            pipeline.add(first, second)
        elif kind == "claim":
            pipeline.claim(0, second)
    urgent = pipeline.add(priority, 0)
    pipeline.take(pipeline.bounds[0].from_bounds(), 1)
    assert pipeline.claims[-1] == [urgent]
