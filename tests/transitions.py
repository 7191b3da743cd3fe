"""The states that a task can be claimed in, and every legal transition."""

from penstock.protocol.task import State

READY_STATES = frozenset({State.SCHEDULED, State.ERROR})

# docs/states.md draws them; each is one SQL statement.
TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.WAITING, State.SCHEDULED),  # its predecessor settled
        (State.WAITING, State.ACQUIRED),  # claim of one whose turn in its ordering key has come
        (State.SCHEDULED, State.ACQUIRED),  # claim
        (State.ERROR, State.ACQUIRED),  # claim
        (State.ACQUIRED, State.SUCCESS),  # result
        (State.ACQUIRED, State.ERROR),  # error result, or repair
        (State.ACQUIRED, State.CRITICAL_ERROR),  # error at the cap, or final failure
        (State.ACQUIRED, State.SCHEDULED),  # release: never delivered, first attempt given back
        (State.ACQUIRED, State.WAITING),  # its handler waits for an outside event
        (State.WAITING, State.SUCCESS),  # the event brought a result; seen from outside: see resume_waits
        (State.WAITING, State.ERROR),  # the event was a failure, or did not come in time
        (State.WAITING, State.CRITICAL_ERROR),
        (State.WAITING, State.CANCELLED),
        (State.SCHEDULED, State.CANCELLED),
        (State.ACQUIRED, State.CANCELLED),
        (State.ERROR, State.CANCELLED),
        (State.CRITICAL_ERROR, State.SCHEDULED),  # retry
        (State.CANCELLED, State.SCHEDULED),  # retry
        (State.CRITICAL_ERROR, State.WAITING),  # retry behind a live task of the same ordering key
        (State.CANCELLED, State.WAITING),
    }
)
