"""OpenTelemetry traces, when asked for."""
