"""Findings: what was looked at, what was seen, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    level: ``note`` may be as it should be, ``warning`` will hurt some day, ``error`` keeps tasks from running or being
    kept. seen: what is the case. fix: what to do, empty where nothing is to be done.
    """

    level: Level
    what: str
    seen: str
    fix: str = ""


CLOCK_SKEW_SECONDS = 5.0


def clock_finding(what: str, skew_seconds: float, why: str) -> Finding:
    """skew_seconds: how far the other clock is ahead of this machine's."""
    seen = f"{abs(skew_seconds):.1f} s {'ahead of' if skew_seconds > 0 else 'behind'} this machine's"
    if abs(skew_seconds) < CLOCK_SKEW_SECONDS:
        return Finding("ok", what, "agrees with this machine's")
    return Finding("warning", what, seen, f"set the clocks by NTP: {why}")
