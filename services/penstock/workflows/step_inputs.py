"""Inputs of a step: results and errors of its predecessors by name, and lists to fan out over.

A step without an action passes on the inputs that it joins. A step with children passes on their results too: of a
fan-out as an array in the order of the list, of spawned children by their names. Reading stops at the limit of a
payload, however many predecessors there are.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.db.session import Session, columns
from penstock.payloads.records import load_outcome
from penstock.protocol.answers import StepKind
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.json_text import utf8_size
from penstock.protocol.sealed import reference_of
from penstock.protocol.task import State

_READ_AT_ONCE = 200
_S3_SECONDS = 40.0

Node = tuple[int, int]  # (workflow, number of the step)


@dataclass(slots=True)
class StepInputs:
    """The inputs of one step, as JSON objects by the names of steps."""

    sources: list[tuple[str, list[Any], bool]]  # name, rows of steps, whether their results form an array
    size: int = 0  # in bytes
    problem: str | None = None  # why they are unavailable
    results: str = "{}"
    errors: str = "{}"


@asynccontextmanager
async def s3_in_transaction() -> AsyncIterator[None]:
    """Bounds what is read and written in S3 between two statements: Postgres ends a transaction without one for 60 s,
    and this raises PayloadUnavailable before."""
    try:
        async with asyncio.timeout(_S3_SECONDS):
            yield
    except TimeoutError:
        raise PayloadUnavailable(f"S3 did not answer within {_S3_SECONDS:g} s") from None


async def read_inputs(session: Session, steps: Sequence[Any], *, limit_bytes: int) -> list[StepInputs]:
    known = await _with_relatives(session, ((s["workflow_id"], n) for s in steps for n in s["after"]))
    inputs = [StepInputs(_sources_of(step, known)) for step in steps]
    await _read(session, inputs, limit_bytes)
    return inputs


async def list_result(
    session: Session, step: Any, over: int, *, limit_bytes: int
) -> tuple[list[msgspec.Raw] | None, str | None]:
    """The result of the predecessor of number ``over`` as a list, or None and the reason."""
    known = await _with_relatives(session, [(step["workflow_id"], over)])
    source = known.steps[step["workflow_id"], over]
    one = StepInputs(_sources_of_one(source, known)[:1])
    await _read(session, [one], limit_bytes)
    if one.problem is not None:
        return None, one.problem
    text = msgspec.json.decode(one.results, type=dict[str, msgspec.Raw]).get(source["name"])
    if text is None:
        return None, f"{source['name']} has no result to fan out over: it is {source['state']}"
    try:
        return msgspec.json.decode(text, type=list[msgspec.Raw]), None
    except msgspec.ValidationError:
        return None, f"the result of {source['name']} is no array to fan out over"


async def compensation_payload(session: Session, step: Any) -> tuple[str | None, str | None]:
    """The payload of a compensation: the step that it undoes, its payload and its result; or None and the reason."""
    (row,) = await session.fetch("find_undone", step["workflow_id"], step["number"])
    if row["id"] is None:
        return None, f"the record of {row['name']} is no longer kept"
    if gone := next((member for member in ("payload", "result") if row[member] is None), None):
        return None, f"the {gone} of {row['name']} is no longer kept"
    try:
        async with s3_in_transaction():
            done = await load_outcome(session.codec, row)
    except PayloadLost as exc:
        return None, f"the record of {row['name']} cannot be read: {exc}"
    return f'{{"step":{json.dumps(row["name"])},"payload":{done["payload"]},"result":{done["result"]}}}', None


@dataclass(slots=True)
class _Steps:
    steps: dict[Node, Any] = field(default_factory=dict)
    children: dict[Node, list[Any]] = field(default_factory=dict)


async def _with_relatives(session: Session, nodes: Iterable[Node]) -> _Steps:
    """These steps, the steps that they join, and the children of all."""
    known = _Steps()
    wanted = set(nodes)
    while wanted:
        rows = await session.fetch("read_steps", *columns(wanted))
        parents = list(rows)
        known.steps |= {(row["workflow_id"], row["number"]): row for row in rows}
        while parents := [row for row in parents if row["children"]]:
            nodes = ((row["workflow_id"], row["number"]) for row in parents)
            found = await session.fetch("read_children", *columns(nodes))
            for row in found:
                known.children.setdefault((row["workflow_id"], row["parent"]), []).append(row)
            parents = found
        joined = {(row["workflow_id"], n) for row in rows if row["kind"] == StepKind.JOIN for n in row["after"]}
        wanted = joined - known.steps.keys()
    return known


def _sources_of(step: Any, known: _Steps) -> list[tuple[str, list[Any], bool]]:
    found: list[tuple[str, list[Any], bool]] = []
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
            found += _sources_of_one(source, known)
    return found


def _sources_of_one(source: Any, known: _Steps) -> list[tuple[str, list[Any], bool]]:
    """The step, then its descendants: children of a map in one array, others by their names."""
    is_map = source["kind"] == StepKind.MAP
    if is_map and source["state"] != State.SUCCESS:
        return [(source["name"], [source], False)]
    children = known.children.get((source["workflow_id"], source["number"]), [])
    found = [(source["name"], children if is_map else [source], is_map)]
    stack = list(reversed(children))  # children of children may be thousands deep
    while stack:
        child = stack.pop()
        if not is_map or child["parent"] != source["number"]:
            found.append((child["name"], [child], False))
        stack += reversed(known.children.get((child["workflow_id"], child["number"]), []))
    return found


async def _read(session: Session, inputs: Sequence[StepInputs], limit_bytes: int) -> None:
    """Fill in the inputs from the outcomes of the sources' tasks; those that exceed the limit are not read."""
    takers: dict[int, list[StepInputs]] = {}
    for one in inputs:
        for _, sources, _ in one.sources:
            for source in sources:
                if source["task_id"] is not None:
                    takers.setdefault(source["task_id"], []).append(one)
    outcomes: dict[int, Any] = {}
    ids = list(takers)
    for start in range(0, len(ids), _READ_AT_ONCE):
        part = [one for one in ids[start : start + _READ_AT_ONCE] if not all(taker.problem for taker in takers[one])]
        rows = await session.fetch("read_results", part) if part else []
        async with s3_in_transaction():
            for stored in rows:
                taken = takers[stored["id"]]
                reference = reference_of(stored["result"])
                if reference is not None:
                    _count(taken, reference.size, limit_bytes)  # before it is fetched
                if all(one.problem for one in taken):
                    continue  # no longer needed
                try:
                    outcomes[stored["id"]] = opened = await load_outcome(session.codec, stored)
                except PayloadLost as exc:
                    for one in taken:
                        one.problem = one.problem or f"the result of a predecessor, task {stored['id']}, is lost: {exc}"
                    continue
                if reference is None:  # an encrypted text is a third longer
                    _count(taken, utf8_size(opened["result"] or opened["error"] or ""), limit_bytes)
    for one in inputs:
        if one.problem is None:
            _write(one, outcomes)


