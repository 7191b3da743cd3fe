"""All settings as one object: the groups of the other modules, and what must fit together across them."""

from __future__ import annotations

from pydantic import model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.settings.attempts import AttemptSettings
from penstock.settings.chaos import ChaosSettings
from penstock.settings.database import DatabaseSettings
from penstock.settings.deliveries import DeliverySettings
from penstock.settings.http import HttpSettings
from penstock.settings.kafka import KafkaSettings
from penstock.settings.older_schedulers import OlderSchedulerSettings, Scheduler0Settings
from penstock.settings.payloads import PayloadSettings
from penstock.settings.process import ProcessSettings
from penstock.settings.queues import QueueSettings
from penstock.settings.scheduler import SchedulerSettings
from penstock.settings.supervisor import SupervisorSettings
from penstock.settings.toml_file import TomlFile
from penstock.settings.values import PREFIX
from penstock.settings.worker import WorkerSettings


# Pydantic puts the fields of the last base first: read upwards, this is the order of docs/configuration.md.
class Settings(
    ChaosSettings,
    ProcessSettings,
    HttpSettings,
    PayloadSettings,
    SupervisorSettings,
    Scheduler0Settings,
    DeliverySettings,
    WorkerSettings,
    SchedulerSettings,
    AttemptSettings,
    OlderSchedulerSettings,
    KafkaSettings,
    QueueSettings,
    DatabaseSettings,
    BaseSettings,
):
    """All settings of all processes; frozen. Build it with :func:`load_settings`, which words mistakes for people."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        validate_default=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        defer_build=False,  # unlike its groups
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment, then penstock.toml; no .env file and no secrets folder."""
        return init_settings, env_settings, TomlFile(settings_cls)

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        """Asks every group, so that all errors are reported at once."""
        problems = [
            *self._attempt_problems(),
            *self._http_problems(),
            *self._scheduler0_problems(),
            *self._payload_problems(),
            *self._queue_problems(),
            *self._database_problems(),
            *self._kafka_problems(),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self
