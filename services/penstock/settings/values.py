"""What is said of settings without pydantic, which takes long to load: their prefix, and their URLs."""

import ipaddress
import re
from contextlib import suppress
from functools import lru_cache
from urllib.parse import parse_qsl, urlsplit

DAY = 86400
PREFIX = "PENSTOCK_"
HTTP = ("http://", "https://")


def masked(url: str) -> str:
    """A database URL without its password, and without the values of parameters, of which one may be a password."""
    address, mark, _ = url.partition("?")
    password = urlsplit(url).password
    if password is not None:
        address = address.replace(f":{password}@", ":***@", 1)
    return address + (mark and "?***")


def query_of(url: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))


def named_url(entry: str) -> tuple[str, str]:
    """Name and URL; the name is empty where the URL stands alone. Raises ValueError."""
    if "@" in entry:
        raise ValueError("must hold no user and no password, for it is shown in the dashboard")
    name, _, url = ("", "", entry) if entry.startswith(HTTP) else entry.partition("=")
    try:
        is_url = url.startswith(HTTP) and urlsplit(url).hostname and urlsplit(url).port != 0
    except ValueError:  # no port, or no address
        is_url = False
    if not re.fullmatch("[0-9A-Za-z_.-]{0,60}", name) or not is_url:
        raise ValueError(f"must be URLs such as http://host:9464 or worker-1=http://host:9464, not {entry[:100]!r}")
    return name, url


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine only."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"
