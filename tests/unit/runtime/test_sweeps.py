"""Looks by time: from the front once in a while, and behind what left long ago in between."""

from __future__ import annotations

import pytest

from penstock.runtime import sweeps
from penstock.runtime.sweeps import RECENT_SECONDS, Sweeps


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(sweeps, "monotonic", lambda: self.now)

    def look(self, looks: Sweeps, seconds: float = 0.001) -> bool:
        """Whether a look that takes so long began at the front."""
        with looks.look() as since:
            self.now += seconds
        assert since in (None, RECENT_SECONDS)
        return since is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_cheap_sweep_is_followed_by_one_a_second_later(clock: Clock) -> None:
    looks = Sweeps()
    assert clock.look(looks)
    assert not clock.look(looks)
    clock.now += 0.9
    assert not clock.look(looks)
    clock.now += 0.1
    assert clock.look(looks)


@pytest.mark.parametrize(("took", "rest"), [(0.1, 5.0), (60.0, 10.0)])
def test_a_sweep_that_takes_long_is_followed_by_a_longer_rest_yet_not_over_ten_seconds(
    clock: Clock, took: float, rest: float
) -> None:
    looks = Sweeps()
    assert clock.look(looks, took)
    clock.now += rest - 0.1
    assert not clock.look(looks)
    clock.now += 0.1
    assert clock.look(looks)


def test_what_only_a_sweep_finds_is_followed_by_a_sweep(clock: Clock) -> None:
    looks = Sweeps()
    assert clock.look(looks)
    looks.found(RECENT_SECONDS - 1)
    assert not clock.look(looks)
    looks.found(RECENT_SECONDS)
    assert clock.look(looks)
    assert not clock.look(looks)


def test_a_sweep_that_fails_is_tried_again(clock: Clock) -> None:
    looks = Sweeps()
    with pytest.raises(ValueError, match="away"), looks.look():
        raise ValueError("away")
    assert clock.look(looks)
