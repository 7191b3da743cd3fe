"""What a step is given of those before it: results and errors by name, and lists to fan out over.

A step without an action passes on what it joins. A step that made children passes on their results too: as an array
in the order of the list where it fanned out over one, by their own names where a handler spawned them. What is read is
bounded by what a payload may hold, however many predecessors there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.db.session import Session
from penstock.payloads.records import load_outcome
from penstock.protocol.errors import PayloadLost
from penstock.protocol.json_text import utf8_size
from penstock.protocol.sealed import reference_of
from penstock.protocol.task import State
from penstock.workflows.params import StepKind

_READ_AT_ONCE = 200

Node = tuple[int, int]


@dataclass(slots=True)
class Handover:
    """JSON texts of objects by the names of steps. problem: why they cannot be handed over, None where they can."""

    results: str = "{}"
    errors: str = "{}"
    problem: str | None = None


@dataclass(slots=True)
class _Gathered:
    """What is found for one step: (name, ids of tasks, whether they make up an array), and how much it is so far."""

    sources: list[tuple[str, list[Any], bool]] = field(default_factory=list)
    size: int = 0
    problem: str | None = None


async def hand_over(session: Session, steps: Sequence[Any], *, limit_bytes: int) -> list[Handover]:
    """For each of these ready steps what its predecessors came to."""
    known = await _with_relatives(session, ((s["workflow_id"], n) for s in steps for n in s["after"]))
    gathered = [_sources_of(step, known) for step in steps]
    outcomes = await _read(session, gathered, limit_bytes)
    return [_written(one, outcomes) for one in gathered]


async def list_result(
    session: Session, step: Any, over: int, *, limit_bytes: int
) -> tuple[list[msgspec.Raw] | None, str | None]:
    """The list that the result of the predecessor of number ``over`` is, or None and why it is none."""
    known = await _with_relatives(session, [(step["workflow_id"], over)])
    source = known.steps[step["workflow_id"], over]
    one = _Gathered(_sources_of_one(source, known)[:1])
    outcomes = await _read(session, [one], limit_bytes)
    written = _written(one, outcomes)
    if written.problem is not None:
        return None, written.problem
    text = msgspec.json.decode(written.results, type=dict[str, msgspec.Raw]).get(source["name"])
    if text is None:
        return None, f"{source['name']} has no result to fan out over: it is {source['state']}"
    try:
        return msgspec.json.decode(text, type=list[msgspec.Raw]), None
    except msgspec.ValidationError:
        return None, f"the result of {source['name']} is no array to fan out over"


async def undo_payload(session: Session, step: Any) -> tuple[str | None, str | None]:
    """What a compensation is given: the step that it undoes, its payload and its result; or None and why not."""
    rows = await session.fetch("find_undone", step["workflow_id"], step["number"])
    outcomes = await session.fetch("read_outcomes", [rows[0]["task_id"]])
    if not outcomes:
        return None, f"the record of {rows[0]['name']} is no longer kept"
    name = json.dumps(rows[0]["name"])
    try:
        done = await load_outcome(session.codec, outcomes[0])
    except PayloadLost as exc:
        return None, f"the record of {rows[0]['name']} cannot be read: {exc}"
    return f'{{"step":{name},"payload":{done["payload"]},"result":{done["result"]}}}', None


@dataclass(slots=True)
class _Known:
    """Steps by node, and the children of those that have any."""

    steps: dict[Node, Any] = field(default_factory=dict)
    children: dict[Node, list[Any]] = field(default_factory=dict)


async def _with_relatives(session: Session, nodes: Iterable[Node]) -> _Known:
    """These steps, those that they join, and the children of all of them."""
    known = _Known()
    wanted = set(nodes)
    while wanted:
        rows = await session.fetch("read_steps", [n[0] for n in wanted], [n[1] for n in wanted])
        parents = list(rows)
        known.steps |= {(row["workflow_id"], row["number"]): row for row in rows}
        while parents := [row for row in parents if row["children"]]:
            found = await session.fetch(
                "read_children", [row["workflow_id"] for row in parents], [row["number"] for row in parents]
            )
            for row in found:
                known.children.setdefault((row["workflow_id"], row["parent"]), []).append(row)
            parents = found
        joined = {(row["workflow_id"], n) for row in rows if row["kind"] == StepKind.JOIN for n in row["after"]}
        wanted = joined - known.steps.keys()
    return known


def _sources_of(step: Any, known: _Known) -> _Gathered:
    gathered = _Gathered()
    seen: set[int] = set()
    stack = list(reversed(step["after"]))
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        source = known.steps[step["workflow_id"], number]
        if source["kind"] == StepKind.JOIN:
            stack += reversed(source["after"])
        else:
            gathered.sources += _sources_of_one(source, known)
    return gathered


def _sources_of_one(source: Any, known: _Known) -> list[tuple[str, list[Any], bool]]:
    """The step's own, then its children and theirs: those of a map in one array, others by their names."""
    children = known.children.get((source["workflow_id"], source["number"]), [])
    if source["kind"] == StepKind.MAP:
        if source["state"] != State.SUCCESS:
            return [(source["name"], [source], False)]
        found = [(source["name"], children, True)]
        for child in children:
            found += _sources_of_one(child, known)[1:]
        return found
    found = [(source["name"], [source], False)]
    for child in children:
        found += _sources_of_one(child, known)
    return found


