"""OpenTelemetry traces: an optional extra, off unless PENSTOCK_TRACES says so, and nothing of it is loaded then.

Code that makes spans asks for :func:`active` and makes none where it is None. Like the metrics it is one for the
process: its spans have to meet those of the handlers, which know the process' tracer alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.tracing.spans import Spans
    from penstock.settings.model import Settings

__all__ = ["active", "setup_tracing", "stop_tracing", "use"]

_active: Spans | None = None


def active() -> Spans | None:
    """What makes spans, None while tracing is off."""
    return _active


def setup_tracing(process: str, settings: Settings) -> None:
    """Begin tracing in this process, if the settings want it. Raises SettingsError where it cannot be."""
    if settings.traces:
        from penstock.runtime.tracing.provider import open_provider

        provider = open_provider(process)  # first, for it says what to install
        from penstock.runtime.tracing.spans import Spans

        use(Spans(provider))


def use(spans: Spans | None) -> None:
    """Make spans with this from now on; None: no more."""
    global _active
    _active = spans


def stop_tracing() -> None:
    """Export what is left and end tracing."""
    spans = _active
    use(None)
    if spans is not None:
        spans.shutdown()
