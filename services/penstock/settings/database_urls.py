"""How the URL of a Postgres is written in settings. Pure."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit


def check_database_url(url: str) -> None:
    """Raises ValueError for what the driver would refuse with a text that may hold a part of the password."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    try:
        parts = urlsplit(url)
        torn = "@" in parts.path + parts.fragment or any(not _is_port(part) for part in _ports_of(parts.netloc))
    except ValueError:
        torn = True
    if torn:
        raise ValueError(
            "must be postgresql://user:password@host:port/name, the characters : / ? # [ ] @ and % of a password "
            "written as %3A %2F %3F %23 %5B %5D %40 %25"
        )


def query_of(url: str) -> dict[str, str]:
    """The parameters behind the question mark."""
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))


def _ports_of(netloc: str) -> list[str]:
    """What stands behind the colon of each host of a URL; several are separated by commas."""
    hosts = netloc.rpartition("@")[2].split(",")
    return [host.rpartition(":")[2] for host in hosts if ":" in host.rpartition("]")[2]]


def _is_port(text: str) -> bool:
    return text == "" or (text.isascii() and text.isdigit() and int(text) < 65536)
