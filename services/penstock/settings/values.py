"""What groups of settings have in common: the prefix, and how their values are read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, SecretStr

DAY = 86400
T = TypeVar("T")
PREFIX = "PENSTOCK_"
_HTTP = ("http://", "https://")


class Group(BaseModel):
    """Settings of one file.

    All groups become one class: what has the same name in two of them, be it a validator, is there only once.
    """

    model_config = ConfigDict(defer_build=True)  # only Settings is ever made, and to build each group too takes time


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """For a text, a secret or several: the check raises ValueError, which names no secret."""

    def validate(value: Any) -> Any:
        check(value.get_secret_value() if isinstance(value, SecretStr) else value)
        return value

    return AfterValidator(validate)


def split_commas(value: Any) -> Any:
    """``one, two`` as a tuple; other values stay unchanged."""
    if isinstance(value, str):
        return tuple(entry.strip() for entry in value.split(",") if entry.strip())
    return value


def _from_json(value: Any) -> Any:
    """The object that a variable's text holds; other values stay unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("must be JSON") from None  # the text may hold a secret


def _readable_file(path: str) -> None:
    if not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise ValueError(f"{path} is no file that can be read")


def _http_url(url: str) -> None:
    if not url.startswith(_HTTP):
        raise ValueError("must begin with http:// or https://")
    if "@" in url:
        raise ValueError("must hold no user and no password, for it is shown in logs")


def _database_url(url: str) -> None:
    """Raises ValueError for what the driver would refuse with a text that may hold a part of the password."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    try:
        parts = urlsplit(url)
        for server in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{server}").port  # raises ValueError
        torn = "@" in parts.path + parts.fragment
    except ValueError:
        torn = True
    if torn:
        raise ValueError(
            "must be postgresql://user:password@host:port/name, the characters : / ? # [ ] @ and % of a password "
            "written as %3A %2F %3F %23 %5B %5D %40 %25"
        )


def masked(url: str) -> str:
    """A database URL without its password, and without the values of parameters, of which one may be a password."""
    address, mark, _ = url.partition("?")
    password = urlsplit(url).password
    if password is not None:
        address = address.replace(f":{password}@", ":***@", 1)
    return address + (mark and "?***")


def _shown_url(url: SecretStr) -> str:
    return masked(url.get_secret_value())


# Types of settings

OrUnset = Annotated[T | None, BeforeValidator(lambda value: None if value == "" else value)]
Listed = Annotated[tuple[T, ...], BeforeValidator(split_commas)]
Table = Annotated[dict[str, T], BeforeValidator(_from_json)]
Names = Listed[str]
Secrets = Listed[SecretStr]
Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Name = Annotated[str, Field(min_length=1)]
HttpUrl = Annotated[str, checked(_http_url)]
ReadableFile = Annotated[str, checked(_readable_file)]
DatabaseUrl = Annotated[SecretStr, checked(_database_url), PlainSerializer(_shown_url, when_used="json")]


def query_of(url: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))


_URL_NAME = re.compile(r"[0-9A-Za-z_.-]{0,60}")


def named_url(entry: str) -> tuple[str, str]:
    """Name and URL; the name is empty where the URL stands alone. Raises ValueError."""
    name, _, url = ("", "", entry) if entry.startswith(_HTTP) else entry.partition("=")
    try:
        is_url = url.startswith(_HTTP) and urlsplit(url).hostname and urlsplit(url).port != 0
    except ValueError:  # no port, or no address
        is_url = False
    if not _URL_NAME.fullmatch(name) or not is_url:
        raise ValueError(f"must be URLs such as http://host:9464 or worker-1=http://host:9464, not {entry[:100]!r}")
    return name, url
