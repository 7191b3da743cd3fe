"""The model of docs/performance.md against the settings and the code that packs."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.brokers.sqs import LIMITS
from penstock.protocol.requests import pack
from penstock.scheduler.sending import _SPREAD
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.worker.result_sender import MAX_TASKS
from tests.unit.scheduler.test_packing import claimed, packed_in

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text("utf-8")
_BYTES_OF_AN_ANSWER = 60
_RUN_SECONDS = 0.0005  # of a no-op, by the clock of its worker


def rows() -> dict[str, tuple[str, str]]:
    table = PAGE.split("| step | at once | bounded by |", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {step: (at_once.replace(",", ""), bounded_by.replace(",", "")) for step, at_once, bounded_by in cells}


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_batches_of_the_model_are_those_that_are_made() -> None:
    told = {step: numbers(at_once) for step, (at_once, _) in rows().items()}
    claim = Settings.model_fields["claim_batch_size"].default
    messages = packed_in(
        [claimed(number) for number in range(claim)], {"a": _RUN_SECONDS},
        max_tasks=Settings.model_fields["pack_max_tasks"].default,
        max_seconds=Settings.model_fields["pack_seconds"].default,
    )  # fmt: skip
    (size,) = {len(message.tasks) for message in messages}
    assert len(messages) <= LIMITS.max_call_messages, "or it would take two calls"
    start, end = next(pack([_BYTES_OF_AN_ANSWER] * claim, max_bytes=LIMITS.max_message_bytes, max_items=MAX_TASKS))
    in_one = end - start
    assert told == {
        "claim": [claim], "pack": [len(messages), size], "send": [len(messages)], "receive": [len(messages) * size],
        "answer": [in_one], "settle": [in_one],
    }  # fmt: skip


def test_what_bounds_the_batches_is_told_with_its_default() -> None:
    bounds = {step: bounded_by for step, (_, bounded_by) in rows().items()}
    settings = re.findall(rf"`{PREFIX}(\w+)` \((\d+)\)", " ".join(bounds.values()))
    assert {name for name, _ in settings} == {"CLAIM_BATCH_SIZE", "PACK_MAX_TASKS", "PACK_SECONDS"}
    for name, value in settings:
        assert Settings.model_fields[name.lower()].default == float(value), name
    assert bounds["pack"].endswith(f"cut into about {_SPREAD}")
    assert numbers(bounds["send"]) == [LIMITS.max_call_messages, LIMITS.max_message_bytes // 2**20]
    assert numbers(bounds["receive"]) == [LIMITS.max_call_messages]
