"""OpenTelemetry traces: an optional extra, off unless PENSTOCK_TRACES is set, and not loaded then.

Code that makes spans calls :func:`active` and makes none where it is None. Like the metrics it is one for the process:
its spans have to meet those of the handlers, which know the process' tracer alone.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import SettingsError, needing
from penstock.protocol.version import __version__

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import Spans
    from penstock.settings.model import Settings

_PROTOCOLS = {"http/protobuf": "http", "grpc": "grpc"}  # as the packages of their exporters are named

_active: Spans | None = None


def active() -> Spans | None:
    """What makes spans, None while tracing is off."""
    return _active


def setup_tracing(process: str, settings: Settings) -> None:
    """Begin tracing in this process, if the settings say so. Raises SettingsError."""
    if settings.traces:
        provider = _open_provider(process)  # first, for its error says what to install
        from penstock.runtime.tracing.spans import Spans

        use(Spans(provider))


def use(spans: Spans | None) -> None:
    """Make spans with this from now on; None: no more."""
    global _active
    _active = spans


def stop_tracing() -> None:
    """Export what is left and end tracing."""
    if _active is not None:
        _active.shutdown()
    use(None)


def _open_provider(process: str) -> Any:
    """The application's tracer provider, or a new global one by OpenTelemetry's ``OTEL_*``. Raises SettingsError."""
    with needing("PENSTOCK_TRACES", "otel"):
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
    given = trace.get_tracer_provider()
    if isinstance(given, TracerProvider):
        return given
    resource = Resource({SERVICE_VERSION: __version__}).merge(Resource.create())
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: f"penstock-{process}"}))
    provider = TracerProvider(resource=resource)
    names = [name.strip() for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",") if name.strip()]
    for name in names or ["otlp"]:
        if name == "otlp":
            provider.add_span_processor(BatchSpanProcessor(_otlp()))
        elif name == "console":
            provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
        elif name != "none":
            raise SettingsError(f"OTEL_TRACES_EXPORTER is {name!r}: choose of otlp, console, none")
    trace.set_tracer_provider(provider)
    return provider


def _otlp() -> Any:
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or general
    if protocol not in _PROTOCOLS:
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: choose of {', '.join(_PROTOCOLS)}")
    kind = _PROTOCOLS[protocol]
    try:
        return import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter").OTLPSpanExporter()
    except ImportError as exc:
        package = f"opentelemetry-exporter-otlp-proto-{kind}"
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}: pip install {package}") from exc
