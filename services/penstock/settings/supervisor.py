"""Settings of the supervisor: upkeep, schedules that fire, and how long records are kept."""

from __future__ import annotations

from pydantic import Field, field_validator

from penstock.settings.values import DAY, Group, empty_is_unset


class SupervisorSettings(Group):
    """The section Supervisor of docs/configuration.md."""

    supervisor_interval_seconds: float = Field(5, gt=0, description="Pause between two rounds of upkeep.")
    retention_success_seconds: float = Field(7 * DAY, ge=0, description="Retention of SUCCESS records.")
    retention_critical_error_seconds: float = Field(30 * DAY, ge=0, description="Retention of CRITICAL_ERROR records.")
    retention_cancelled_seconds: float = Field(7 * DAY, ge=0, description="Retention of CANCELLED records.")
    retention_schedule_runs_seconds: float = Field(
        7 * DAY, ge=0, description="Retention of the runs of schedules and of imports."
    )
    schedule_batch_size: int = Field(
        4000, ge=1, le=20_000, description="Maximum number of schedules fired in one transaction."
    )
    schedule_grace_seconds: float = Field(
        60,
        ge=0,
        le=86_400,
        description="A fire no later than this is on time; a later one is missed, and the policy for missed "
        "fires applies.",
    )
    retention_rejected_seconds: float = Field(30 * DAY, ge=0, description="Retention of rejected messages.")
    payload_retention_seconds: float | None = Field(
        None, ge=0, description="Retention of payloads of settled tasks; unset keeps them with the record."
    )
    result_retention_seconds: float | None = Field(
        None, ge=0, description="Retention of results; unset keeps them with the record."
    )
    retention_waits_seconds: float = Field(
        DAY, ge=0, description="Retention of answers that came before their task waits, and of answered tokens."
    )
    retention_jobs_seconds: float = Field(7 * DAY, ge=0, description="Retention of bulk jobs that have ended.")
    retention_audit_seconds: float = Field(90 * DAY, ge=0, description="Retention of the audit log.")
    retention_receipts_seconds: float = Field(
        5 * DAY,
        ge=0,
        description="Retention of the receipts of inbound messages, which make a redelivery harmless; longer "
        "than the inbound queue keeps messages.",
    )

    _unset_retention = field_validator("payload_retention_seconds", "result_retention_seconds", mode="before")(
        empty_is_unset
    )
