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
        description="Tasks claimed and not yet settled are as many as are settled in this time, and those that run; "
        "the rest wait in Postgres by priority.",
    )
    in_flight_floor: int = Field(1000, ge=1, description="They may always be this many.")
    in_flight_limit: int = Field(100_000, ge=1, description="They are never more.")
    claim_batch_size: int = Field(2000, ge=1, le=10000, description="Tasks claimed by one statement at the most.")
    pack_max_tasks: int = Field(500, ge=1, le=1000, description="Tasks in one outbound message at the most.")
    pack_seconds: float = Field(
        1, gt=0, description="Work in one outbound message at the most, by the run times that workers report."
    )
    fair_queues: bool = Field(
        True,
        description="On SQS, messages hold tasks of one tenant alone and carry its name as their MessageGroupId, by "
        "which SQS keeps a tenant with many messages from delaying others; false: tasks are packed whoever they are "
        "for.",
    )
    poll_seconds: float = Field(0.2, gt=0, le=60, description="Look for due tasks this often even when not woken.")
    priority_ageing_seconds: float = Field(
        0,
        ge=0,
        description="Tasks that higher priorities have kept waiting for this long get a tenth of what is claimed; "
        "0: priorities are kept to the letter.",
    )
