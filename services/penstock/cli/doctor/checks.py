"""`penstock doctor`: checks the live settings, Postgres, queues and api, and suggests a fix for each problem.

It changes nothing. Checks are independent: one that fails is a finding and hides no other.
"""

from __future__ import annotations

import asyncio

from penstock.cli.doctor.database import examine_database
from penstock.cli.doctor.deliveries import examine_deliveries
from penstock.cli.doctor.findings import Report
from penstock.cli.doctor.payloads import examine_payloads
from penstock.cli.doctor.queues import examine_queues
from penstock.client.client import Client
from penstock.protocol.errors import RpcError, Unavailable
from penstock.settings.model import Settings, misspelt_variables

_ANSWER_SECONDS = 5.0


async def examine(settings: Settings, report: Report) -> None:
    """Check everything, one part after the other."""
    _examine_settings(settings, report)
    examine_deliveries(settings, report)
    for examine_part in (examine_payloads, examine_database, examine_queues, _examine_api):
        await examine_part(settings, report)


def _examine_settings(settings: Settings, report: Report) -> None:
    """Settings that are valid individually."""
    misspelt = misspelt_variables()
    for seen, meant in misspelt:
        report("warning", "settings", f"{seen} is not a setting and is ignored", f"did you mean {meant}?")
    timeout, heartbeat = settings.visibility_timeout_seconds, settings.heartbeat_seconds
    if timeout < 2 * heartbeat and timeout < 30:
        report(
            "note", "settings", f"a message is redelivered {timeout} s after the worker that holds it stalls",
            "raise PENSTOCK_VISIBILITY_TIMEOUT_SECONDS on busy machines; the default is 60",
        )  # fmt: skip
    if settings.stale_after_seconds < 3 * heartbeat:
        report(
            "warning", "settings",
            f"a task is given up {settings.stale_after_seconds:g} s after its last heartbeat, and workers send one "
            f"every {heartbeat:g} s: a late or lost heartbeat costs an attempt",
            "set PENSTOCK_STALE_AFTER_SECONDS to at least three times PENSTOCK_HEARTBEAT_SECONDS",
        )  # fmt: skip
    elif not misspelt:
        report("ok", "settings", "valid")


async def _examine_api(settings: Settings, report: Report) -> None:
    """Whether the api answers at the URL that clients use, and accepts their key."""
    url = (settings.api_url or f"http://127.0.0.1:{settings.http_port}").rstrip("/").removesuffix("/rpc")
    key = settings.api_key

    def ask() -> None:
        with Client(url, api_key=key.get_secret_value() if key else None, timeout=_ANSWER_SECONDS) as client:
            client.call("list", {"limit": 1})

    try:
        await asyncio.to_thread(ask)
    except Unavailable as exc:
        report("warning", "api", str(exc), "start `penstock api`, or set PENSTOCK_API_URL to its URL")
    except RpcError as exc:
        fix = "set PENSTOCK_API_KEY to a key that may read; `penstock keys create` creates one"
        report("warning", "api", f"{url} answers: {exc.message}", fix)
    else:
        report("ok", "api", f"{url} answers")
