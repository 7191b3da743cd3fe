"""Progress in a partition: which records are done with, the offset to commit, and how often each was handed out.

Kafka keeps one offset for a group: everything before it is done. Records are done in any order, so the end of the
finished ones without a gap is committed. Kafka does not count deliveries either; they are kept in the note beside the
offset, committed before a record is handed out, so that a crash of the receiver is counted.
"""

import secrets
from collections import deque

_MOST_STRETCHES = 16


class Progress:
    """One partition while it is this member's. position: the offset to commit, None before the first record.

    is_known: False until the group's position is known. is_dirty: there is something to commit. token: of receipts.
    """

    def __init__(self, position: int | None = None, note: str = "", *, is_known: bool = True) -> None:
        self._taken: deque[int] = deque()  # handed out or finished, in the order of the partition
        self._finished: set[int] = set()
        self.position = position
        self._next = 0  # behind the last that was handed out
        self._before = _read(note)
        self.is_known = is_known
        self.is_dirty = False
        self.token = secrets.token_hex(4)

    def hand_out(self, offset: int) -> int:
        """Count the delivery of a record; returns its deliveries during earlier assignments of the partition."""
        self._taken.append(offset)
        self._next = offset + 1
        if self.position is None:
            self.position = offset
        return self._times_before(offset)

    def _times_before(self, offset: int) -> int:
        return next((times for end, times in self._before if offset < end), 0)

    def finish(self, offset: int) -> None:
        self._finished.add(offset)
        self.is_dirty = True
        while self._taken and self._taken[0] in self._finished:
            done = self._taken.popleft()
            self._finished.discard(done)
            self.position = done + 1

    @property
    def note(self) -> str:
        """The note to commit: ends of stretches of records, and how often each stretch was handed out by now."""
        ends = sorted({self._next, *(end for end, _ in self._before)})
        left = [(end, self._times_before(end - 1) + (end <= self._next)) for end in ends if end > (self.position or 0)]
        return ",".join(f"{end}:{times}" for end, times in left[:_MOST_STRETCHES])


def _read(note: str) -> list[tuple[int, int]]:
    """Stretches by their end, ascending; none of a note that cannot be read."""
    stretches = []
    try:
        for part in filter(None, note.split(",")):
            end, times = part.split(":")
            stretches.append((int(end), int(times)))
    except ValueError:
        return []
    return sorted(stretches)[:_MOST_STRETCHES]
