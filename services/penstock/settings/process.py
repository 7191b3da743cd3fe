"""Settings of any process: its loops, how it stops, its logs and its traces."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from penstock.settings.values import Group, empty_is_unset


class ProcessSettings(Group):
    """The sections Running and Traces of docs/configuration.md."""

    concurrency: int = Field(
        2, ge=1, le=256, description="Concurrent receive loops of one process, unless `--loops` is given."
    )
    grace_seconds: float = Field(25, ge=0, description="Time to finish and hand back work after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_failure_details: bool = Field(
        True,
        description="Log a failed attempt with the error's message and traceback, which may hold parts of a "
        "payload; false: only its type, as always where payloads are encrypted.",
    )
    log_format: Literal["logfmt", "json"] = Field("logfmt", description="Format of log lines.")

    traces: bool = Field(
        False,
        description="Make OpenTelemetry spans, and pass trace contexts on; `OTEL_*` configures the export. Needs "
        "`penstock[otel]`.",
    )
    trace_url: str | None = Field(
        None, description="The dashboard's link to a trace, `{trace_id}` standing for its id; unset: no link."
    )

    _unset_traces = field_validator("trace_url", mode="before")(empty_is_unset)

    @field_validator("trace_url")
    @classmethod
    def _names_trace(cls, value: str | None) -> str | None:
        if value is not None and ("{trace_id}" not in value or not value.startswith(("http://", "https://"))):
            raise ValueError("must be a URL such as https://jaeger/trace/{trace_id}, with {trace_id} in it")
        return value
