"""Settings of the older schedulers whose clients Penstock serves: clockwork, kafka-message-scheduler, scheduler0."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from penstock.settings.values import Group, Names, empty_is_unset


class OlderSchedulerSettings(Group):
    """The section Schedules of older schedulers of docs/configuration.md: clockwork and kafka-message-scheduler."""

    clockwork_api: bool = Field(False, description="Serve clockwork's `POST` and `DELETE /schedule` on the api's port.")
    clockwork_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve them on this port as well; clockwork's was 5000. Unset: no second port.",
    )
    clockwork_networks: Names = Field(
        (),
        description="Comma-separated networks (`10.1.0.0/16`) whose clients need no API key for these endpoints; "
        "clockwork's own clients send none.",
    )
    clockwork_same_key: Literal["keep", "reject"] = Field(
        "keep",
        description="What happens to a schedule whose clientId and scheduleKey exist with other contents: `keep` "
        "stores it beside the first, as clockwork does, `reject` refuses it.",
    )
    clockwork_create_topic: str = Field(
        "schedule-create", min_length=1, description="Topic that `penstock clockwork-source` reads schedules from."
    )
    clockwork_group: str = Field(
        "clockwork-consumers", min_length=1, description="Consumer group of `penstock clockwork-source`."
    )
    kafka_source_json_topics: Names = Field(
        (), description="Comma-separated topics of JSON schedules that `penstock kafka-source` reads."
    )
    kafka_source_avro_topics: Names = Field((), description="Comma-separated topics of Avro schedules that it reads.")
    kafka_source_group: str = Field(
        "com.sky.kafka.scheduler", min_length=1, description="Consumer group of `penstock kafka-source`."
    )
    kafka_source_on_undecodable: Literal["cancel", "keep"] = Field(
        "cancel", description="What a record that cannot be read does to the delayed record under its key."
    )

    @field_validator("clockwork_networks")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            try:
                ipaddress.ip_network(entry)
            except ValueError as exc:
                raise ValueError(f"{entry!r} is not a network such as 10.1.0.0/16: {exc}") from None
        return value

    _unset_older_schedulers = field_validator("clockwork_port", mode="before")(empty_is_unset)


class Scheduler0Settings(Group):
    """The section scheduler0's API of docs/configuration.md."""

    scheduler0: bool = Field(
        False,
        description="The api also serves scheduler0's API, under /v1 and /api/v1, to clients with its "
        "credentials (`penstock credential create`).",
    )
    scheduler0_auth_username: str | None = Field(
        None, description="User of its peer mode (`x-peer: cmd` with Basic); unset: peer mode is off."
    )
    scheduler0_auth_password: SecretStr | None = Field(None, description="Password of that user.")
    scheduler0_readable_secrets: bool = Field(
        False,
        description="Store secrets of new credentials in clear, so that they can be read again, as scheduler0 does.",
    )
    scheduler0_retry_max: int = Field(
        5, ge=0, le=999, description="How often a failed callback is tried again; for new jobs."
    )
    scheduler0_retry_delay_seconds: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="Delay before each retry; unset: as PENSTOCK_RETRY_BASE_SECONDS and the related settings say.",
    )
    scheduler0_timeout_seconds: float = Field(
        30, gt=0, le=3600, description="Time for one callback, including redirects and the answer."
    )
    scheduler0_payload_limit_bytes: int = Field(
        2_000_000,
        ge=1024,
        le=100_000_000,
        description="Maximum body of one callback; larger sets of jobs are sent in several.",
    )
    scheduler0_any_status: bool = Field(
        False, description="Accept any HTTP status of a callback as success, as scheduler0 does; otherwise only 2xx."
    )

    _unset_scheduler0 = field_validator(
        "scheduler0_auth_username", "scheduler0_auth_password", "scheduler0_retry_delay_seconds", mode="before"
    )(empty_is_unset)

    def _scheduler0_problems(self) -> list[str]:
        if (self.scheduler0_auth_username is None) != (self.scheduler0_auth_password is None):
            return ["scheduler0_auth_username and scheduler0_auth_password go together: set both, or neither"]
        return []
