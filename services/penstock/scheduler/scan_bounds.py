"""Where in the order of due tasks the next claim begins. See docs/decisions/011-bounded-claim.md.

Tasks before a bound (a retry, a released claim, a late commit, a run_at in the past) are found by a sweep from the
front. A new priority lies between the bounds and is found at once.
"""

from collections.abc import Mapping, Sequence

from penstock.protocol.task import BEGINNING, EVERYTHING, PRIORITY_MAX, PRIORITY_MIN, Position, Stretch

LEVELS = 64  # priorities with a bound of their own; where there are more, every claim sweeps
_SWEEP_SECONDS = 1.0
_LEVELS_SECONDS = 10.0
_CHEAP_SECONDS = 0.06  # a few ms of work take so long on a busy machine
_REST = 9  # a sweep that takes longer is followed by so many times the excess without one,
_REST_SECONDS = 10.0  # yet no longer than this: a process that was stopped in the midst of one took it for slow


class ScanBounds:
    """The bounds of one scheduler; times are monotonic seconds."""

    def __init__(self) -> None:
        self._positions: dict[int, Position] = {}
        self._is_bounded = True
        self._wanted = True
        self._levels_read_at = float("-inf")
        self._sweeping_since: float | None = None
        self._swept_at = float("-inf")
        self._rest_until = float("-inf")

    def sweep_is_due(self, now: float) -> bool:
        """Whether the next claim should begin at the front; not soon after a costly sweep."""
        may_sweep = self._sweeping_since is None and now >= self._rest_until
        return may_sweep and (self._wanted or now - self._swept_at >= _SWEEP_SECONDS)

    def levels_are_old(self, now: float) -> bool:
        """Whether the priorities in use should be read again."""
        return now - self._levels_read_at >= _LEVELS_SECONDS

    def set_levels(self, levels: Sequence[int], now: float) -> None:
        """Set all priorities in use; from ``LEVELS`` of them on nothing is bounded."""
        self._levels_read_at = now
        self._is_bounded = len(levels) < LEVELS
        self._positions = {level: self._positions.get(level, BEGINNING) for level in levels} if self._is_bounded else {}

    def from_front(self) -> Sequence[Stretch]:
        """The stretches of a sweep: each priority from its beginning, and all between them."""
        return _stretches(dict.fromkeys(self._positions, BEGINNING)) if self._is_bounded else EVERYTHING

    def from_bounds(self) -> Sequence[Stretch]:
        """The stretches of a claim between two sweeps: each priority behind its bound, and all between them."""
        return _stretches(self._positions) if self._is_bounded else EVERYTHING

    def claimed(self, reached: Mapping[int, Position], is_short: bool) -> None:
        """A claim took all tasks up to these positions. is_short: it had room for more, so some may be before them."""
        self._wanted = is_short
        self._move(reached, may_go_back=False)

    def look_back(self) -> None:
        """Sweep at the next chance, at any cost: there are tasks before the bounds."""
        self._wanted = True
        self._rest_until = float("-inf")

    def sweep_begins(self, now: float) -> None:
        """No other sweep begins until ``swept``."""
        self._sweeping_since = now

    def swept(self, reached: Mapping[int, Position], is_short: bool, now: float) -> None:
        """The sweep took all tasks up to these positions; unless it is short, more may follow."""
        started = now if self._sweeping_since is None else self._sweeping_since
        self._sweeping_since = None
        self._swept_at = now
        self._rest_until = now + min(_REST_SECONDS, _REST * max(0.0, now - started - _CHEAP_SECONDS))
        self._wanted = is_short
        self._move(reached, may_go_back=not is_short)

    def _move(self, reached: Mapping[int, Position], *, may_go_back: bool) -> None:
        if not may_go_back:
            reached = {level: max(at, self._positions.get(level, at)) for level, at in reached.items()}
        if self._is_bounded:
            self._positions |= reached
            self._is_bounded = len(self._positions) < LEVELS


def _stretches(positions: Mapping[int, Position]) -> Sequence[Stretch]:
    """Every priority once, highest first; those without a position are joined."""
    stretches = []
    above = PRIORITY_MAX
    for level in sorted(positions, reverse=True):
        if level < above:
            stretches.append(Stretch(level + 1, above, BEGINNING))
        stretches.append(Stretch(level, level, positions[level]))
        above = level - 1
    if above >= PRIORITY_MIN:
        stretches.append(Stretch(PRIORITY_MIN, above, BEGINNING))
    return tuple(stretches)
