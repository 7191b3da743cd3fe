"""Spans: one trace from the enqueue of a task through every process and every attempt.

Names and attributes are those of OpenTelemetry's conventions for messaging, with the action as the destination and the
task's id as that of the message. A task's row stores the span of its enqueue, the parent of all its others.
"""

import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import time_ns
from typing import Any

from msgspec.structs import replace
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.protocol import trace_context
from penstock.protocol.message_attributes import CarriedTrace
from penstock.protocol.task import NewTask
from penstock.protocol.trace_context import Hop, TraceContext
from penstock.protocol.version import __version__
from penstock.runtime.logs import log

_LINKS = 128  # of one span; more are dropped by the library
_ROOT = contexts.Context()
_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    _span: Span

    @property
    def trace_id(self) -> str | None:
        """For exemplars; None where the span is not recorded."""
        return f"{self._span.get_span_context().trace_id:032x}" if self._span.is_recording() else None

    @property
    def context(self) -> TraceContext | None:
        return trace_context.of_span(self._span)

    def activate(self) -> None:
        """Make it the current span of this task of the event loop, and of the threads that it starts."""
        contexts.attach(trace.set_span_in_context(self._span))

    def raised(self, exc: BaseException) -> None:
        if self._span.is_recording():  # a handler that ignored its cancellation ends after its span
            self._span.record_exception(exc)

    def end(self, error: str, why: str = "") -> None:
        """error: kind of the failure, empty for a success. why: in words."""
        if error:
            _fail(self._span, error, why)
        self._span.end()


