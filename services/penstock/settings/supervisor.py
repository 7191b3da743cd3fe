"""Settings of the supervisor: upkeep, schedules that fire, and how long records are kept."""

from __future__ import annotations

from pydantic import Field, field_validator

from penstock.settings.values import DAY, Group, empty_is_unset


class SupervisorSettings(Group):
    """The section Supervisor of docs/configuration.md."""

    supervisor_interval_seconds: float = Field(5, gt=0, description="Pause between two rounds of upkeep.")
    retention_success_seconds: float = Field(7 * DAY, ge=0, description="SUCCESS records are kept this long.")
    retention_critical_error_seconds: float = Field(30 * DAY, ge=0, description="CRITICAL_ERROR records, likewise.")
    retention_cancelled_seconds: float = Field(7 * DAY, ge=0, description="CANCELLED records, likewise.")
    retention_schedule_runs_seconds: float = Field(
        7 * DAY, ge=0, description="What became of each fire of a schedule, and of each import, is kept this long."
    )
    schedule_batch_size: int = Field(
        4000, ge=1, le=20_000, description="Schedules fired in one transaction at the most."
    )
    schedule_grace_seconds: float = Field(
        60, ge=0, le=86_400, description="A fire no later than this is on time; the policy for missed ones begins here."
    )
    retention_rejected_seconds: float = Field(30 * DAY, ge=0, description="Rejected messages, likewise.")
    payload_retention_seconds: float | None = Field(
        None, ge=0, description="Payloads of settled tasks are emptied after this; unset keeps them with the record."
    )
    result_retention_seconds: float | None = Field(None, ge=0, description="Results, likewise.")
    retention_waits_seconds: float = Field(
        DAY, ge=0, description="Answers that came before their task waits, and tokens that were answered, likewise."
    )
    retention_jobs_seconds: float = Field(7 * DAY, ge=0, description="Bulk jobs that have ended, likewise.")
    retention_audit_seconds: float = Field(
        90 * DAY, ge=0, description="The record of who changed what by hand, likewise."
    )
    retention_receipts_seconds: float = Field(
        5 * DAY,
        ge=0,
        description="Receipts of inbound messages, which make a redelivery harmless; keep them longer "
        "than the inbound queue keeps messages.",
    )

    _unset_retention = field_validator("payload_retention_seconds", "result_retention_seconds", mode="before")(
        empty_is_unset
    )
