"""What a simulated run left in Postgres, commit by commit, as the models see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from docs.models import claims, ordering, waits
from docs.models.checker import Model

Commits = Sequence[dict[str, tuple[str, int, int, int, str | None]]]
_MOST_CLAIMS = 2  # of a task; what the models hold grows with the claims
_MOST_TASKS = 4  # of an ordering key


def lives(commits: Commits, retried: Sequence[int]) -> Iterator[tuple[Model, list[Any]]]:
    """Each task and each ordering key that a model is small enough for, with what was seen of it."""
    ids = sorted({int(task_id) for commit in commits for task_id in commit})
    keys: dict[str, list[int]] = {}
    waited = set()
    for task_id in ids:
        seen = [commit[str(task_id)] for commit in commits if str(task_id) in commit]
        if any(state == "WAITING" and attempts for state, attempts, *_ in seen):
            waited.add(task_id)
        key = seen[0][4]
        if key is not None:
            keys.setdefault(key, []).append(task_id)
        elif len({claim for _, _, claim, *_ in seen}) <= _MOST_CLAIMS + 1:
            yield from _of_task(seen, waits_for_event=task_id in waited)
    for places in keys.values():
        if len(places) <= _MOST_TASKS and not {*places} & {*retried, *waited}:
            yield from _of_key(commits, places)


def _of_task(seen: Sequence[tuple[Any, ...]], *, waits_for_event: bool) -> Iterator[tuple[Model, list[Any]]]:
    """Claims are counted from 1, in the order in which they came."""
    ranks: dict[int, int] = {0: 0}
    shown = [(state, attempts, ranks.setdefault(claim, len(ranks))) for state, attempts, claim, *_ in seen]
    most = seen[0][3]
    if shown[0][0] == "WAITING":  # a step of a workflow, behind another
        shown = [one for one in shown if one[0] != "WAITING" or one[1]]
    count = max(1, len(ranks) - 1)
    if not waits_for_event:
        yield claims.model(most, count), shown
    elif all(later[1] >= earlier[1] for earlier, later in pairwise(shown)):
        yield waits.model(most, count), shown  # which knows of no claim that is given back


def _of_key(commits: Commits, places: Sequence[int]) -> Iterator[tuple[Model, list[Any]]]:
    """States of all tasks of the key after each commit that changed one. Left out where two were enqueued at once."""
    states = [""] * len(places)
    shown = []
    for commit in commits:
        for place, task_id in enumerate(places):
            if str(task_id) in commit:
                state = commit[str(task_id)][0]
                final = state in claims.FINAL
                states[place] = "ENDED" if final else "SCHEDULED" if state == "ERROR" else state
        if states != list(shown[-1] if shown else [""] * len(places)):
            shown.append(tuple(states))
    known = [0, *(sum(map(bool, one)) for one in shown)]
    in_order = all(not any(one[count:]) for one, count in zip(shown, known[1:], strict=True))
    if in_order and all(later - earlier <= 1 for earlier, later in pairwise(known)):
        yield ordering.model(len(places)), shown
