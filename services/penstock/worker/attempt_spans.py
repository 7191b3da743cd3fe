"""Traces of attempts: their spans begun before the handler is called, ended with the answer, which tells them on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.reports import add_trace
from penstock.worker.attempt import Job
from penstock.worker.batch_calls import Batch

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import Attempt, Spans


def begin_attempt(spans: Spans, job: Job) -> Attempt:
    """A job starts now."""
    redelivered = job.held.message.receive_count > 1
    job.attempt = spans.attempt(
        job.handler.name, job.claim.task_id, job.claim.claim, job.carried, redelivered=redelivered
    )
    return job.attempt


def begin_batch(spans: Spans, batch: Batch) -> Attempt:
    """A batch starts now; what its handler does belongs to the call, which is of many traces."""
    call = spans.batch(batch.handler.name, [begin_attempt(spans, job) for job in batch.jobs])
    call.activate()
    return call


def end_attempt(job: Job, error: str, answer: str = "") -> str:
    """A job has ended; returns its answer, with the attempt's context where somebody after it needs that.

    error: kind of its failure, empty for none.
    """
    attempt = job.attempt
    if attempt is None:
        return answer
    attempt.end(error)
    trace = attempt.context
    if not answer or trace is None or not (trace.is_sampled or job.spawned):
        return answer
    return add_trace(answer, trace)
