"""The one place where settings become connections and connections a running process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from penstock.brokers.base import Queue
from penstock.brokers.opening import open_transport, queue_names
from penstock.payloads.codec import PayloadCodec
from penstock.protocol.errors import SettingsError
from penstock.runtime.chaos import Faults, faults_of
from penstock.runtime.logs import log, setup_logging, setup_root
from penstock.runtime.loop import MakeService, Service, run_services
from penstock.runtime.tracing.active import setup_tracing, stop_tracing
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, misspelt_variables

if TYPE_CHECKING:
    from penstock.db.pool import Store

PROCESSES = ("submitter", "scheduler", "resulter", "supervisor", "api")  # those of `penstock run`
_SOURCES = ("kafka-source", "clockwork-source")

OpenQueue = Callable[[str, str], Queue]


def run_process(name: str, settings: Settings, *, loops: int | None = None, apps: Sequence[str] = ()) -> int:
    """Run one process, or all but the workers in one as `run`, until a signal; returns its exit code. loops: passes
    under way at once, None for the setting. apps: a worker's modules of actions. Raises SettingsError."""
    setup_logging(name, level=settings.log_level, form=settings.log_format)
    for seen, meant in misspelt_variables():
        log.warning("setting_unknown", seen=seen, meant=meant)
    makes = []
    for each in PROCESSES if name == "run" else (name,):
        # More passes would make none of these faster.
        passes = 1 if each in ("supervisor", "api", *_SOURCES) else loops or settings.concurrency
        makes.append((_maker(each, settings, apps, faults_of(settings, each)), passes))
    # The application's modules, which a worker has loaded by now, may have set up logging.
    quiet = "error" if settings.log_level == "error" else "warning"
    setup_root(name, level=settings.log_level if name == "worker" else quiet, form=settings.log_format)
    setup_tracing(name, settings)  # after the application's modules, which may have set a provider of their own
    try:
        return run_services(makes, settings)
    finally:
        stop_tracing()


def _maker(name: str, settings: Settings, apps: Sequence[str], faults: Faults | None) -> MakeService:
    """Modules are imported per process, so that a worker loads no database driver."""
    if name == "worker":
        return _worker(settings, apps, faults)
    from penstock.db.pool import open_store

    _ = settings.require_database_url  # raises at once

    def make(stack: AsyncExitStack) -> Service:
        host = "".join(char for char in socket.gethostname() if char.isascii() and char.isprintable())
        # What Postgres shows for each connection: process and machine, within its 63 bytes.
        shown = f"penstock-{name}@{host[:26]}:{os.getpid()}"
        store = open_store(settings, shown, codec=PayloadCodec(settings), faults=faults)
        stack.push_async_callback(store.close)
        if name not in _SOURCES:
            return _over_postgres(name, settings, store, _opener(settings, stack, faults))
        from penstock.compat.topics.process import ClockworkFeed, Feed, ScheduleFeed, Source

        feed: Feed = ClockworkFeed(settings) if name == "clockwork-source" else ScheduleFeed(settings)
        return Source(name=name, store=store, feed=feed, settings=settings)

    return make


def _worker(settings: Settings, apps: Sequence[str], faults: Faults | None) -> MakeService:
    from penstock.compat.actions import MODULES
    from penstock.worker.deliveries.registry import Deliveries
    from penstock.worker.handlers.actions import REGISTRY, load_app
    from penstock.worker.process import Worker

    for app in apps:
        load_app(app)

    deliveries = Deliveries(settings, REGISTRY, MODULES)
    if settings.deliveries:
        log.info("deliveries_enabled", actions=",".join(settings.deliveries))
    if not REGISTRY:
        raise SettingsError(
            "this worker has no handlers, so every task would fail: name their module with --app MODULE, or enable "
            "built-in actions such as http.request in PENSTOCK_DELIVERIES"
        )
    registry = REGISTRY if faults is None else REGISTRY.inside(faults.around)

    def make(stack: AsyncExitStack) -> Service:
        stack.push_async_callback(deliveries.close)
        deliveries.open()
        queues = _queues(settings, _opener(settings, stack, faults, is_blocked_at_times=True))

        def own_queues(own: AsyncExitStack) -> dict[str, Queue]:
            """For the thread of leases: connections of its own, where leases do not belong to the one that receives."""
            if queues["outbound"].limits.outlives_connection:
                return _queues(settings, _opener(settings, own, faults))
            return queues

        return Worker(
            outbound=queues["outbound"], results=queues["results"], settings=settings, registry=registry,
            apps=apps, own_queues=own_queues,
        )  # fmt: skip

    return make


def _over_postgres(name: str, settings: Settings, store: Store, open_queue: OpenQueue) -> Service:
    queues = _queues(settings, open_queue)
    if name == "submitter":
        from penstock.submitter import Submitter

        return Submitter(store=store, inbound=queues["inbound"], settings=settings)
    if name == "scheduler":
        from penstock.scheduler.process import Scheduler

        return Scheduler(store=store, outbound=queues["outbound"], settings=settings, open_queue=open_queue)
    if name == "resulter":
        from penstock.resulter import Resulter

        return Resulter(store=store, results=queues["results"], settings=settings)
    dead_letters = _queues(settings, open_queue, suffix=DEAD_LETTER_SUFFIX)
    if name == "api":
        from penstock.api.process import Api
        from penstock.compat.clockwork.http import Clockwork
        from penstock.compat.scheduler0.http.routes import Scheduler0

        return Api(
            store=store, settings=settings, queues=queues, dead_letters=dead_letters, additions=[Scheduler0, Clockwork]
        )
    from penstock.compat import delayed_records
    from penstock.supervisor.process import Supervisor

    return Supervisor(
        store=store, queues=queues, dead_letters=dead_letters, settings=settings,
        open_queue=open_queue, additions=[delayed_records.side_tasks],
    )  # fmt: skip


def _queues(settings: Settings, open_queue: OpenQueue, *, suffix: str = "") -> dict[str, Queue]:
    """The three queues by label, or with a suffix their dead-letter queues."""
    return {label + suffix: open_queue(name + suffix, label + suffix) for label, name in queue_names(settings).items()}


def _opener(
    settings: Settings, stack: AsyncExitStack, faults: Faults | None, *, is_blocked_at_times: bool = False
) -> OpenQueue:
    """A function that opens a queue by name, or URL, and label; all share a connection, dead letters have no faults."""
    transport = open_transport(settings, is_blocked_at_times=is_blocked_at_times)
    stack.push_async_callback(transport.close)

    def open_queue(name: str, label: str) -> Queue:
        queue = transport.queue(name, label=label)
        if faults is None or label.endswith(DEAD_LETTER_SUFFIX):
            return queue
        from penstock.brokers.chaos import FaultyQueue

        return FaultyQueue(queue, faults)

    return open_queue
