"""Tasks of one ordering key: the row of its head, enqueuers whose transaction is open, promotion by rows and by turns.

A statement sees what was committed before it began. Who enqueues holds the head's row until the end of the transaction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from docs.models.checker import Model, Step


class Key(NamedTuple):
    """tasks: the state of each, "" before it is there. head: whether the key is taken. open: the task of a transaction
    that is not committed, with its state and whether it made the head. turn: the task that a turn promotes. later: the
    key is noted to be looked at."""

    tasks: tuple[str, ...]
    head: bool = False
    open: tuple[int, str, bool] | None = None
    turn: int | None = None
    later: bool = False

    def at(self, place: int, state: str) -> Key:
        return self._replace(tasks=(*self.tasks[:place], state, *self.tasks[place + 1 :]))


BUGS = ("the head is not locked", "a turn stays", "the newest goes first", "a cancelled task promotes none")


def model(tasks: int = 4) -> Model:
    def next_of(key: Key, bug: str | None) -> Iterator[Key]:
        """Nothing runs in the key: the next task is promoted, or the key is forgotten, or noted."""
        waiting = [place for place, state in enumerate(key.tasks) if state == "WAITING"]
        if waiting:
            place = waiting[-1 if bug == "the newest goes first" else 0]
            yield key.at(place, "SCHEDULED")._replace(later=False)
            if key.turn is None:
                yield key._replace(turn=place, later=False)
        elif key.open is None or bug == "the head is not locked":
            yield key._replace(head=False, later=False)
        else:
            yield key._replace(later=True)

    def steps(key: Key, bug: str | None) -> Iterator[Step]:
        if key.open is None and "" in key.tasks:
            place = key.tasks.index("")
            yield "enqueue", key._replace(open=(place, "WAITING" if key.head else "SCHEDULED", not key.head), head=True)
        elif key.open is not None:
            place, state, made = key.open
            yield "commit", key.at(place, state)._replace(open=None)
            undone = key.at(place, "ENDED")._replace(open=None)
            yield "roll back", undone._replace(head=key.head and not made)
        for place, state in enumerate(key.tasks):
            if state == "SCHEDULED":
                yield "claim", key.at(place, "ACQUIRED")
            if state == "WAITING" and key.turn == place:
                yield "claim turn", key.at(place, "ACQUIRED")._replace(turn=place if bug == "a turn stays" else None)
            if state == "ACQUIRED":
                yield "fail", key.at(place, "SCHEDULED")
                for after in next_of(key.at(place, "ENDED"), bug):
                    yield "settle", after
            if state in ("SCHEDULED", "ACQUIRED"):
                ended = key.at(place, "ENDED")
                for after in [ended] if bug == "a cancelled task promotes none" else next_of(ended, bug):
                    yield "cancel", after
            elif state == "WAITING":
                yield "cancel", key.at(place, "ENDED")
        if key.turn is not None:
            over = key._replace(turn=None)
            if key.tasks[key.turn] == "WAITING":
                yield "end turn", over.at(key.turn, "SCHEDULED")
            elif bug != "a turn stays" or not {"SCHEDULED", "ACQUIRED"} & set(key.tasks):
                for after in next_of(over, bug):
                    yield "end turn", after
        if key.later:
            for after in next_of(key, bug):
                yield "look", after

    def broken(key: Key) -> str | None:
        running = [place for place, state in enumerate(key.tasks) if state in ("SCHEDULED", "ACQUIRED")]
        if len(running) > 1:
            return "two tasks of the key may run"
        if running and "WAITING" in key.tasks[: running[0]]:
            return "a task runs before an older one"
        if running and not key.head:
            return "a task runs in a key that is not taken"
        return None

    return Model(
        "ordering", Key(("",) * tasks), steps, broken,
        is_over=lambda key: key.open is None and set(key.tasks) <= {"", "ENDED"} and not key.head,
        seen=lambda key: key.tasks,
        bugs=BUGS, faults=frozenset({"cancel", "roll back"}),
    )  # fmt: skip
