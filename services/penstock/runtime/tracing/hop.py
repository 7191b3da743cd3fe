"""What a process tells of a task that has passed through it."""

from __future__ import annotations

from typing import NamedTuple

from penstock.protocol.trace_context import TraceContext


class Way(NamedTuple):
    """name: where it went, or what was done. error: None where all went well."""

    parent: TraceContext
    task_id: int
    name: str
    error: str | None = None
