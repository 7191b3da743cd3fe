"""A task that waits for an event: the report of its wait and the answer come in any order, late, twice, or never."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from docs.models.checker import Model, Step

FINAL = ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")


class Waiter(NamedTuple):
    """waits: claims whose report of a wait is in the results queue, where it stays. row: of the token: "" for none,
    "active", "kept" (an answer that came first) or "over"; of: the claim that it names. answers: how many the
    client has left. accepted: the client heard that its answer counts."""

    state: str = "SCHEDULED"
    attempts: int = 0
    claim: int = 0
    waits: frozenset[int] = frozenset()
    row: str = ""
    of: int = 0
    answers: int = 2
    accepted: bool = False
    results: int = 0
    timed_out_after_answer: bool = False


BUGS = ("an early answer is dropped", "a wait of an old claim holds", "no timeout", "a wait stays after its answer")


def model(max_attempts: int = 2, claims: int = 3) -> Model:
    def failed(task: Waiter) -> Waiter:
        return task._replace(state="ERROR" if task.attempts < max_attempts else "CRITICAL_ERROR")

    def steps(task: Waiter, bug: str | None) -> Iterator[Step]:
        if task.state in ("SCHEDULED", "ERROR") and task.claim < claims:
            yield "claim", task._replace(state="ACQUIRED", attempts=task.attempts + 1, claim=task.claim + 1)
        if task.state == "ACQUIRED":
            yield "wait", task._replace(waits=task.waits | {task.claim})
            yield "repair", failed(task)
        for claim in task.waits:
            if task.state in ("ACQUIRED", "WAITING") and (claim == task.claim or bug == "a wait of an old claim holds"):
                yield "record", record(task, claim)
        if task.answers:
            yield "answer", answer(task._replace(answers=task.answers - 1), bug)
            if task.state == "WAITING":
                yield "refuse", task._replace(state="CRITICAL_ERROR", row="over", answers=task.answers - 1)
        if task.state == "WAITING" and task.row == "active" and bug != "no timeout":
            late = task.accepted or task.timed_out_after_answer
            yield "time out", failed(task)._replace(row="over", timed_out_after_answer=late)
        if task.state not in FINAL:
            row = "over" if task.row == "active" else task.row
            yield "cancel", task._replace(state="CANCELLED", row=row)

    def record(task: Waiter, claim: int) -> Waiter:
        """A wait that is reported: an answer that is kept settles it, or it is suspended."""
        if task.row == "kept":
            return task._replace(state="SUCCESS", row="over", of=claim, results=task.results + 1)
        return task._replace(state="WAITING", row="active", of=claim)

    def answer(task: Waiter, bug: str | None) -> Waiter:
        if task.row == "active" and task.state == "WAITING" and task.of == task.claim:
            over = "active" if bug == "a wait stays after its answer" else "over"
            return task._replace(state="SUCCESS", row=over, results=task.results + 1, accepted=True)
        if task.row == "" or (task.row == "over" and task.state not in FINAL and not task.accepted):
            return task._replace(row="" if bug == "an early answer is dropped" else "kept", accepted=True)
        return task  # it has had one

    def broken(task: Waiter) -> str | None:
        if task.results > 1:
            return "a second result is recorded"
        if (task.state == "WAITING") != (task.row == "active"):
            return "a task waits without a token, or a token without a task"
        if task.state == "WAITING" and task.of != task.claim:
            return "a task waits for the token of an old claim"
        if task.timed_out_after_answer:
            return "a task timed out whose answer was accepted"
        return None

    return Model(
        "waits", Waiter(), steps, broken,
        is_over=lambda task: task.state in FINAL or (task.claim == claims and task.state == "ERROR"),
        seen=lambda task: (task.state, task.attempts, task.claim),
        bugs=BUGS, faults=frozenset({"cancel", "answer", "refuse", "repair"}),
    )  # fmt: skip
