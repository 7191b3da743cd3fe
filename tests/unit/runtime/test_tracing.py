from __future__ import annotations

import subprocess
import sys
import threading
from time import monotonic

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from penstock.protocol.errors import SettingsError
from penstock.runtime.tracing.spans import Spans
from penstock.settings.model import load_settings


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what is loaded, and the provider, are the process'."""
    return subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": "services", "PATH": "/usr/bin:/bin", **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


_LOAD = """
import sys
import penstock.api.process, penstock.submitter, penstock.scheduler.process, penstock.worker.process
import penstock.resulter, penstock.supervisor.process
import penstock.client.client, penstock.client.async_client, penstock.tasks.transactional
from penstock.settings.model import load_settings
from penstock.runtime.tracing import active as tracing
tracing.setup_tracing("worker", load_settings())
print(sorted({name.split(".")[0] for name in sys.modules} & {"opentelemetry"}), tracing.active() is not None)
"""


def test_nothing_of_opentelemetry_is_loaded_while_tracing_is_off() -> None:
    done = run(_LOAD)
    assert done.stdout.split("\n")[0] == "[] False", done.stderr
    done = run(_LOAD, PENSTOCK_TRACES="true", OTEL_TRACES_EXPORTER="none")
    assert done.stdout.split("\n")[0] == "['opentelemetry'] True", done.stderr


def test_without_the_extra_the_error_names_it() -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None\n"
    done = run(hidden + _LOAD, PENSTOCK_TRACES="true")
    assert done.returncode == 1
    assert "SettingsError: PENSTOCK_TRACES needs opentelemetry: pip install 'penstock[otel]'" in done.stderr


_PROVIDER = """
from penstock.settings.model import load_settings
from penstock.runtime.tracing import active as tracing
from opentelemetry import trace
tracing.setup_tracing("scheduler", load_settings())
provider = trace.get_tracer_provider()
print(provider.resource.attributes["service.name"], provider.sampler.get_description().split("{")[0])
with trace.get_tracer("app").start_as_current_span("hello"):
    pass
tracing.stop_tracing()
"""


def test_the_standard_variables_say_name_sampler_and_exporter() -> None:
    done = run(
        _PROVIDER, PENSTOCK_TRACES="true", OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="tasks",
        OTEL_TRACES_SAMPLER="always_on",
    )  # fmt: skip
    assert done.stdout.startswith("tasks AlwaysOnSampler\n"), done.stderr
    assert '"name": "hello"' in done.stdout
    named = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=other"}
    done = run(_PROVIDER, PENSTOCK_TRACES="true", OTEL_TRACES_EXPORTER="none", **named)
    assert done.stdout == "other ParentBased\n", done.stderr


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin': choose of otlp, console, none"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': choose of http/protobuf, grpc",
        ),
    ],
    ids=["exporter", "protocol"],
)
def test_a_variable_that_makes_no_sense_is_named(variables: dict[str, str], problem: str) -> None:
    done = run(_PROVIDER, PENSTOCK_TRACES="true", **variables)
    assert done.returncode == 1
    assert problem in done.stderr


def test_an_applications_own_provider_is_used() -> None:
    own = """
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider(resource=Resource({"service.name": "mine"})))
"""
    done = run(own + _PROVIDER, PENSTOCK_TRACES="true")
    assert done.stdout.startswith("mine "), done.stderr


def test_a_link_to_traces_has_to_name_the_trace() -> None:
    assert load_settings(trace_url="https://jaeger/trace/{trace_id}").trace_url
    with pytest.raises(SettingsError, match="trace_id"):
        load_settings(trace_url="https://jaeger/trace")
    with pytest.raises(SettingsError, match="trace_id"):
        load_settings(trace_url="javascript:{trace_id}")


def test_one_flush_at_a_time_is_under_way_and_no_later_one_waits_for_it() -> None:
    flushes: list[int] = []
    may_end = threading.Event()

    class Slow(SpanProcessor):
        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            flushes.append(timeout_millis)
            return may_end.wait(60)

    provider = TracerProvider()
    provider.add_span_processor(Slow())
    spans = Spans(provider)
    spans.flush(0.01)
    before = monotonic()
    spans.flush(30)
    assert monotonic() - before < 30
    (flushing,) = [thread for thread in threading.enumerate() if thread.name == "flush spans"]
    may_end.set()
    flushing.join(30)
    assert len(flushes) == 1
    spans.flush(30)
    assert len(flushes) == 2
