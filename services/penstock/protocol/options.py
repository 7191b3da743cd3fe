"""The options of enqueueing a task from Python."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Literal, TypedDict

from penstock.protocol.task import OnDuplicate

Instant = datetime | str | int
"""A datetime with a zone, RFC 3339 text or epoch milliseconds."""
Seconds = float | timedelta


class EnqueueOptions(TypedDict, total=False):
    """Options of a task, None being as good as absent; the method ``enqueue`` describes them."""

    run_at: Instant | None
    delay: Seconds | None
    priority: int | None
    unique_key: str | None
    ordering_key: str | None
    max_attempts: int | None
    timeout: Seconds | None
    labels: Mapping[str, str] | None
    expires_at: Instant | None
    expires_in: Seconds | None
    limit_key: str | None
    unique: Literal["retained", "live"] | Seconds | None
    on_duplicate: OnDuplicate | None
    tenant: str | None