def _count(taken: Iterable[StepInputs], size: int, limit_bytes: int) -> None:
    for one in taken:
        one.size += size
        if one.size > limit_bytes and one.problem is None:
            one.problem = f"the results of its predecessors are more than the {limit_bytes} bytes allowed"


def _write(one: StepInputs, outcomes: dict[int, Any]) -> None:
    results: list[str] = []
    errors: list[str] = []
    for name, sources, is_array in one.sources:
        texts = []
        for source in sources:
            row = outcomes.get(source["task_id"])
            if source["state"] == State.SUCCESS:
                if row is None or row["result"] is None:
                    one.problem = f"the result of {source['name']} is no longer kept"
                    return
                texts.append(row["result"])
                continue
            texts.append("null")
            reason = source["reason"] or (row and row["reason"])
            error = json.dumps({"state": source["state"]} | ({} if reason is None else {"reason": reason}))
            if row is not None and row["error"] is not None:
                error = f'{error[:-1]}, "error": {row["error"]}}}'
            errors.append(f"{json.dumps(source['name'])}:{error}")
        if is_array:
            results.append(f"{json.dumps(name)}:[{','.join(texts)}]")
        elif sources[0]["state"] == State.SUCCESS:
            results.append(f"{json.dumps(name)}:{texts[0]}")
    one.results, one.errors = "{" + ",".join(results) + "}", "{" + ",".join(errors) + "}"
