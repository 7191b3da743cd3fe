"""All settings as one object: its groups, its sources, the checks across settings, and how they are read."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError, model_validator

from penstock.protocol.errors import SettingsError
from penstock.protocol.spelling import did_you_mean, nearest
from penstock.settings import connections, features, processes
from penstock.settings.values import PREFIX


def toml_path() -> Path:
    return Path(os.environ.get(PREFIX + "CONFIG") or "penstock.toml")


def _file() -> dict[str, Any]:
    """The values of the TOML file; keys are the settings' names without the prefix. Raises SettingsError."""
    path = toml_path()
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if os.environ.get(PREFIX + "CONFIG"):
            raise SettingsError(f"{PREFIX}CONFIG points to {path}, which does not exist") from None
        return {}
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path} is not valid TOML: {exc}") from exc


def _environment() -> dict[str, str]:
    """The values of the variables, whose names may be in any case."""
    given = {name.upper(): value for name, value in os.environ.items()}
    return {name: given[key] for name in Settings.model_fields if (key := PREFIX + name.upper()) in given}


_PAIRS = (
    ("database_ssl_cert", "database_ssl_key"),
    ("kafka_ssl_certificate_file", "kafka_ssl_key_file"),
    ("http_tls_cert", "http_tls_key"),
    ("scheduler0_auth_username", "scheduler0_auth_password"),
)


# Pydantic puts the fields of the last base first: read backwards, this is the order of docs/configuration.md.
class Settings(features.FeatureSettings, processes.ProcessSettings, connections.ConnectionSettings):
    """All settings of all processes; frozen. Read them with :func:`load_settings`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        defer_build=False,  # unlike its groups
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        """Asks every group, so that all errors are reported at once."""
        alone = [pair for pair in _PAIRS if [getattr(self, name) for name in pair].count(None) == 1]
        problems = [
            *self._connection_problems(),
            *self._process_problems(),
            *self._feature_problems(),
            *(f"{one} and {other} go together" for one, other in alone),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def load_settings(**overrides: Any) -> Settings:
    """Arguments, then the environment, then penstock.toml, then defaults.

    Raises SettingsError listing all mistakes, with no secret's value in the text.
    """
    try:
        return Settings(**{**_file(), **_environment(), **overrides})
    except ValidationError as exc:
        lines = []
        for error in exc.errors(include_input=False, include_url=False, include_context=False):
            name = str(error["loc"][0]) if error["loc"] else ""
            message = error["msg"].removeprefix("Value error, ")
            if error["type"] == "extra_forbidden":
                message = f"is no setting{did_you_mean(name, Settings.model_fields)}"
            within = ".".join(part for part in error["loc"][1:] if isinstance(part, str))
            lines.append(f"{PREFIX}{name.upper()}: {within and within + ': '}{message}" if name else message)
        raise SettingsError("settings are wrong:\n  " + "\n  ".join(dict.fromkeys(lines))) from None


def sources_of(settings: Settings) -> dict[str, str]:
    """Where each value comes from: "environment", the path of the file, or "default"."""
    return {
        **dict.fromkeys(type(settings).model_fields, "default"),
        **dict.fromkeys(_file(), str(toml_path())),
        **dict.fromkeys(_environment(), "environment"),
    }


def misspelt_variables(environ: dict[str, str] | os._Environ[str] = os.environ) -> list[tuple[str, str]]:
    """``PENSTOCK_*`` variables that are no setting but look like one: pairs of (seen, meant)."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    known |= {PREFIX + name for name in ("CONFIG", "UP_DATABASE_URL", "UP_TRANSPORT_URL")}  # read by the command line
    unknown = [name for name in environ if name.startswith(PREFIX) and name not in known]
    near = {name: nearest(name, known, cutoff=0.85) for name in unknown}
    return [(seen, meant) for seen, meant in near.items() if meant is not None]
