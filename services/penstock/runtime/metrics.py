"""Every metric that Penstock exports: name without `penstock_`, unit, labels, as tabled in docs/metrics.md.

Labels stay low in cardinality: a process distinguishes so many actions and counts further ones as ``other``, for names
of actions come from callers; everything else is a fixed set.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from time import time
from typing import Any, Self

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Exemplar

from penstock.protocol.task import MAX_ACTIONS_SHOWN, OTHER_ACTIONS

_labelled_actions: set[str] = set()


class _ByAction(MetricWrapperBase):
    """A metric whose first label may be the action: its name, of the first ones that this process meets."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._met: dict[tuple[Any, ...], Self] = {}  # the library's own look-up costs more than most that is counted
        super().__init__(*arguments, **named)

    def labels(self, *values: Any) -> Self:  # type: ignore[override]  # labels are given in order, none by its name
        if (met := self._met.get(values)) is not None:
            return met
        if values and self._labelnames[:1] == ("action",) and values[0] not in _labelled_actions:
            if len(_labelled_actions) < MAX_ACTIONS_SHOWN:
                _labelled_actions.add(values[0])
            else:
                return super().labels(OTHER_ACTIONS, *values[1:])
        made = self._met[values] = super().labels(*values)
        return made


class Counter(_ByAction, prometheus_client.Counter):
    """A counter."""


class Histogram(_ByAction, prometheus_client.Histogram):
    """A histogram that takes many values at once; observed one at a time, they cost more than the rest of a task."""

    def observe_many(self, values: Sequence[float], exemplars: Sequence[tuple[float, str]] = ()) -> None:
        """As ``observe`` of each value. exemplars: values that belong to a trace, with its id."""
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
_counter = partial(Counter, namespace="penstock", registry=REGISTRY)
_gauge = partial(Gauge, namespace="penstock", registry=REGISTRY)
_histogram = partial(Histogram, namespace="penstock", buckets=_WAIT_SECONDS, registry=REGISTRY)

# Every process
PASSES = _counter(
    "passes_total", "Passes of a process's loop, by outcome (worked, idle, failed)", ["process", "outcome"]
)
LOOP_LAG_SECONDS = _histogram("loop_lag_seconds", "How late the event loop turns, looked at once a second", ["process"])
READY = _gauge("ready", "1 while the last pass succeeded, else 0", ["process"])
SQS_CALLS = _counter(
    "sqs_calls_total",
    "Calls to SQS, by operation, queue and outcome (ok, partial, failed)",
    ["operation", "queue", "outcome"],
)
SQS_BILLED_UNITS = _counter("sqs_billed_units_total", "Billed 64 KiB units of SQS calls", ["operation", "queue"])
TRANSPORT_CALLS = _counter(
    "transport_calls_total",
    "Calls to RabbitMQ or Kafka, of sends each message, by transport, operation, queue and outcome (ok, failed)",
    ["transport", "operation", "queue", "outcome"],
)
MESSAGES = _counter(
    "messages_total", "Messages by queue and direction (received, sent, deleted, released)", ["queue", "direction"]
)
STATEMENT_SECONDS = _histogram("statement_seconds", "Time of one statement, its round trip included", ["statement"])
BATCH_SIZE = _histogram(
    "batch_size", "Tasks touched by one statement or carried by one message", ["operation"], buckets=_SIZES
)
INJECTED_FAULTS = _counter("injected_faults_total", "Injected faults (PENSTOCK_CHAOS_*), by edge", ["edge"])

# Transitions, counted by the process that performs them
TRANSITIONS = _counter("transitions_total", "Changes of state, by action and the state entered", ["action", "state"])
ENQUEUED = _counter(
    "enqueued_total",
    "Tasks accepted, by action and source (http, inbound, replay, schedule, workflow, spawn, delayed_record)",
    ["action", "source"],
)
DUPLICATES = _counter("duplicates_total", "Enqueues answered with an earlier task's id", ["action"])
REJECTED = _counter(
    "rejected_total", "Rejected messages stored, by source (inbound, results, kafka-source)", ["source"]
)
STALE_RESULTS = _counter("stale_results_total", "Results ignored because a newer claim, or none, holds the task")
WAITS_ENDED = _counter(
    "waits_ended_total",
    "Answers to waits and waits timed out, by outcome (settled, kept, duplicate, refused, timeout)",
    ["outcome"],
)
RELEASED = _counter(
    "released_total", "Claims given back, by reason (send_failed, unsent, untaken, suspect)", ["reason"]
)
REPAIRED = _counter("repaired_total", "Stale tasks repaired, as a failed attempt")
CLEANED = _counter("cleaned_total", "Records removed by retention, by kind", ["kind"])
DUTIES_FAILED = _counter("duties_failed_total", "Failed rounds of the supervisor's duties, by duty", ["duty"])

# Scheduler
QUEUE_WAIT_SECONDS = _histogram("queue_wait_seconds", "Time from due to claimed", ["action"])
IN_FLIGHT = _gauge("in_flight", "Tasks without a route claimed and not settled, as last counted")
WINDOW = _gauge("window", "Tasks without a route that may be claimed and not settled")

