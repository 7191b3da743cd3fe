"""Findings: what was looked at, what was seen, and what to do about it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

# A note may be as it should be, a warning will hurt some day, an error keeps tasks from running or being kept.
Level = Literal["ok", "note", "warning", "error"]
Problem = tuple[bool, Level, str, str]  # whether it is there, the level, what is seen, the fix


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    seen: str
    fix: str = ""  # none where nothing is to be done


class Report:
    """The findings so far, including the good ones. show: is given each at once."""

    def __init__(self, show: Callable[[Finding], None] | None = None) -> None:
        self.findings: list[Finding] = []
        self._show = show

    def __call__(self, level: Level, what: str, seen: str, fix: str = "") -> None:
        self.findings.append(Finding(level, what, seen, fix))
        if self._show is not None:
            self._show(self.findings[-1])

    def judge(self, what: str, well: str, *problems: Problem) -> None:
        """A finding for each problem that is there, else that all is well."""
        there = [finding for is_there, *finding in problems if is_there]
        self.rows([(level, what, seen, fix) for level, seen, fix in there], **{what: well})

    def rows(self, found: Collection[Iterable[Any]], **well: str) -> None:
        """Findings that a statement has made. well: what is good of these things where it has found nothing."""
        for finding in found:
            self(*finding)
        told = {what for _, what, *_ in found}
        for what, seen in well.items():
            if what not in told:
                self("ok", what, seen)

    def clock(self, what: str, skew_seconds: float, why: str) -> None:
        """skew_seconds: how far the other clock is ahead of this machine's."""
        seen = f"{abs(skew_seconds):.1f} s {'ahead of' if skew_seconds > 0 else 'behind'} this machine's"
        problem: Problem = abs(skew_seconds) >= 5, "warning", seen, f"set the clocks by NTP: {why}"
        self.judge(what, "agrees with this machine's", problem)
