"""Every metric that Penstock exports: name, unit, labels. docs/metrics.md tables them; a test holds the two together.

Labels stay low in cardinality: a process tells so many actions apart and counts further ones as ``other``, for names of
actions come from callers; everything else is a fixed set.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from time import time
from typing import Any, Self

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Exemplar

from penstock.protocol.task import MAX_ACTIONS_TOLD, OTHER_ACTIONS

_told_actions: set[str] = set()


def told_action(action: str) -> str:
    """The action as a label's value: its name, of the first ones that this process meets."""
    if action not in _told_actions:
        if len(_told_actions) >= MAX_ACTIONS_TOLD:
            return OTHER_ACTIONS
        _told_actions.add(action)
    return action


class _ByAction(MetricWrapperBase):
    """A metric whose first label may be the action."""

    def labels(self, *values: Any, **named: Any) -> Self:
        if values and self._labelnames[:1] == ("action",):
            values = told_action(values[0]), *values[1:]
        return super().labels(*values, **named)


class Counter(_ByAction, prometheus_client.Counter):
    """A counter."""


class Histogram(_ByAction, prometheus_client.Histogram):
    """A histogram that takes many values at once; one at a time, each costs more than the rest of its task's way."""

    def observe_many(self, values: Sequence[float], exemplars: Sequence[tuple[float, str]] = ()) -> None:
        """As ``observe`` of each value. exemplars: those of them that a trace tells more about, with its id."""
        ordered = sorted(values)
        below = 0
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            end = bisect_right(ordered, bound)
            if end > below:
                bucket.inc(end - below)
                below = end
        self._sum.inc(sum(ordered))
        for value, trace_id in exemplars:
            exemplar = Exemplar({"trace_id": trace_id}, value, time())
            self._buckets[bisect_left(self._upper_bounds, value)].set_exemplar(exemplar)


REGISTRY = CollectorRegistry(auto_describe=True)

_RUN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
_WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)

# Every process
PASSES = Counter(
    "penstock_passes_total", "Passes of a process's loop, by outcome (worked, idle, failed)",
    ["process", "outcome"], registry=REGISTRY,
)  # fmt: skip
READY = Gauge("penstock_ready", "1 while the last pass succeeded, else 0", ["process"], registry=REGISTRY)
SQS_CALLS = Counter(
    "penstock_sqs_calls_total", "Calls to SQS, by operation, queue and outcome (ok, partial, failed)",
    ["operation", "queue", "outcome"], registry=REGISTRY,
)  # fmt: skip
SQS_BILLED_UNITS = Counter(
    "penstock_sqs_billed_units_total", "Billed 64 KiB units of SQS calls", ["operation", "queue"], registry=REGISTRY
)
TRANSPORT_CALLS = Counter(
    "penstock_transport_calls_total",
    "Calls to RabbitMQ or Kafka, of sends each message, by transport, operation, queue and outcome (ok, failed)",
    ["transport", "operation", "queue", "outcome"], registry=REGISTRY,
)  # fmt: skip
MESSAGES = Counter(
    "penstock_messages_total", "Messages by queue and direction (received, sent, deleted, released)",
    ["queue", "direction"], registry=REGISTRY,
)  # fmt: skip
STATEMENT_SECONDS = Histogram(
    "penstock_statement_seconds", "Time of one statement, its round trip included",
    ["statement"], buckets=_WAIT_SECONDS, registry=REGISTRY,
)  # fmt: skip
BATCH_SIZE = Histogram(
    "penstock_batch_size", "Tasks touched by one statement or carried by one message",
    ["operation"], buckets=_SIZES, registry=REGISTRY,
)  # fmt: skip
INJECTED_FAULTS = Counter(
    "penstock_injected_faults_total", "Injected faults (PENSTOCK_CHAOS_*), by edge", ["edge"], registry=REGISTRY
)

