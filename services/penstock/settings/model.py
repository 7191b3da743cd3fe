"""All settings as one object: its groups, its sources, and the checks across settings."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from pydantic import model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from penstock.protocol.errors import SettingsError
from penstock.settings import connections, features, processes
from penstock.settings.values import PREFIX

_CONFIG_FILE = "penstock.toml"


def toml_path() -> Path:
    """The TOML file that is read if it exists."""
    return Path(os.environ.get(PREFIX + "CONFIG") or _CONFIG_FILE)


def toml_source(settings_cls: type[BaseSettings]) -> TomlConfigSettingsSource:
    """The values of the TOML file; keys are the settings' names without the prefix. Raises SettingsError."""
    path = toml_path()
    if os.environ.get(PREFIX + "CONFIG") and not path.is_file():
        raise SettingsError(f"{PREFIX}CONFIG points to {path}, which does not exist")
    try:
        return TomlConfigSettingsSource(settings_cls, path)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path} is not valid TOML: {exc}") from exc


# Pydantic puts the fields of the last base first: read upwards, this is the order of docs/configuration.md.
class Settings(
    processes.ChaosSettings,
    processes.ProcessSettings,
    processes.HttpSettings,
    features.PayloadSettings,
    processes.SupervisorSettings,
    features.Scheduler0Settings,
    features.DeliverySettings,
    processes.WorkerSettings,
    processes.SchedulerSettings,
    processes.AttemptSettings,
    features.OlderSchedulerSettings,
    connections.KafkaSettings,
    connections.QueueSettings,
    connections.DatabaseSettings,
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
        return init_settings, env_settings, toml_source(settings_cls)

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
