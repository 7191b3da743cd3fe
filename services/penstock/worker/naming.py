"""The default name of a worker."""

from __future__ import annotations

import os
import socket

_HOST_CHARS = 80


def name_of_process() -> str:
    """``host:pid``, limited to printable ASCII."""
    host = "".join(char for char in socket.gethostname() if "!" <= char <= "~")
    return f"{host[:_HOST_CHARS] or 'localhost'}:{os.getpid()}"
