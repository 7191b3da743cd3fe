"""Parts of answers: instants, raw JSON, descriptions of fields."""

from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Instant = Annotated[
    str, Meta(description="RFC 3339 in UTC, with microseconds.", examples=["2030-01-31T08:00:00.000000Z"])
]

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def about(description: str) -> Meta:
    return Meta(description=description)


CURSOR = about("The cursor of the page before.")
NEXT_CURSOR = about("Pass it on for the next page; null at the end.")


def timestamp(instant: datetime) -> str:
    """RFC 3339 in UTC with microseconds and Z."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def raw(text: str | None) -> Any:
    """JSON text as part of an answer; None becomes null."""
    return None if text is None else msgspec.Raw(text.encode("utf-8"))


def span(seconds: float | None) -> str:
    """A duration in its largest unit: ``3 ms``, ``1.2 s``, ``4 min``, ``2.5 h``."""
    if seconds is None:
        return "–"
    if 0 < seconds < 0.001:
        return "<1 ms"
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    size, unit = next(one for one in _UNITS if seconds >= one[0])
    return f"{trimmed(seconds / size, 1)} {unit}"


def trimmed(value: float, decimals: int) -> str:
    """A number without zeros at its end."""
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")
