"""The tracer provider of a process: exporter, sampler and name as OpenTelemetry's own variables, ``OTEL_*``, say."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from penstock.protocol.errors import SettingsError
from penstock.protocol.version import __version__

_EXTRA = 'PENSTOCK_TRACES is on and OpenTelemetry is not installed: pip install "penstock[otel]"'
_EXPORTERS = ("otlp", "console", "none")
_PROTOCOLS = {
    "http/protobuf": (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry-exporter-otlp-proto-http",
    ),
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "opentelemetry-exporter-otlp-proto-grpc"),
}


def open_provider(process: str) -> Any:
    """The provider that spans of this process go to.

    It is that of the application where it has set one, else a new one, which is everybody's from then on. Raises
    SettingsError: no library, or a variable that makes no sense.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError as exc:
        raise SettingsError(_EXTRA) from exc
    given = trace.get_tracer_provider()
    if isinstance(given, TracerProvider):
        return given
    provider = _make_provider(process)
    trace.set_tracer_provider(provider)
    return provider


def _make_provider(process: str) -> Any:
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor

    processors: list[Any] = []
    for name in _exporters():
        if name == "otlp":
            processors.append(BatchSpanProcessor(_otlp()))
        elif name == "console":
            processors.append(SimpleSpanProcessor(ConsoleSpanExporter()))
    resource = Resource({SERVICE_VERSION: __version__}).merge(Resource.create())
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: f"penstock-{process}"}))
    provider = TracerProvider(resource=resource)
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def _exporters() -> list[str]:
    given = [name.strip() for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",") if name.strip()]
    for name in given:
        if name not in _EXPORTERS:
            raise SettingsError(f"OTEL_TRACES_EXPORTER is {name!r}: choose of {', '.join(_EXPORTERS)}")
    return given or ["otlp"]


def _otlp() -> Any:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    if protocol not in _PROTOCOLS:
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: choose of {', '.join(_PROTOCOLS)}")
    module, package = _PROTOCOLS[protocol]
    try:
        return import_module(module).OTLPSpanExporter()
    except ImportError as exc:
        if protocol == "http/protobuf":
            raise SettingsError(_EXTRA) from exc
        raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}: pip install {package}") from exc
