"""Encryption of attempts' errors: message, traceback and other data; code, type and hints stay in clear."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.payloads.codec import PayloadCodec, error_aad
from penstock.protocol.json_text import decode_any
from penstock.protocol.sealed import is_sealed

_CLEAR = ("type", "retry_after", "final", "max_attempts", "backoff", "not_begun")
_ENCRYPTED = "encrypted"


def encrypt_error(codec: PayloadCodec, task_id: int, error: str) -> str:
    """Encrypt a JSON-RPC error object; one that is already encrypted is returned unchanged."""
    if not codec.encrypts:
        return error
    try:
        decoded: Any = decode_any(error)
    except (ValueError, RecursionError):
        decoded = {}
    data = decoded.get("data") if isinstance(decoded, dict) else None
    data = data if isinstance(data, dict) else {}
    if _sealed_in(data) is not None or data.get("not_begun") is True:
        return error
    kept = {name: data[name] for name in _CLEAR if name in data}
    kept["sealed"] = json.loads(codec.encode(error, error_aad(task_id)))
    code = decoded.get("code", 0) if isinstance(decoded, dict) else 0
    return json.dumps({"code": code, "message": _ENCRYPTED, "data": kept})


def encrypt_progress(codec: PayloadCodec, task_id: int, detail: str | None) -> str | None:
    """Encrypt the note of a progress report; one that is already encrypted is returned unchanged."""
    if detail is None or not codec.encrypts:
        return detail
    decoded: dict[str, Any] = msgspec.json.decode(detail)
    if decoded.get("note") is None:
        return detail
    decoded["note"] = json.loads(codec.encode(json.dumps(decoded["note"]), error_aad(task_id)))
    return json.dumps(decoded)


def sealed_in_error(error: str | None) -> str | None:
    """Return the encrypted text of a stored error; None: it is in clear."""
    if error is None or '"penstock+sealed:' not in error:
        return None
    decoded: Any = decode_any(error)
    data = decoded.get("data") if isinstance(decoded, dict) else None
    return _sealed_in(data) if isinstance(data, dict) else None


def _sealed_in(data: dict[str, Any]) -> str | None:
    sealed = data.get("sealed")
    text = json.dumps(sealed) if isinstance(sealed, str) else ""
    return text if is_sealed(text) else None
