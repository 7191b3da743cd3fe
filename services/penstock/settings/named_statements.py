"""Statements that an operator names in the settings, for tasks of ``sql.execute`` to run by that name."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class NamedStatement(BaseModel):
    """One statement and where it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    dsn: SecretStr = Field(description="Postgres, `postgresql://user:password@host:port/name`.")
    statement: str = Field(min_length=1, description="One SQL statement, its parameters written as $1, $2 and so on.")
    timeout_seconds: float = Field(30, gt=0, le=3600, description="The server stops it after this.")
    max_rows: int = Field(100, ge=0, le=100_000, description="Of its rows, so many are kept as the result.")
    with_tenant: bool = Field(
        False,
        description="The tenant that the scheduler says the task is for, or null, is $1, or $2 behind the task's id; "
        "the payload's parameters follow.",
    )
    with_task_id: bool = Field(
        False, description="$1 is the task's id, the same over its attempts; the payload's parameters follow."
    )
