"""One task: claims, messages that come twice or never, results of old claims, repair.

Of each claim there is a message in the outbound queue, which stays until it is deleted or dead; a worker that has it;
and its result, which stays in its queue likewise. The scheduler dies between any two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from docs.models.checker import Model, Step

FINAL = ("SUCCESS", "CRITICAL_ERROR", "CANCELLED")
none: frozenset[int] = frozenset()


class Task(NamedTuple):
    """unsent: claims with a row in `dispatch`. sent: messages. taken: claims that a worker runs. results: (claim,
    succeeded). heard: whether the claim that holds the task has had a heartbeat. recorded: (claim of the result,
    claim that held the task)."""

    state: str = "SCHEDULED"
    attempts: int = 0
    claim: int = 0
    heard: bool = False
    unsent: frozenset[int] = none
    sent: frozenset[int] = none
    taken: frozenset[int] = none
    results: frozenset[tuple[int, bool]] = frozenset()
    recorded: tuple[tuple[int, int], ...] = ()


BUGS = ("no fence", "no repair", "an attempt counts twice", "a release keeps the claim")


def model(max_attempts: int = 2, claims: int = 2) -> Model:
    """claims: how many there are; a task that wants one more is left alone."""

    def ready(task: Task, attempts: int) -> Task:
        """Back to be claimed, or failed permanently."""
        state = "SCHEDULED" if attempts == 0 else "ERROR" if attempts < max_attempts else "CRITICAL_ERROR"
        return task._replace(state=state, attempts=attempts, heard=False)

    def steps(task: Task, bug: str | None) -> Iterator[Step]:
        held, acquired = task.claim, task.state == "ACQUIRED"
        if task.state in ("SCHEDULED", "ERROR") and task.claim < claims:
            counted = 2 if bug == "an attempt counts twice" else 1
            yield (
                "claim",
                task._replace(
                    state="ACQUIRED", attempts=task.attempts + counted, claim=held + 1, unsent=task.unsent | {held + 1}
                ),
            )
        for claim in task.unsent:
            yield "send", task._replace(sent=task.sent | {claim})
            if claim in task.sent:
                yield "confirm", task._replace(unsent=task.unsent - {claim})
            given_back = task._replace(unsent=task.unsent - {claim})
            if acquired and claim == held and not task.heard and bug != "a release keeps the claim":
                given_back = ready(given_back, task.attempts - 1)
            yield "release", given_back
        for claim in task.sent:
            yield "receive", task._replace(taken=task.taken | {claim})
            yield "delete", task._replace(sent=task.sent - {claim})
        for claim in task.taken:
            yield "heartbeat", task._replace(heard=task.heard or (acquired and claim == held))
            yield "die", task._replace(taken=task.taken - {claim})
            for succeeded in (True, False):
                yield (
                    "report",
                    task._replace(taken=task.taken - {claim}, results=task.results | {(claim, succeeded)}),
                )
        for claim, succeeded in task.results:
            yield "forget", task._replace(results=task.results - {(claim, succeeded)})
            if acquired and (claim == held or bug == "no fence"):
                if succeeded:
                    yield "record", task._replace(state="SUCCESS", recorded=(*task.recorded, (claim, held)))
                else:
                    yield "record", ready(task, task.attempts)
                    yield "record", task._replace(state="CRITICAL_ERROR", heard=False)
        if acquired and bug not in ("no repair", "a release keeps the claim"):
            yield "repair", ready(task, task.attempts)
            yield "refund", ready(task, task.attempts - 1)
        if task.state not in FINAL:
            yield "cancel", task._replace(state="CANCELLED", heard=False)
        elif task.state != "SUCCESS" and task.claim < claims:
            yield "retry", task._replace(state="SCHEDULED", attempts=0)

    def broken(task: Task) -> str | None:
        if task.attempts > max_attempts:
            return "there are more attempts than may be"
        if len(task.recorded) > 1:
            return "a second result is recorded"
        if any(claim != held for claim, held in task.recorded):
            return "the result of a claim is recorded that did not hold the task"
        if task.state == "ERROR" and task.attempts == 0:
            return "a task without attempts has failed"
        return None

    return Model(
        "claims", Task(), steps, broken,
        is_over=lambda task: task.state in FINAL or (task.claim == claims and task.state != "ACQUIRED"),
        seen=lambda task: (task.state, task.attempts, task.claim),
        bugs=BUGS, faults=frozenset({"cancel", "die", "forget", "delete", "retry"}),
    )  # fmt: skip
