"""Spans of attempts: started before the handler is called, ended with the response, which carries the trace context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.reports import add_trace
from penstock.worker.attempt import Attempt
from penstock.worker.batch_calls import Batch

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import AttemptSpan, Spans


def begin_attempt(spans: Spans, attempt: Attempt) -> AttemptSpan:
    """Start the span of an attempt."""
    redelivered = attempt.lease.message.receive_count > 1
    attempt.span = spans.attempt(
        attempt.handler.name, attempt.claim.task_id, attempt.claim.claim, attempt.carried, redelivered=redelivered
    )
    return attempt.span


def begin_batch(spans: Spans, batch: Batch) -> AttemptSpan:
    """Start the span of a batched call, which the handler's own spans are children of, and those of its attempts."""
    call = spans.batch(batch.handler.name, [begin_attempt(spans, attempt) for attempt in batch.attempts])
    call.activate()
    return call


def end_attempt(attempt: Attempt, error: str, answer: str = "") -> str:
    """End the span; returns the response, with the trace context if it is sampled or the attempt spawned tasks.

    error: the kind of failure; empty for a success.
    """
    span = attempt.span
    if span is None:
        return answer
    span.end(error)
    trace = span.context
    if not answer or trace is None or not (trace.is_sampled or attempt.spawned):
        return answer
    return add_trace(answer, trace)
