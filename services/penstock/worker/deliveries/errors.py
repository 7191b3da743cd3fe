"""Errors of a delivery, and values that several take alike."""

from typing import Any

import msgspec

from penstock.worker.handlers.outcomes import Fail, Retry


class NotDelivered(Retry):
    """This attempt failed for reasons that may pass. delay: seconds until the next, None for the action's backoff."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(delay, reason)


class Undeliverable(Fail):
    """No attempt can succeed, so the task becomes CRITICAL_ERROR; the reason says what to change."""


class Base64(msgspec.Struct, forbid_unknown_fields=True):
    """Bytes among other values of a payload: ``{"base64": ...}``."""

    base64: bytes


def content_of(body: str | None, raw: bytes | None, json: Any, raw_name: str = "base64") -> tuple[bytes, str] | None:
    """The content that a payload gives as a text, as bytes or as any value, and its type; None without one.

    raw_name: of the member with the bytes. Raises Undeliverable.
    """
    members = {"body": body is not None, raw_name: raw is not None, "json": json is not msgspec.UNSET}
    given = [name for name, is_given in members.items() if is_given]
    if len(given) > 1:
        raise Undeliverable(f"the payload has {' and '.join(given)}: give one of them")
    if body is not None:
        return body.encode("utf-8", "replace"), "text/plain; charset=utf-8"
    if raw is not None:
        return raw, "application/octet-stream"
    return None if json is msgspec.UNSET else (msgspec.json.encode(json), "application/json")


def short_text(exc: BaseException) -> str:
    """The beginning of an error's text, valid in UTF-8."""
    return str(exc)[:300].encode("utf-8", "replace").decode() or type(exc).__name__
