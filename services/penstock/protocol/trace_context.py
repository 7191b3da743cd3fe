"""W3C Trace Context without a tracing library. An invalid context is ignored: a trace is not worth a task."""

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
TRACESTATE_MAX_CHARS = 512  # that every participant must pass on; a longer one is dropped

_PARENT = re.compile(r"(?s)(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)


class TraceContext(NamedTuple):
    """A span, as its successors know it. state: the tracestate, or empty."""

    trace_id: str
    span_id: str
    flags: int
    state: str = ""

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & 1)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> dict[str, str]:
        given = {TRACEPARENT: self.traceparent}
        return given | {TRACESTATE: self.state} if self.state else given

    @property
    def text(self) -> str:
        return f"{self.traceparent} {self.state}" if self.state else self.traceparent


def parse(traceparent: object, tracestate: object = None) -> TraceContext | None:
    """Read two headers; None for an invalid traceparent. An invalid tracestate is left out."""
    match = _PARENT.fullmatch(traceparent.strip(" \t")) if isinstance(traceparent, str) else None
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    given = tracestate if isinstance(tracestate, str) and len(tracestate) <= TRACESTATE_MAX_CHARS else ""
    members = [member for part in given.split(",") if (member := part.strip(" \t"))]
    names = {member.partition("=")[0] for member in members if _MEMBER.fullmatch(member)}
    is_valid = len(names) == len(members) <= 32  # as many as the standard allows
    # Two flags are known; a newer version may define others.
    return TraceContext(match[2], match[3], int(match[4], 16) & 3, ",".join(members) if is_valid else "")


def of_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """headers: of a request, or attributes of a message."""
    return parse(headers.get(TRACEPARENT), headers.get(TRACESTATE))


def of_text(text: str | None) -> TraceContext | None:
    traceparent, _, state = (text or "").partition(" ")
    return parse(traceparent, state)


def current() -> TraceContext | None:
    """The context of the active span; None in a program that has not loaded OpenTelemetry."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    return None if trace is None else of_span(trace.get_current_span())


def of_span(span: Any) -> TraceContext | None:
    """The context of a span of OpenTelemetry; None for an invalid one."""
    context = span.get_span_context()
    if not context.is_valid:
        return None
    # Parsed again, since the program may have put an invalid tracestate into it.
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return parse(parent, context.trace_state.to_header())


class Hop(NamedTuple):
    """One step of a task through a process. name: destination or action. error: None: it succeeded."""

    parent: TraceContext
    task_id: int
    name: str
    error: str | None = None
