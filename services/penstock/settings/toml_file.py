"""penstock.toml: which file that is, and its values."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic_settings import PydanticBaseSettingsSource

from penstock.protocol.errors import SettingsError
from penstock.settings.values import PREFIX

_CONFIG_FILE = "penstock.toml"


def toml_path() -> Path:
    """The file that is read, be it there or not."""
    return Path(os.environ.get(PREFIX + "CONFIG") or _CONFIG_FILE)


class TomlFile(PydanticBaseSettingsSource):
    """penstock.toml; keys are the settings' names without the prefix."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # abstract upstream; __call__ below reads the whole file at once

    def __call__(self) -> dict[str, Any]:
        path = toml_path()
        if not path.is_file():
            if os.environ.get(PREFIX + "CONFIG"):
                raise SettingsError(f"{PREFIX}CONFIG names {path}, which is no file: correct it, or unset it")
            return {}
        try:
            return tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise SettingsError(f"{path} is not valid TOML: {exc}") from exc
