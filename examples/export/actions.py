"""The action ``export``, and the random errors that it raises on request."""

from __future__ import annotations

import functools
import os
import random

from examples.export.database import INT8_MAX, BadObject, current_database
from penstock import Context, Fail, action
from penstock.protocol.errors import SettingsError

ERROR_RATE = "EXPORT_ERROR_RATE"


class RandomError(Exception):
    """Made on purpose, at the rate that EXPORT_ERROR_RATE asks for."""


@action("export", max_attempts=10, timeout=30)
async def export(ctx: Context, objectID: int | str) -> dict[str, object]:
    """Export one object, idempotently; ``written`` in the result says whether this call wrote the row.

    objectID: a number, or the same as text: the older convention sends either.
    Raises Fail if the object does not exist or its data is malformed.
    """
    object_id = _object_id(objectID)
    rate, luck = error_rate(), random.random()
    if luck < rate / 2:
        raise RandomError("a random error before the write: nothing was done")
    try:
        exported = await current_database().export(object_id)
    except BadObject as exc:
        raise Fail(str(exc)) from exc
    if luck < rate:
        # The harder half: the work is done and only the answer is lost. The next attempt must find and not redo it.
        raise RandomError("a random error after the write: the row is there")
    return {
        "objectID": exported.object_id,
        "total_cents": exported.total_cents,
        "checksum": exported.checksum,
        "written": exported.written,
    }


def error_rate() -> float:
    """Share of calls that fail at random, 0 to 1; 0 unless set. Raises SettingsError."""
    return _parse_error_rate(os.environ.get(ERROR_RATE) or "0")


@functools.lru_cache(maxsize=8)
def _parse_error_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1
    if not 0 <= rate <= 1:
        raise SettingsError(f"{ERROR_RATE} is {text!r}: set it to a share of calls, from 0 to 1, such as 0.05")
    return rate


def _object_id(given: int | str) -> int:
    text = str(given)
    # Digits alone: int() would also take " 7", "+7" and "1_000".
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= INT8_MAX):
        raise Fail(f"objectID is {text[:40]!r}: send the id of a row of t_object")
    return int(text)


error_rate()  # a wrong rate stops the worker when it starts, not every task that it runs
