"""Reading all settings from their sources, and reporting errors and the source of each value."""

from __future__ import annotations

import os
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError as _UnreadableValue

from penstock.protocol.errors import SettingsError
from penstock.protocol.spelling import did_you_mean, nearest
from penstock.settings.model import Settings, toml_path, toml_source
from penstock.settings.values import PREFIX


def load_settings(**overrides: Any) -> Settings:
    """Read and check every setting; raises SettingsError listing all mistakes, with no secret's value in the text."""
    try:
        return Settings(**overrides)
    except _UnreadableValue as exc:
        raise SettingsError(f"settings are wrong: {exc}; its value must be JSON") from None
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
    in_file = toml_source(type(settings))()
    in_environment = {name.upper() for name in os.environ}
    sources = {}
    for name in type(settings).model_fields:
        if PREFIX + name.upper() in in_environment:
            sources[name] = "environment"
        else:
            sources[name] = str(toml_path()) if name in in_file else "default"
    return sources


def misspelt_variables(environ: dict[str, str] | os._Environ[str] = os.environ) -> list[tuple[str, str]]:
    """``PENSTOCK_*`` variables that are no setting but look like one: pairs of (seen, meant)."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {PREFIX + "CONFIG"}
    unknown = [name for name in environ if name.startswith(PREFIX) and name not in known]
    near = {name: nearest(name, known, cutoff=0.85) for name in unknown}
    return [(seen, meant) for seen, meant in near.items() if meant is not None]
