"""Encrypt errors and progress notes of attempts, and decode the encoded columns of task rows."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from penstock.payloads.codec import PayloadCodec, TenantAad, aad_of, payload_aad
from penstock.protocol.errors import PayloadLost, PayloadUnavailable
from penstock.protocol.json_text import decode_any, replace_unstorable
from penstock.protocol.sealed import MARK, escape_plain, is_encrypted, is_sealed, reference_of

Row = Any  # a record of asyncpg, or a mapping with the same names

AADS: dict[str, Callable[[Row], str | TenantAad]] = {
    "payload": lambda row: payload_aad(row["action"], row["tenant"]),
    "result": lambda row: aad_of("result", row["id"]),
}
"""Associated data of the columns that may be large."""

_CLEAR = (
    "type", "retry_after", "final", "max_attempts", "backoff", "not_begun", "snooze", "hold", "hold_key",
    "unknown_action",
)  # fmt: skip


def encrypt_error(codec: PayloadCodec, task_id: int, error: str) -> str:
    """Encrypt a JSON-RPC error, if not done yet: message, traceback and other data, but not code, type and hints."""
    if not codec.encrypts:
        return error
    decoded, data = _members_of(error)
    if is_sealed(json.dumps(data.get("sealed"))) or data.get("not_begun") is True:
        return error
    kept = {name: data[name] for name in _CLEAR if name in data}
    kept["sealed"] = json.loads(codec.encode(error, aad_of("error", task_id)))
    return json.dumps({"code": decoded.get("code", 0), "message": "encrypted", "data": kept})


def _members_of(error: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The members of an error and those of its data, none of what is no object."""
    decoded: Any = None
    with suppress(ValueError, RecursionError):
        decoded = decode_any(error)
    decoded = decoded if isinstance(decoded, dict) else {}
    data = decoded.get("data")
    return decoded, data if isinstance(data, dict) else {}


def encrypt_note(codec: PayloadCodec, task_id: int, note: str | None) -> str | None:
    """Encrypt the note of a progress report; one that is already encrypted is returned unchanged."""
    text = replace_unstorable(json.dumps(note))
    if note is None or not codec.encrypts or is_encrypted(text):
        return note
    sealed: str = json.loads(codec.encode(escape_plain(text), aad_of("error", task_id)))
    return sealed


def encrypt_progress(codec: PayloadCodec, task_id: int, detail: str | None) -> str | None:
    """Encrypt the note in the JSON text of a progress report."""
    if detail is None or not codec.encrypts:
        return detail
    decoded: dict[str, Any] = msgspec.json.decode(detail)
    return json.dumps(decoded | {"note": encrypt_note(codec, task_id, decoded["note"])})


def decrypt_error(codec: PayloadCodec, task_id: int, error: str) -> str:
    """Decrypt an error object, as JSON text. Raises PayloadUnavailable, PayloadLost."""
    sealed = json.dumps(_members_of(error)[1].get("sealed")) if '"penstock+sealed:' in error else ""
    return codec.decode_inline(sealed, aad_of("error", task_id)) if is_sealed(sealed) else error


async def load_outcome(codec: PayloadCodec, row: Row) -> Row:
    """Decode any of payload (with action and tenant), result and error. Raises PayloadUnavailable, PayloadLost."""
    opened = dict(row)
    for name, aad in AADS.items():
        if is_sealed(opened.get(name)):
            opened[name] = await codec.load(opened[name], aad(row))
    if opened.get("error") is not None:
        opened["error"] = decrypt_error(codec, row["id"], opened["error"])
    return opened


async def shown_rows(codec: PayloadCodec, rows: Sequence[Row], *, room_bytes: int) -> Sequence[Row]:
    """Rows of ``show_tasks`` decoded, ``*_unread`` saying why one is not. room_bytes: of objects, over all rows."""
    found = []
    for row in rows:
        encoded = (row["result"], row["error"], row.get("payload"), row.get("failures"), row.get("progress"))
        if not any(text is not None and MARK in text for text in encoded):
            found.append(row)
            continue
        task_id = row["id"]
        changes: dict[str, Any] = {}
        for name, aad in AADS.items():
            if row.get(name) is not None:
                changes[name], changes[f"{name}_unread"] = await _shown(codec, row[name], aad(row), room_bytes)
        if row["error"] is not None:
            changes["error"] = _shown_error(codec, task_id, row["error"])
        if row.get("progress") is not None:
            changes["progress"] = _shown_progress(codec, task_id, row["progress"])
        if row.get("failures") is not None:
            failures = msgspec.json.decode(row["failures"], type=list[dict[str, msgspec.Raw]])
            for failure in failures:
                error = _shown_error(codec, task_id, bytes(failure["error"]).decode())
                failure["error"] = msgspec.Raw(error.encode())
            changes["failures"] = msgspec.json.encode(failures).decode()
        room_bytes -= sum(len(changes.get(name) or "") for name in ("result", "payload") if reference_of(row.get(name)))
        found.append({**row, **changes})
    return found


async def _shown(codec: PayloadCodec, text: str, aad: str | TenantAad, room: int) -> tuple[str | None, str | None]:
    """A payload or result: the text, or None and the reason. room: bytes of the largest object that is fetched."""
    try:
        reference = reference_of(text)
        if reference is not None and reference.size > room:
            return None, f"{reference.size} bytes, too large to be shown here"
        return await codec.load(text, aad), None
    except (PayloadUnavailable, PayloadLost, ValueError) as exc:
        return None, f"not shown: {exc}"


def _shown_error(codec: PayloadCodec, task_id: int, error: str) -> str:
    """An error in clear; if it cannot be decrypted, its message is the reason."""
    try:
        return decrypt_error(codec, task_id, error)
    except (PayloadUnavailable, PayloadLost) as exc:
        members: dict[str, Any] = msgspec.json.decode(error, type=dict[str, msgspec.Raw])
        return msgspec.json.encode(members | {"message": f"not shown: {exc}"}).decode()


def _shown_progress(codec: PayloadCodec, task_id: int, progress: str) -> str:
    decoded: Any = msgspec.json.decode(progress)
    note = json.dumps(decoded.get("note")) if isinstance(decoded, dict) else ""
    if not is_encrypted(note):
        return progress
    try:
        decoded["note"] = msgspec.json.decode(codec.decode_inline(note, aad_of("error", task_id)))
    except (PayloadUnavailable, PayloadLost) as exc:
        decoded["note"] = f"not shown: {exc}"
    return json.dumps(decoded)
