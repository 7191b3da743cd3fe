"""Pages about tenants: their rules, and of one tenant what there is of its tasks."""

from __future__ import annotations

from typing import Any

from penstock.api.dashboard.formats import segment
from penstock.api.dashboard.page_request import PAGE_ROWS, Ask, Page
from penstock.protocol.task import State
from penstock.protocol.tenant import EVERY_TENANT


async def load_tenants(ask: Ask) -> dict[str, Any]:
    """Those with a rule of their own; one that is asked for by name has a page all the same."""
    name = ask.get("name")
    if name is not None:
        return {"redirect": f"/tenants/{segment(name)}"}
    found = await ask.call("tenant.list", cursor=ask.get("cursor"), limit=PAGE_ROWS)
    return {"tenants": found.tenants, "cursor": found.cursor, "everyone": EVERY_TENANT}


async def load_tenant(ask: Ask) -> dict[str, Any]:
    return await show_tenant(ask, ask.path["name"])


async def show_tenant(ask: Ask, name: str) -> dict[str, Any]:
    """Counts and rules of one tenant. Raises InvalidParams, also for one that the visitor's key is not bound to."""
    rule = await ask.call("tenant.get", tenant=name)
    counted = None if name == EVERY_TENANT else await ask.call("stats", tenant=name)
    return {"rule": rule, "counted": counted, "live_states": [state for state in State if not state.final],
            "final_states": [state for state in State if state.final], "everyone": EVERY_TENANT}  # fmt: skip


PAGES = (
    Page("/tenants", "tenants.html", load_tenants, "tenant.list"),
    Page("/tenants/{name:path}", "tenant.html", load_tenant, "tenant.get"),
)
