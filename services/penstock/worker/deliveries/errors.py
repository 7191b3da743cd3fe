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


def content_of(text: str | None, raw: bytes | None, value: Any) -> tuple[bytes, str] | None:
    """The content that a payload gives as a text, as bytes or as any value, and its type; None without one.

    Raises Undeliverable.
    """
    if [text is None, raw is None, value is msgspec.UNSET].count(False) > 1:
        raise Undeliverable("the payload has more than one of a text, bytes and json: give one of them")
    if text is not None:
        return text.encode("utf-8", "replace"), "text/plain; charset=utf-8"
    if raw is not None:
        return raw, "application/octet-stream"
    return None if value is msgspec.UNSET else (msgspec.json.encode(value), "application/json")


def short_text(exc: BaseException) -> str:
    """The beginning of an error's text, valid in UTF-8."""
    return str(exc)[:300].encode("utf-8", "replace").decode() or type(exc).__name__
