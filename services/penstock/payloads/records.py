"""Rows of tasks, opened: as they are read by those who pass results on, and by those who show them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.payloads.cipher import Bound
from penstock.payloads.failures import sealed_in_error
from penstock.payloads.vault import Vault, error_bound, payload_bound, result_bound
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.sealed import MARK, is_sealed, reference_of

Row = Any  # a record of asyncpg, or a mapping with the same names


def needs_opening(row: Row) -> bool:
    """Whether any column of a row of a task was sealed; of an error, its data, of progress, its note."""
    return any(
        text is not None and MARK in text
        for text in (row["result"], row["error"], row.get("payload"), row.get("failures"), row.get("progress"))
    )


async def open_outcome(vault: Vault, row: Row) -> Row:
    """A row with id, and any of payload (with action and tenant), result and error.

    Raises PayloadUnavailable, PayloadLost.
    """
    task_id = row["id"]
    opened = dict(row)
    if is_sealed(opened.get("payload")):
        opened["payload"] = await vault.open(opened["payload"], payload_bound(row["action"], row["tenant"]))
    if is_sealed(opened.get("result")):
        opened["result"] = await vault.open(opened["result"], result_bound(task_id))
    if opened.get("error") is not None:
        opened["error"] = open_error(vault, task_id, opened["error"])
    return opened


def open_error(vault: Vault, task_id: int, error: str) -> str:
    """An error object as JSON text. Raises PayloadUnavailable, PayloadLost."""
    sealed = sealed_in_error(error)
    return error if sealed is None else vault.unseal(sealed, error_bound(task_id))


def shown_error(vault: Vault, task_id: int, error: str) -> str:
    """As ``open_error``; one that cannot be opened says why as its message."""
    try:
        return open_error(vault, task_id, error)
    except (PayloadUnavailable, PayloadLost) as exc:
        decoded: dict[str, Any] = msgspec.json.decode(error)
        return json.dumps(decoded | {"message": f"not shown: {exc}"})


async def shown(vault: Vault, text: str | None, bound: str | Bound, room_bytes: int) -> tuple[str | None, str | None]:
    """A payload or a result to be shown, and why it is not, of which one is None.

    room_bytes: an object of more is not fetched.
    """
    if text is None or not is_sealed(text):
        return text, None
    try:
        reference = reference_of(text)
        if reference is not None and reference.size > room_bytes:
            return None, f"{reference.size} bytes, too large to be shown here"
        return await vault.open(text, bound), None
    except (PayloadUnavailable, PayloadLost, ValueError) as exc:
        return None, f"not shown: {exc}"


async def shown_rows(vault: Vault, rows: Sequence[Row], *, room_bytes: int, payload: bool = False) -> Sequence[Row]:
    """Rows as they are shown, of which those in clear stay as they are. room_bytes: of objects, over all rows."""
    found = []
    for row in rows:
        if not needs_opening(row):
            found.append(row)
            continue
        shown = await shown_row(vault, row, room_bytes=room_bytes, payload=payload)
        room_bytes -= sum(len(shown[name] or "") for name in ("result", "payload") if reference_of(row.get(name)))
        found.append(shown)
    return found


async def shown_row(vault: Vault, row: Row, *, room_bytes: int, payload: bool = False) -> Row:
    """A row of ``show_tasks`` as it is shown: opened, with ``payload_unread`` and ``result_unread`` where it cannot be.

    payload: whether the payload is shown too.
    """
    task_id = row["id"]
    changes: dict[str, Any] = {"payload_unread": None, "result_unread": None}
    changes["result"], changes["result_unread"] = await shown(vault, row["result"], result_bound(task_id), room_bytes)
    if payload:
        changes["payload"], changes["payload_unread"] = await shown(
            vault, row["payload"], payload_bound(row["action"], row["tenant"]), room_bytes
        )
    if row["error"] is not None:
        changes["error"] = shown_error(vault, task_id, row["error"])
    if row.get("progress") is not None:
        changes["progress"] = _shown_progress(vault, task_id, row["progress"])
    if row.get("failures") is not None:
        failures: list[dict[str, Any]] = msgspec.json.decode(row["failures"])
        for failure in failures:
            error = msgspec.json.encode(failure["error"]).decode()
            failure["error"] = msgspec.Raw(shown_error(vault, task_id, error).encode())
        changes["failures"] = msgspec.json.encode(failures).decode()
    return {**row, **changes}


def _shown_progress(vault: Vault, task_id: int, progress: str) -> str:
    decoded: Any = msgspec.json.decode(progress)
    note = json.dumps(decoded.get("note")) if isinstance(decoded, dict) else ""
    if not is_sealed(note):
        return progress
    try:
        decoded["note"] = msgspec.json.decode(vault.unseal(note, error_bound(task_id)))
    except (PayloadUnavailable, PayloadLost) as exc:
        decoded["note"] = f"not shown: {exc}"
    return json.dumps(decoded)