# Transitions, counted by the process that performs them
TRANSITIONS = Counter(
    "penstock_transitions_total", "Changes of state, by action and the state entered",
    ["action", "state"], registry=REGISTRY,
)  # fmt: skip
ENQUEUED = Counter(
    "penstock_enqueued_total",
    "Tasks accepted, by action and entry point (http, inbound, replay, schedule, workflow, spawn, armed)",
    ["action", "door"], registry=REGISTRY,
)  # fmt: skip
DUPLICATES = Counter(
    "penstock_duplicates_total", "Enqueues answered with an earlier task's id", ["action"], registry=REGISTRY
)
REJECTED = Counter(
    "penstock_rejected_total", "Rejected messages stored, by source (inbound, results)", ["source"], registry=REGISTRY
)
STALE_RESULTS = Counter(
    "penstock_stale_results_total", "Results ignored because a newer claim, or none, holds the task", registry=REGISTRY
)
WAITS_ENDED = Counter(
    "penstock_waits_ended_total",
    "Answers to waits and waits timed out, by outcome (settled, kept, duplicate, refused, timeout)",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
RELEASED = Counter(
    "penstock_released_total", "Claims given back, by reason (send_failed, unsent, untaken, suspect)",
    ["reason"], registry=REGISTRY,
)  # fmt: skip
REPAIRED = Counter("penstock_repaired_total", "Stale tasks repaired, as a failed attempt", registry=REGISTRY)
CLEANED = Counter("penstock_cleaned_total", "Records removed by retention, by kind", ["kind"], registry=REGISTRY)
DUTIES_FAILED = Counter(
    "penstock_duties_failed_total", "Failed rounds of the supervisor's duties, by duty", ["duty"], registry=REGISTRY
)

# Scheduler
QUEUE_WAIT_SECONDS = Histogram(
    "penstock_queue_wait_seconds", "Time from due to claimed", ["action"], buckets=_WAIT_SECONDS, registry=REGISTRY
)
IN_FLIGHT = Gauge("penstock_in_flight", "Tasks claimed and not settled, as last counted", registry=REGISTRY)
WINDOW = Gauge("penstock_window", "Tasks that may be claimed and not settled", registry=REGISTRY)

# Worker
RUN_SECONDS = Histogram(
    "penstock_run_seconds", "Run time of a handler", ["action", "outcome"], buckets=_RUN_SECONDS, registry=REGISTRY
)
OUTBOUND_WAIT_SECONDS = Histogram(
    "penstock_outbound_wait_seconds", "Time from sent by the scheduler to started by the worker",
    buckets=_WAIT_SECONDS, registry=REGISTRY,
)  # fmt: skip
RUNNING = Gauge("penstock_running", "Handlers running now", registry=REGISTRY)
LOOP_BLOCKED_SECONDS = Counter(
    "penstock_loop_blocked_seconds_total", "Time for which a handler blocked the worker's event loop",
    registry=REGISTRY,
)  # fmt: skip
HELD_MESSAGES = Gauge("penstock_held_messages", "Outbound messages received and not yet deleted", registry=REGISTRY)
KAFKA_PUBLISHED = Counter(
    "penstock_kafka_published_total", "Records of kafka.publish, by outcome (published, failed, refused)",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
PUBLISH_LATENESS_SECONDS = Histogram(
    "penstock_publish_lateness_seconds",
    "Time from when a record of kafka.publish was due (due_at) to its acknowledgement, by the worker's clock",
    buckets=_WAIT_SECONDS, registry=REGISTRY,
)  # fmt: skip

# Supervisor
BACKLOG = Gauge("penstock_backlog", "Live tasks, by state", ["state"], registry=REGISTRY)
DUE = Gauge("penstock_due", "Tasks that are due and not claimed", registry=REGISTRY)
OLDEST_DUE_SECONDS = Gauge(
    "penstock_oldest_due_seconds", "Age of the oldest due task since it was due", registry=REGISTRY
)
QUEUE_DEPTH = Gauge(
    "penstock_queue_depth", "Messages in a queue, by queue and kind (visible, in_flight, delayed)",
    ["queue", "kind"], registry=REGISTRY,
)  # fmt: skip
SCALING_WAITING = Gauge(
    "penstock_scaling_waiting", "Tasks that wait for the workers of a route, counted up to 50000",
    ["route"], registry=REGISTRY,
)  # fmt: skip
SCALING_IN_FLIGHT = Gauge(
    "penstock_scaling_in_flight", "Tasks of a route claimed and not settled, counted up to 50000",
    ["route"], registry=REGISTRY,
)  # fmt: skip
SCALING_OLDEST_SECONDS = Gauge(
    "penstock_scaling_oldest_seconds", "Age of the oldest task that waits for the workers of a route",
    ["route"], registry=REGISTRY,
)  # fmt: skip
SCALING_SLOTS = Gauge(
    "penstock_scaling_slots", "Handlers of a route that have to run at once to keep up and drain it within a minute",
    ["route"], registry=REGISTRY,
)  # fmt: skip
REJECTED_KEPT = Gauge("penstock_rejected_kept", "Rejected messages kept for an operator", registry=REGISTRY)
SCHEDULE_RUNS = Counter(
    "penstock_schedule_runs_total", "Instants of schedules, by outcome (FIRED, SKIPPED, MISSED)",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
ARMED = Gauge("penstock_armed", "Delayed records stored, by source", ["source"], registry=REGISTRY)
ARMED_LATENESS_SECONDS = Histogram(
    "penstock_armed_lateness_seconds", "Delay between a delayed record's due time and its task",
    buckets=_WAIT_SECONDS, registry=REGISTRY,
)  # fmt: skip
SCHEDULE_LATENESS_SECONDS = Histogram(
    "penstock_schedule_lateness_seconds", "Delay between a schedule's due time and its firing",
    buckets=_WAIT_SECONDS, registry=REGISTRY,
)  # fmt: skip
WORKFLOW_EVENTS = Counter(
    "penstock_workflow_events_total", "Settled steps processed by their workflow", registry=REGISTRY
)
WORKFLOWS_ENDED = Counter(
    "penstock_workflows_ended_total", "Workflows ended, by state (SUCCESS, FAILED)",
    ["state"], registry=REGISTRY,
)  # fmt: skip

# Payloads that are objects, or encrypted
PAYLOAD_OBJECTS = Counter(
    "penstock_payload_objects_total",
    "Calls to the bucket of large payloads, by operation (put, get, delete) and outcome (ok, lost, away)",
    ["operation", "outcome"], registry=REGISTRY,
)  # fmt: skip
PAYLOAD_BYTES = Counter(
    "penstock_payload_bytes_total", "Bytes of large payloads and results put into the bucket and got from it",
    ["operation"], registry=REGISTRY,
)  # fmt: skip
PAYLOADS_POSTPONED = Counter(
    "penstock_payloads_postponed_total",
    "Attempts returned because their payload was unavailable: S3 did not answer, or the worker lacked the key",
    ["action"], registry=REGISTRY,
)  # fmt: skip

# Delayed records: clockwork's API, penstock clockwork-source and penstock kafka-source
ARMED_CHANGES = Counter(
    "penstock_armed_changes_total",
    "Changes of delayed records, by source and outcome (armed, replaced, known, cancelled, refused, fired)",
    ["source", "outcome"], registry=REGISTRY,
)  # fmt: skip
SOURCE_RECORDS = Counter(
    "penstock_source_records_total",
    "Records read from Kafka, by source and kind (update, canceled, expired, invalid-avro, not-json, invalid-json, "
    "decode, transformation)",
    ["source", "kind"], registry=REGISTRY,
)  # fmt: skip
CREATION_LATENCY_SECONDS = Histogram(
    "penstock_creation_latency_seconds", "Time from a request, or a record in Kafka, to the stored delayed record",
    ["source"], buckets=_WAIT_SECONDS, registry=REGISTRY,
)  # fmt: skip

# Api
REQUESTS = Counter(
    "penstock_requests_total", "JSON-RPC requests over HTTP, by method and outcome (ok, or the error code)",
    ["method", "outcome"], registry=REGISTRY,
)  # fmt: skip
REQUEST_SECONDS = Histogram(
    "penstock_request_seconds",
    "Time to answer one HTTP request that does not wait for results",
    buckets=_WAIT_SECONDS,
    registry=REGISTRY,
)
RESULT_WAITS = Gauge(
    "penstock_result_waits", "Tasks that callers of result wait for now, counted per caller", registry=REGISTRY
)
REFUSED = Counter(
    "penstock_refused_total",
    "HTTP requests refused before they were processed, by reason (host, key, rate, media_type, size, time, head, "
    "connections, memory)",
    ["reason"], registry=REGISTRY,
)  # fmt: skip
