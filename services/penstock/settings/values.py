"""What groups of settings have in common: the prefix, and how values are read that several of them hold."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr
from pydantic_settings import NoDecode

DAY = 86400
PREFIX = "PENSTOCK_"


class Group(BaseModel):
    """Settings of one theme.

    All groups become one class: what has the same name in two of them, be it a validator, is there only once.
    """

    model_config = ConfigDict(defer_build=True)  # only Settings is ever made, and to build each group too takes time


def split_commas(value: Any) -> Any:
    """``one, two`` as a tuple; other values stay unchanged."""
    if isinstance(value, str):
        return tuple(entry.strip() for entry in value.split(",") if entry.strip())
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_commas)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(split_commas)]


def empty_is_unset(value: Any) -> Any:
    """A variable that is set to nothing means the same as none."""
    return None if value == "" else value


def readable_file(value: str | None) -> str | None:
    if value is not None and not (os.path.isfile(value) and os.access(value, os.R_OK)):
        raise ValueError(f"{value} is no file that can be read")
    return value


def http_url(value: str | None) -> str | None:
    if value is not None and not value.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    if value is not None and "@" in value:
        raise ValueError("must hold no user and no password, for it is shown in logs")
    return value
