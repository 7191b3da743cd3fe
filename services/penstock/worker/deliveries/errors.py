"""Errors of a delivery, and values that several check alike."""

import base64

from penstock.worker.handlers.outcomes import Fail, Retry


class NotDelivered(Retry):
    """This attempt failed for reasons that may pass. delay: seconds until the next, None for the action's backoff."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(delay, reason)


class Undeliverable(Fail):
    """No attempt can succeed, so the task becomes CRITICAL_ERROR; the reason says what to change."""


def decode_base64(name: str, text: str) -> bytes:
    """Raises Undeliverable."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise Undeliverable(f"{name} holds {text[:60]!r}, which is no base64") from None


def short_text(exc: BaseException) -> str:
    """The beginning of an error's text, valid in UTF-8."""
    return str(exc)[:300].encode("utf-8", "replace").decode() or type(exc).__name__