# Worker
RUN_SECONDS = _histogram("run_seconds", "Run time of a handler", ["action", "outcome"], buckets=_RUN_SECONDS)
OUTBOUND_WAIT_SECONDS = _histogram("outbound_wait_seconds", "Time from sent by the scheduler to started by the worker")
RUNNING = _gauge("running", "Handlers running now")
START_DELAY_SECONDS = _histogram(
    "start_delay_seconds",
    "Time from received by the worker to the handler's start; of a thousand starts a second at most",
)
THREADS = _gauge(
    "threads",
    "Threads for handlers that are plain functions, by state (idle, busy, left: behind after a timeout)",
    ["state"],
)
LOOP_BLOCKED_SECONDS = _counter(
    "loop_blocked_seconds_total", "Time for which a handler blocked the worker's event loop"
)
OUTPUT_ENTRIES = _counter(
    "output_entries_total", "Log lines and chunks of tasks, by outcome (reported, dropped)", ["outcome"]
)
HELD_MESSAGES = _gauge("held_messages", "Outbound messages received and not yet deleted")
PROCESSES = _gauge("processes", "Child processes for handlers, by state (idle, busy)", ["state"])
PROCESS_ENDS = _counter(
    "process_ends_total", "Child processes that ended, by reason (recycled, memory, timeout, died, stopped)", ["reason"]
)
PROCESS_PEAK_BYTES = _histogram(
    "process_peak_bytes", "Peak memory of child processes that ended", buckets=[2.0**power for power in range(25, 37)]
)
KAFKA_PUBLISHED = _counter(
    "kafka_published_total", "Records of kafka.publish, by outcome (published, failed, refused)", ["outcome"]
)
PUBLISH_LATENESS_SECONDS = _histogram(
    "publish_lateness_seconds",
    "Time from when a record of kafka.publish was due (due_at) to its acknowledgement, by the worker's clock",
)

# Supervisor
BACKLOG = _gauge("backlog", "Live tasks, by state", ["state"])
DUE = _gauge("due", "Tasks that are due and not claimed")
OLDEST_DUE_SECONDS = _gauge("oldest_due_seconds", "Age of the oldest due task since it was due")
QUEUE_DEPTH = _gauge(
    "queue_depth", "Messages in a queue, by queue and kind (visible, in_flight, delayed)", ["queue", "kind"]
)
SCALING_WAITING = _gauge(
    "scaling_waiting", "Tasks that wait for the workers of a route, counted up to 50000", ["route"]
)
SCALING_IN_FLIGHT = _gauge(
    "scaling_in_flight", "Tasks of a route claimed and not settled, counted up to 50000", ["route"]
)
SCALING_OLDEST_SECONDS = _gauge(
    "scaling_oldest_seconds", "Age of the oldest task that waits for the workers of a route", ["route"]
)
SCALING_SLOTS = _gauge(
    "scaling_slots", "Handlers of a route that have to run at once to keep up and drain it within a minute", ["route"]
)
REJECTED_KEPT = _gauge("rejected_kept", "Rejected messages kept for an operator")
SCHEDULE_RUNS = _counter(
    "schedule_runs_total", "Instants of schedules, by outcome (FIRED, SKIPPED, MISSED)", ["outcome"]
)
DELAYED_RECORDS = _gauge("delayed_records", "Delayed records stored, by source", ["source"])
DELAYED_RECORD_LATENESS_SECONDS = _histogram(
    "delayed_record_lateness_seconds", "Delay between a delayed record's due time and its task"
)
SCHEDULE_LATENESS_SECONDS = _histogram(
    "schedule_lateness_seconds", "Delay between a schedule's due time and its firing"
)
WORKFLOW_EVENTS = _counter("workflow_events_total", "Settled steps processed by their workflow")
WORKFLOWS_ENDED = _counter("workflows_ended_total", "Workflows ended, by state (SUCCESS, FAILED)", ["state"])

# Payloads that are objects, or encrypted
PAYLOAD_OBJECTS = _counter(
    "payload_objects_total",
    "Calls to the bucket of large payloads, by operation (put, get, delete) and outcome (ok, lost, away)",
    ["operation", "outcome"],
)
PAYLOAD_BYTES = _counter(
    "payload_bytes_total", "Bytes of large payloads and results put into the bucket and got from it", ["operation"]
)
ACTION_WORKERS = _gauge("action_workers", "Workers that announce an action", ["action"])
ACTION_WAITING = _gauge("action_waiting", "Tasks that wait for a worker that runs their action", ["action"])
POSTPONED = _counter(
    "postponed_total",
    "Attempts given back that do not count, by reason: payload (it could not be had), snooze (its handler asked for "
    "it), unknown (the worker has no handler)",
    ["action", "reason"],
)

# Delayed records: clockwork's API, penstock clockwork-source and penstock kafka-source
DELAYED_RECORD_CHANGES = _counter(
    "delayed_record_changes_total",
    "Changes of delayed records, by source and outcome (stored, replaced, known, cancelled, refused, published)",
    ["source", "outcome"],
)
SOURCE_RECORDS = _counter(
    "source_records_total",
    "Records read from Kafka, by source and kind (update, canceled, expired, invalid-avro, not-json, invalid-json, "
    "decode, transformation)",
    ["source", "kind"],
)
CREATION_LATENCY_SECONDS = _histogram(
    "creation_latency_seconds", "Time from a request, or a record in Kafka, to the stored delayed record", ["source"]
)

# Api
REQUESTS = _counter(
    "requests_total",
    "JSON-RPC requests over HTTP, by method and outcome (ok, or the error code)",
    ["method", "outcome"],
)
REQUEST_SECONDS = _histogram("request_seconds", "Time to answer one HTTP request that does not wait for results")
RESULT_WAITS = _gauge("result_waits", "Tasks that callers of result wait for now, counted per caller")
REPLICA_AGE_SECONDS = _gauge(
    "replica_age_seconds",
    "Age of the read replica, an upper bound; +Inf while reads go to the primary, 0 where no replica is set",
)
REFUSED = _counter(
    "refused_total",
    "HTTP requests refused before they were processed, by reason (host, key, rate, media_type, size, time, head, "
    "connections, memory)",
    ["reason"],
)