async def _read(session: Session, gathered: Sequence[_Gathered], limit_bytes: int) -> dict[int, Any]:
    """The outcomes of all tasks that are named, until what one step is given exceeds the limit."""
    takers: dict[int, list[_Gathered]] = {}
    for one in gathered:
        for _, sources, _ in one.sources:
            for source in sources:
                if source["task_id"] is not None:
                    takers.setdefault(source["task_id"], []).append(one)
    outcomes: dict[int, Any] = {}
    ids = list(takers)
    for start in range(0, len(ids), _READ_AT_ONCE):
        part = [
            task_id for task_id in ids[start : start + _READ_AT_ONCE] if any(not t.problem for t in takers[task_id])
        ]
        for stored in await session.fetch("read_results", part) if part else []:
            taken = takers[stored["id"]]
            reference = reference_of(stored["result"])
            size = reference.size if reference is not None else utf8_size(stored["result"] or stored["error"] or "")
            for one in taken:
                one.size += size
                if one.size > limit_bytes and one.problem is None:
                    one.problem = f"the results of its predecessors are more than the {limit_bytes} bytes allowed"
            if all(one.problem for one in taken):
                continue  # nobody asks for it any more
            try:
                outcomes[stored["id"]] = await load_outcome(session.codec, stored)
            except PayloadLost as exc:
                for one in taken:
                    one.problem = one.problem or f"the result of a predecessor, task {stored['id']}, is lost: {exc}"
    return outcomes


def _written(one: _Gathered, outcomes: dict[int, Any]) -> Handover:
    if one.problem is not None:
        return Handover(problem=one.problem)
    results: list[str] = []
    errors: list[str] = []
    for name, sources, is_array in one.sources:
        texts = []
        for source in sources:
            row = outcomes.get(source["task_id"])
            if source["state"] == State.SUCCESS:
                if row is None or row["result"] is None:
                    return Handover(problem=f"the result of {source['name']} is no longer kept")
                texts.append(row["result"])
                continue
            texts.append("null")
            told = {"state": source["state"], "reason": source["reason"] if row is None else row["reason"]}
            shown = json.dumps({key: value for key, value in told.items() if value is not None})
            if row is not None and row["error"] is not None:
                shown = f'{shown[:-1]}, "error": {row["error"]}}}'
            errors.append(f"{json.dumps(source['name'])}:{shown}")
        if is_array:
            results.append(f"{json.dumps(name)}:[{','.join(texts)}]")
        elif sources[0]["state"] == State.SUCCESS:
            results.append(f"{json.dumps(name)}:{texts[0]}")
    return Handover("{" + ",".join(results) + "}", "{" + ",".join(errors) + "}")
