"""Names of workers, an attribute of each message to the results queue."""

from __future__ import annotations

import re
from collections.abc import Mapping

WORKER_ATTRIBUTE = "worker"  # of a results message
WORKER_NAME_MAX_CHARS = 100
_NAME = re.compile(rf"[!-~]([ -~]{{0,{WORKER_NAME_MAX_CHARS - 2}}}[!-~])?")


def check_worker_name(name: str) -> str:
    """Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a worker's name is 1 to {WORKER_NAME_MAX_CHARS} printable ASCII characters, "
            f"no space at either end; this is {name[:120]!r}"
        )
    return name


def worker_of(attributes: Mapping[str, str]) -> str | None:
    """The worker of a results message; None if the name is missing or invalid."""
    name = attributes.get(WORKER_ATTRIBUTE)
    return name if name is not None and _NAME.fullmatch(name) else None
