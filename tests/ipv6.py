"""Whether this machine has IPv6, which many containers lack."""

from __future__ import annotations

import socket


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
