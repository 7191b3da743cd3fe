"""Errors of a delivery: one that is tried again, and one that is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.worker.handlers.outcomes import Fail, Retry

if TYPE_CHECKING:
    pass


class NotDelivered(Retry):
    """This attempt failed for reasons that may pass. delay: seconds until the next, None for the usual backoff."""

    def __init__(self, reason: str, delay: float | None = None) -> None:
        super().__init__(delay, reason)


class Undeliverable(Fail):
    """No attempt will succeed as the task stands, so it becomes CRITICAL_ERROR; the reason says what to change."""