class Spans:
    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)
        self._flushing: threading.Thread | None = None

    @staticmethod
    def continue_from(parent: TraceContext) -> None:
        """Make a span of another process the current one of this task of the event loop, and of its threads."""
        contexts.attach(_under(parent))

    def flush(self, seconds: float) -> None:
        """Export the spans that have ended; blocks for at most so long, and not at all while an earlier call goes on.

        In a thread of its own: a processor may take longer than it is asked to, as while its collector is unreachable.
        """
        if self._flushing is not None and self._flushing.is_alive():
            return
        self._flushing = threading.Thread(target=self._flush, name="flush spans", daemon=True)
        try:
            self._flushing.start()
        except RuntimeError as exc:  # the system refuses a thread
            log.warning("spans_not_flushed", error=repr(exc))
        else:
            self._flushing.join(max(0.0, seconds))

    def _flush(self) -> None:
        try:
            self._provider.force_flush()
        except Exception as exc:
            log.warning("spans_not_flushed", error=repr(exc))

    def shutdown(self) -> None:
        self._provider.shutdown()

    @contextmanager
    def serving(self, path: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """A request over HTTP, which continues the trace of its headers, as the current span."""
        span = self._tracer.start_span(
            f"POST {path}",
            _under(trace_context.of_headers(headers)),
            SpanKind.SERVER,
            {"http.request.method": "POST", "http.route": path, "url.path": path},
        )
        with trace.use_span(span, end_on_exit=True):
            yield span

    @staticmethod
    def answered(span: Span, status: int) -> None:
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            _fail(span, str(status))

    async def enqueuing(
        self, tasks: Sequence[NewTask], store: Callable[[Sequence[NewTask]], Awaitable[list[Any]]]
    ) -> list[Any]:
        """Have tasks stored, with the contexts that they carry on. One span for a caller."""
        here = trace_context.current()
        places_of: dict[object, list[int]] = defaultdict(list)
        for place, task in enumerate(tasks):
            places_of[task.trace or here or place].append(place)
        traced = list(tasks)
        spans: list[tuple[Span, list[int]]] = []
        for caller, places in places_of.items():
            parent = trace_context.of_text(caller) if isinstance(caller, str) else here
            actions = {tasks[place].action for place in places}
            action = actions.pop() if len(actions) == 1 else None
            attributes = _about("enqueue", "create", action)
            if len(places) > 1:
                attributes["messaging.batch.message_count"] = len(places)
            name = "enqueue" if action is None else f"enqueue {action}"
            span = self._tracer.start_span(name, _under(parent), SpanKind.PRODUCER, attributes)
            spans.append((span, places))
            carried = trace_context.of_span(span)
            for place in places:
                traced[place] = replace(tasks[place], trace=carried and carried.text)
        try:
            enqueued = await store(traced)
            for span, places in spans:
                if len(places) == 1 and span.is_recording():
                    made = enqueued[places[0]]
                    span.set_attribute("messaging.message.id", str(made.id))
                    if made.duplicate:
                        span.set_attribute("penstock.duplicate", True)
            return enqueued
        except BaseException as exc:
            for span, _ in spans:
                _fail(span, type(exc).__name__)
            raise
        finally:
            for span, _ in spans:
                span.end()

    def passed(self, operation: str, hops: Sequence[Hop], *, started_ns: int, count: int) -> None:
        """``count`` tasks have passed this process together; those that are sampled get a span each.

        A span has one parent, and several tasks have several. So a span of the batch links to the tasks' traces, and
        their spans to it. operation: send or settle.
        """
        hops = [hop for hop in hops if hop.parent.is_sampled]
        if not hops:
            return
        ended_ns = time_ns()
        start = partial(self._tracer.start_span, start_time=started_ns)
        links = []
        if len(hops) > 1:
            attributes = {**_about(operation, operation), "messaging.batch.message_count": count}
            to_all = [_link(hop.parent) for hop in hops[:_LINKS]]
            batch = start(f"{operation} batch", _ROOT, SpanKind.CLIENT, attributes, to_all)
            if error := next((hop.error for hop in hops if hop.error), None):
                _fail(batch, error)
            batch.end(ended_ns)
            links = [Link(batch.get_span_context())]
        span_kind = SpanKind.PRODUCER if operation == "send" else SpanKind.CLIENT
        for hop in hops:
            attributes = _about(operation, operation, hop.name, hop.task_id)
            span = start(f"{operation} {hop.name}", _under(hop.parent), span_kind, attributes, links)
            if hop.error is not None:
                _fail(span, hop.error)
            span.end(ended_ns)

    def attempt(
        self, action: str, task_id: int, claim: int, carried: CarriedTrace | None, *, redelivered: bool
    ) -> AttemptSpan:
        """An attempt begins: child of the enqueue, linked to the attempt before it; without either it is a root."""
        attributes = {**_about("process", "process", action, task_id), "penstock.claim": claim}
        if redelivered:
            attributes["penstock.redelivered"] = True
        parent = _ROOT if carried is None else _under(carried.context)
        links = _former(carried)
        return AttemptSpan(self._tracer.start_span(f"process {action}", parent, SpanKind.CONSUMER, attributes, links))

    def lost(self, task: Any, carried: CarriedTrace) -> AttemptSpan:
        """An internal span, on no map of services, of an attempt whose end is never reported. task: as found stale."""
        attributes = {**_about("lost", "process", task["action"], task["id"]), "penstock.claim": task["claim"]}
        if task["worker"] is not None:
            attributes["penstock.worker"] = task["worker"]
        # The claim was at the database's clock, which is not ours.
        started_ns = time_ns() - round(task["held_seconds"] * 1e9)
        span = self._tracer.start_span(
            f"lost {task['action']}", _under(carried.context), SpanKind.INTERNAL, attributes, _former(carried),
            start_time=started_ns,
        )  # fmt: skip
        return AttemptSpan(span)

    def batch(self, action: str, attempts: Sequence[AttemptSpan]) -> AttemptSpan:
        """One call of a handler for many tasks begins, linked to the attempt of each."""
        links = [Link(attempt._span.get_span_context()) for attempt in attempts[:_LINKS]]
        attributes = {**_about("process", "process", action), "messaging.batch.message_count": len(attempts)}
        # The call of one task is part of its trace.
        parent = trace.set_span_in_context(attempts[0]._span, _ROOT) if len(attempts) == 1 else _ROOT
        name = f"process batch {action}"
        return AttemptSpan(self._tracer.start_span(name, parent, SpanKind.INTERNAL, attributes, links))


def _about(operation: str, kind: str, action: str | None = None, task_id: int | None = None) -> dict[str, Any]:
    attributes = {
        "messaging.system": "penstock",
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }
    if action is not None:
        attributes["messaging.destination.name"] = action
    if task_id is not None:
        attributes["messaging.message.id"] = str(task_id)
    return attributes


def _under(parent: TraceContext | None) -> contexts.Context:
    return _ROOT if parent is None else _PROPAGATOR.extract(parent.headers, _ROOT)


def _link(to: TraceContext, attributes: dict[str, str] | None = None) -> Link:
    return Link(trace.get_current_span(_under(to)).get_span_context(), attributes)


def _former(carried: CarriedTrace | None) -> list[Link]:
    if carried is None or carried.former is None:
        return []
    return [_link(carried.former, {"penstock.link": "former_attempt"})]


def _fail(span: Span, error: str, why: str = "") -> None:
    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR, why or error))
