"""Decode the encoded columns of task rows, for passing results on and for display."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.payloads.cipher import TenantAad
from penstock.payloads.codec import PayloadCodec, error_aad, payload_aad, result_aad
from penstock.payloads.failures import sealed_in_error
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.sealed import MARK, is_sealed, reference_of

Row = Any  # a record of asyncpg, or a mapping with the same names


def needs_opening(row: Row) -> bool:
    """Whether any column of a task row is encoded: an error's data and a progress note count."""
    return any(
        text is not None and MARK in text
        for text in (row["result"], row["error"], row.get("payload"), row.get("failures"), row.get("progress"))
    )


async def load_outcome(codec: PayloadCodec, row: Row) -> Row:
    """Decode a row with id and any of payload (with action and tenant), result and error.

    Raises PayloadUnavailable, PayloadLost.
    """
    task_id = row["id"]
    opened = dict(row)
    if is_sealed(opened.get("payload")):
        opened["payload"] = await codec.load(opened["payload"], payload_aad(row["action"], row["tenant"]))
    if is_sealed(opened.get("result")):
        opened["result"] = await codec.load(opened["result"], result_aad(task_id))
    if opened.get("error") is not None:
        opened["error"] = decrypt_error(codec, task_id, opened["error"])
    return opened


def decrypt_error(codec: PayloadCodec, task_id: int, error: str) -> str:
    """Decrypt an error object, as JSON text. Raises PayloadUnavailable, PayloadLost."""
    sealed = sealed_in_error(error)
    return error if sealed is None else codec.decode_inline(sealed, error_aad(task_id))


def shown_error(codec: PayloadCodec, task_id: int, error: str) -> str:
    """Decrypt an error for display; if that fails, its message is the reason."""
    try:
        return decrypt_error(codec, task_id, error)
    except (PayloadUnavailable, PayloadLost) as exc:
        decoded: dict[str, Any] = msgspec.json.decode(error)
        return json.dumps(decoded | {"message": f"not shown: {exc}"})


async def shown(
    codec: PayloadCodec, text: str | None, aad: str | TenantAad, room_bytes: int
) -> tuple[str | None, str | None]:
    """Decode a payload or result for display: the text, or None and the reason.

    room_bytes: largest object that is fetched.
    """
    if text is None or not is_sealed(text):
        return text, None
    try:
        reference = reference_of(text)
        if reference is not None and reference.size > room_bytes:
            return None, f"{reference.size} bytes, too large to be shown here"
        return await codec.load(text, aad), None
    except (PayloadUnavailable, PayloadLost, ValueError) as exc:
        return None, f"not shown: {exc}"


async def shown_rows(
    codec: PayloadCodec, rows: Sequence[Row], *, room_bytes: int, payload: bool = False
) -> Sequence[Row]:
    """Decode rows for display. room_bytes: of objects, over all rows."""
    found = []
    for row in rows:
        if not needs_opening(row):
            found.append(row)
            continue
        shown = await shown_row(codec, row, room_bytes=room_bytes, payload=payload)
        room_bytes -= sum(len(shown[name] or "") for name in ("result", "payload") if reference_of(row.get(name)))
        found.append(shown)
    return found


async def shown_row(codec: PayloadCodec, row: Row, *, room_bytes: int, payload: bool = False) -> Row:
    """Decode a row of ``show_tasks`` for display; ``payload_unread`` and ``result_unread`` say why a text is missing.

    payload: whether to decode the payload too.
    """
    task_id = row["id"]
    changes: dict[str, Any] = {"payload_unread": None, "result_unread": None}
    changes["result"], changes["result_unread"] = await shown(codec, row["result"], result_aad(task_id), room_bytes)
    if payload:
        changes["payload"], changes["payload_unread"] = await shown(
            codec, row["payload"], payload_aad(row["action"], row["tenant"]), room_bytes
        )
    if row["error"] is not None:
        changes["error"] = shown_error(codec, task_id, row["error"])
    if row.get("progress") is not None:
        changes["progress"] = _shown_progress(codec, task_id, row["progress"])
    if row.get("failures") is not None:
        failures: list[dict[str, Any]] = msgspec.json.decode(row["failures"])
        for failure in failures:
            error = msgspec.json.encode(failure["error"]).decode()
            failure["error"] = msgspec.Raw(shown_error(codec, task_id, error).encode())
        changes["failures"] = msgspec.json.encode(failures).decode()
    return {**row, **changes}


def _shown_progress(codec: PayloadCodec, task_id: int, progress: str) -> str:
    decoded: Any = msgspec.json.decode(progress)
    note = json.dumps(decoded.get("note")) if isinstance(decoded, dict) else ""
    if not is_sealed(note):
        return progress
    try:
        decoded["note"] = msgspec.json.decode(codec.decode_inline(note, error_aad(task_id)))
    except (PayloadUnavailable, PayloadLost) as exc:
        decoded["note"] = f"not shown: {exc}"
    return json.dumps(decoded)
