"""URLs with a name before them, as settings give them: ``worker-1=http://host:9464``. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_NAME = re.compile(r"[0-9A-Za-z_.-]{0,60}")
_BEGINNINGS = ("http://", "https://")


def named_url(entry: str) -> tuple[str, str]:
    """Name and URL; the name is empty where the URL stands alone. Raises ValueError."""
    name, _, url = ("", "", entry) if entry.startswith(_BEGINNINGS) else entry.partition("=")
    if not _NAME.fullmatch(name) or not url.startswith(_BEGINNINGS) or not urlsplit(url).hostname:
        raise ValueError(f"must be URLs such as http://host:9464 or worker-1=http://host:9464, not {entry[:100]!r}")
    return name, url
