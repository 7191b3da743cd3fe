"""`penstock doctor`: checks the live settings, Postgres, queues and api, and suggests a fix for each problem.

It changes nothing. Checks are independent: one that fails is a finding and hides no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from penstock.cli.doctor.database import examine_database
from penstock.cli.doctor.deliveries import examine_deliveries
from penstock.cli.doctor.findings import Finding
from penstock.cli.doctor.payloads import examine_payloads
from penstock.cli.doctor.queues import examine_queues
from penstock.client.client import Client
from penstock.protocol.errors import RpcError, Unavailable
from penstock.settings.loading import misspelt_variables
from penstock.settings.model import Settings

_ANSWER_SECONDS = 5.0


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Every finding, including the good ones, one after the other."""
    for finding in _examine_settings(settings):
        yield finding
    for finding in examine_deliveries(settings):
        yield finding
    async for finding in examine_payloads(settings):
        yield finding
    async for finding in examine_database(settings):
        yield finding
    async for finding in examine_queues(settings):
        yield finding
    async for finding in _examine_api(settings):
        yield finding


def _examine_settings(settings: Settings) -> Iterator[Finding]:
    """Findings about settings that are valid individually."""
    misspelt = misspelt_variables()
    for seen, meant in misspelt:
        yield Finding("warning", "settings", f"{seen} is not a setting and is ignored", f"did you mean {meant}?")
    if (
        settings.visibility_timeout_seconds < 2 * settings.heartbeat_seconds
        and settings.visibility_timeout_seconds < 30
    ):
        yield Finding(
            "note", "settings",
            f"a message is redelivered {settings.visibility_timeout_seconds} s after the worker that holds it stalls",
            "raise PENSTOCK_VISIBILITY_TIMEOUT_SECONDS on busy machines; the default is 60",
        )  # fmt: skip
    if settings.stale_after_seconds < 3 * settings.heartbeat_seconds:
        yield Finding(
            "warning", "settings",
            f"a task is given up {settings.stale_after_seconds:g} s after its last heartbeat, and workers send one "
            f"every {settings.heartbeat_seconds:g} s: a late or lost heartbeat costs an attempt",
            "set PENSTOCK_STALE_AFTER_SECONDS to at least three times PENSTOCK_HEARTBEAT_SECONDS",
        )  # fmt: skip
    elif not misspelt:
        yield Finding("ok", "settings", "valid")


async def _examine_api(settings: Settings) -> AsyncIterator[Finding]:
    """Whether the api answers at the URL that clients use, and accepts their key."""
    url = (settings.api_url or f"http://127.0.0.1:{settings.http_port}").rstrip("/").removesuffix("/rpc")
    try:
        found = await asyncio.to_thread(_ask, url, settings)
    except Unavailable as exc:
        yield Finding("warning", "api", str(exc), "start `penstock api`, or set PENSTOCK_API_URL to its URL")
    except RpcError as exc:
        yield Finding(
            "warning", "api", f"{url} answers: {exc.message}",
            "set PENSTOCK_API_KEY to a key that may read; `penstock keys create` creates one",
        )  # fmt: skip
    else:
        yield Finding("ok", "api", found)


def _ask(url: str, settings: Settings) -> str:
    key = settings.api_key
    with Client(url, api_key=key.get_secret_value() if key else None, timeout=_ANSWER_SECONDS) as client:
        client.call("list", {"limit": 1})
    return f"{url} answers"
