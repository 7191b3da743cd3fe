"""Errors of attempts, sealed: message, traceback and whatever else they say; in clear stay code, type and hints."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from penstock.payloads.vault import Vault, error_bound
from penstock.protocol.json_text import decode_any
from penstock.protocol.sealed import is_sealed

_CLEAR = ("type", "retry_after", "final", "max_attempts", "backoff", "not_begun")
_ENCRYPTED = "encrypted"


def seal_error(vault: Vault, task_id: int, error: str) -> str:
    """A JSON-RPC error object as it is sent and stored; one that is sealed already stays."""
    if not vault.encrypts:
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
    kept["sealed"] = json.loads(vault.seal(error, error_bound(task_id)))
    code = decoded.get("code", 0) if isinstance(decoded, dict) else 0
    return json.dumps({"code": code, "message": _ENCRYPTED, "data": kept})


def seal_progress(vault: Vault, task_id: int, detail: str | None) -> str | None:
    """Progress as it is stored, its note sealed; one that is sealed already stays."""
    if detail is None or not vault.encrypts:
        return detail
    decoded: dict[str, Any] = msgspec.json.decode(detail)
    if decoded.get("note") is None:
        return detail
    decoded["note"] = json.loads(vault.seal(json.dumps(decoded["note"]), error_bound(task_id)))
    return json.dumps(decoded)


def sealed_in_error(error: str | None) -> str | None:
    """The sealed text that a stored error holds, None where it is in clear."""
    if error is None or '"penstock+sealed:' not in error:
        return None
    decoded: Any = decode_any(error)
    data = decoded.get("data") if isinstance(decoded, dict) else None
    return _sealed_in(data) if isinstance(data, dict) else None


def _sealed_in(data: dict[str, Any]) -> str | None:
    sealed = data.get("sealed")
    text = json.dumps(sealed) if isinstance(sealed, str) else ""
    return text if is_sealed(text) else None
