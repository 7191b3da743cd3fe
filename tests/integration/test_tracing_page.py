"""docs/tracing.md is run: its variables and its handler in a worker process, which exports to a collector here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.brokers.base import Outgoing
from penstock.brokers.sqs import SqsQueue
from penstock.db.pool import Store
from penstock.protocol.message_attributes import decode_traces
from penstock.resulter import Resulter
from penstock.scheduler.process import Scheduler
from penstock.settings.model import Settings
from penstock.tasks import enqueue

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tracing.md").read_text("utf-8")
TRACE_ID, ENQUEUE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PATIENCE_SECONDS = 60.0


class Collector:
    """Takes spans by OTLP over HTTP, as protobuf."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        collector.spans += [(named["service.name"], span) for span in scope.spans]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


async def test_the_example_of_the_tracing_page_reaches_a_collector(
    store: Store,
    settings: Settings,
    outbound: SqsQueue,
    results: SqsQueue,
    sql: Any,
    tmp_path: Path,
    collector: Collector,
) -> None:
    (variables,), (handler,) = blocks("shell trace"), blocks("python app")
    (tmp_path / "myapp").mkdir()
    (tmp_path / "myapp" / "tasks.py").write_text(handler)
    environment = dict(line.split("=", 1) for line in variables.splitlines()) | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "PENSTOCK_SQS_ENDPOINT_URL": str(settings.sqs_endpoint_url),
        "PENSTOCK_AWS_REGION": "us-east-1",
        "PENSTOCK_OUTBOUND_QUEUE": settings.outbound_queue,
        "PENSTOCK_RESULTS_QUEUE": settings.results_queue,
        "PENSTOCK_RECEIVE_WAIT_SECONDS": "1",
        "PENSTOCK_METRICS_PORT": "0",
        "PYTHONPATH": str(ROOT / "services"),
    }
    async with store.transaction() as session:
        (made,) = await enqueue.enqueue(session, _tasks())
        # As an api with tracing on would have written it.
        await session.fetch("note_traces", [made.id], [f"00-{TRACE_ID}-{ENQUEUE}-01"])
    scheduler = Scheduler(store=store, outbound=outbound, settings=settings, open_queue=lambda name, label: outbound)
    await scheduler.open()
    assert await scheduler.run_once() == 1
    worker = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "--app", "myapp.tasks"], cwd=tmp_path, env=os.environ | environment
    )
    try:
        resulter = Resulter(store=store, results=results, settings=settings)
        await resulter.open()
        deadline = monotonic() + PATIENCE_SECONDS
        while await sql.fetchval("select state from penstock.task_history where id = $1", made.id) is None:
            assert worker.poll() is None, "the worker has ended"
            assert monotonic() < deadline, "waited for the task to settle"
            await resulter.run_once()
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_SECONDS) == 0
    # Exported as the process ended, at the latest.
    spans = {span.name: (service, span) for service, span in collector.spans}
    service, attempt = spans["process thumbnail"]
    assert service == "penstock-worker"
    assert (attempt.trace_id.hex(), attempt.parent_span_id.hex()) == (TRACE_ID, ENQUEUE)
    _, inside = spans["fetch"]
    assert (inside.trace_id.hex(), inside.parent_span_id) == (TRACE_ID, attempt.span_id)


def _tasks() -> list[Any]:
    from penstock.protocol.task import NewTask

    return [NewTask("thumbnail", '{"url":"https://example.org/a.png"}')]


async def test_the_attribute_of_the_page_is_read_as_it_says() -> None:
    (text,) = blocks("json traces")
    entries = json.loads(text)
    found = decode_traces({"traces": text}, [42, 43, 44])
    assert Outgoing("{}", {"traces": text}).attributes
    assert {task_id: one.context.traceparent for task_id, one in found.items()} == {
        task_id: entry["traceparent"] for entry in entries for task_id in entry["tasks"]
    }
    assert found[44].context.state == "rojo=1"
    assert found[44].former is not None
    assert found[44].former.traceparent == entries[1]["link"]
    assert found[42].former is None
