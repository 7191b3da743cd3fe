"""What a worker is called where nobody has given it a name."""

from __future__ import annotations

import os
import socket

_HOST_CHARS = 80


def name_of_process() -> str:
    """``host:pid``, as the columns of a process list know it."""
    host = "".join(char for char in socket.gethostname() if "!" <= char <= "~")
    return f"{host[:_HOST_CHARS] or 'localhost'}:{os.getpid()}"
