"""What a client's HTTP requests are made of: address, headers, and errors of the connection."""

from __future__ import annotations

import os

import httpx

from penstock.protocol import trace_context
from penstock.protocol.errors import Unavailable

_DEFAULT_URL = "http://127.0.0.1:8080"


def base_url(url: str | None) -> str:
    """Return the address of the api: as given, else PENSTOCK_API_URL, else this machine."""
    return (url or os.environ.get("PENSTOCK_API_URL") or _DEFAULT_URL).rstrip("/").removesuffix("/rpc")


def http_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request. api_key: None for PENSTOCK_API_KEY, "" for no key."""
    headers = {"Content-Type": "application/json"}
    if api_key is None:
        api_key = os.environ.get("PENSTOCK_API_KEY")
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def trace_headers() -> dict[str, str]:
    """Return the headers, or message attributes, that continue the caller's active span."""
    trace = trace_context.current()
    return {} if trace is None else trace.headers


def unreachable(url: str, exc: Exception) -> Unavailable:
    """Translate a transport error."""
    if isinstance(exc, httpx.TimeoutException):
        return Unavailable(f"the api at {url} did not answer in time: try again, or raise the timeout")
    return Unavailable(
        f"the api at {url} cannot be reached ({exc}): start it with `penstock up` or `penstock api`, "
        "or name another URL"
    )
