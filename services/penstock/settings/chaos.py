"""Settings of chaos: faults on purpose, for tests of what is built on Penstock."""

from __future__ import annotations

from pydantic import Field

from penstock.settings.values import Group


class ChaosSettings(Group):
    """The section Chaos of docs/configuration.md."""

    chaos_postgres: float = Field(0, ge=0, le=1, description="Chance that a statement is refused before it runs.")
    chaos_commit: float = Field(0, ge=0, le=1, description="Chance that the reply is lost after a commit.")
    chaos_send: float = Field(
        0,
        ge=0,
        le=1,
        description="Chance that a send fails, wholly or in part; half of the failed messages were sent all the same.",
    )
    chaos_receive: float = Field(
        0, ge=0, le=1, description="Chance that a receive fails, or that its reply is lost with the messages in it."
    )
    chaos_delete: float = Field(0, ge=0, le=1, description="Chance that a delete fails, wholly or in part.")
    chaos_extend: float = Field(
        0, ge=0, le=1, description="Chance that an extension or a release fails, wholly or in part."
    )
    chaos_duplicate: float = Field(
        0, ge=0, le=1, description="Chance that a call's messages are sent twice, or delivered twice."
    )
    chaos_handler: float = Field(0, ge=0, le=1, description="Chance that a handler raises, before or after its work.")
    chaos_delay_seconds: float = Field(
        0, ge=0, le=60, description="Each statement and each call to SQS waits a random time up to this."
    )
    chaos_seed: int | None = Field(
        None, description="The same seed gives the same faults in each process; unset: new ones at each start."
    )
