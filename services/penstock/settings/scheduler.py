"""Settings of the scheduler: how many tasks are claimed, packed into messages and in flight at once."""

from __future__ import annotations

from pydantic import Field

from penstock.settings.values import Group


class SchedulerSettings(Group):
    """The section Scheduler of docs/configuration.md."""

    in_flight_seconds: float = Field(
        1,
        gt=0,
        le=600,
        description="The window of claimed, unsettled tasks is the number settled in this time, plus the running "
        "ones; the rest wait in Postgres by priority.",
    )
    in_flight_floor: int = Field(1000, ge=1, description="Smallest window.")
    in_flight_limit: int = Field(100_000, ge=1, description="Largest window.")
    claim_batch_size: int = Field(2000, ge=1, le=10000, description="Maximum number of tasks claimed by one statement.")
    pack_max_tasks: int = Field(500, ge=1, le=1000, description="Maximum number of tasks in one outbound message.")
    pack_seconds: float = Field(
        1, gt=0, description="Maximum work in one outbound message, by the run times that workers report."
    )
    fair_queues: bool = Field(
        True,
        description="On SQS, a message holds tasks of one tenant and carries its name as MessageGroupId, so that "
        "SQS keeps a tenant with many messages from delaying others; false: tasks are packed regardless of their "
        "tenant.",
    )
    poll_seconds: float = Field(0.2, gt=0, le=60, description="Interval of looks for due tasks when no wake-up comes.")
    priority_ageing_seconds: float = Field(
        0,
        ge=0,
        description="Tasks that higher priorities have kept waiting for this long get a tenth of each claim; 0: "
        "priorities are strict.",
    )
