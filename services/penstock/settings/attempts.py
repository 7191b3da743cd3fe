"""Settings of attempts: how often and how late a task is tried again, and when its worker counts as silent."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.protocol.retry import Backoff
from penstock.settings.values import Group, Names


class AttemptSettings(Group):
    """The section Attempts of docs/configuration.md."""

    max_attempts: int = Field(
        10, ge=1, le=1000, description="Attempts before CRITICAL_ERROR, for tasks that set no number of their own."
    )
    retry_base_seconds: float = Field(5, gt=0, description="Delay after the first failed attempt.")
    retry_factor: float = Field(2, ge=1, description="Growth of the delay from one attempt to the next.")
    retry_cap_seconds: float = Field(3600, gt=0, description="Longest delay.")
    retry_jitter: float = Field(0.2, ge=0, le=1, description="Share of each delay that is random, 0 to 1.")
    spawn_actions: Names = Field(
        (),
        description="Comma-separated actions (`mail.*`) that any task may spawn; others only if they have the "
        "same route as the task that spawns them.",
    )
    heartbeat_seconds: float = Field(
        20, gt=0, description="Interval of the heartbeats that a worker sends for a task that runs longer than this."
    )
    cancel_poll_seconds: float = Field(
        5, gt=0, description="A worker asks this often whether longer running tasks are still its own, see control_url."
    )
    ordering_on_critical_error: Literal["release", "hold"] = Field(
        "release",
        description="What a task in CRITICAL_ERROR does to its ordering key: `release` lets the next task run, "
        "`hold` keeps all tasks behind it waiting until it is retried or an operator releases the key.",
    )
    stale_after_seconds: float = Field(
        120,
        gt=0,
        description="A task without a heartbeat for this long, plus the time that one may be in transit, is "
        "tried again.",
    )
    unsent_after_seconds: float = Field(
        90,
        gt=0,
        description="A claim whose sending was never confirmed (the scheduler died) is released after this; "
        "a send may take two thirds of it.",
    )
    untaken_after_seconds: float = Field(
        6 * 3600,
        gt=0,
        description="A task without any heartbeat for this long is sent again even if its queue is busy.",
    )

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.retry_base_seconds, self.retry_factor, self.retry_cap_seconds, self.retry_jitter)

    @property
    def holds_ordering_keys(self) -> bool:
        """Whether a task in CRITICAL_ERROR holds its ordering key."""
        return self.ordering_on_critical_error == "hold"

    def _attempt_problems(self) -> list[str]:
        problems = []
        if self.retry_cap_seconds < self.retry_base_seconds:
            problems.append("retry_cap_seconds must be at least retry_base_seconds")
        if self.stale_after_seconds <= self.heartbeat_seconds:
            problems.append("stale_after_seconds must be above heartbeat_seconds, or live tasks would be run twice")
        return problems
