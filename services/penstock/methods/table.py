"""The JSON-RPC methods by name, without those that only the api carries out: these are in `api/table.py`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.limits import methods as limits
from penstock.protocol.errors import MethodNotFound
from penstock.protocol.method import Method, by_name
from penstock.results import methods as results
from penstock.schedules import methods as schedules
from penstock.settings.model import Settings
from penstock.tasks import bulk_methods
from penstock.tasks import methods as tasks
from penstock.tasks.params import submitted_task
from penstock.workflows import methods as workflows

SUBMIT_PREFIX = "submit:"
API_ONLY = ("audit.", "dlq.", "keys.", "rejected.", "rpc.")

METHODS = by_name(tasks, limits, bulk_methods, results, schedules, workflows)


def read_command(
    name: str, params: msgspec.Raw | bytes, settings: Settings, methods: Mapping[str, Method] = METHODS
) -> Any:
    """Check a method and its raw parameters. Raises MethodNotFound, InvalidParams, TooLarge."""
    raw = bytes(params)
    if name.startswith(SUBMIT_PREFIX):
        return submitted_task(name.removeprefix(SUBMIT_PREFIX), raw or b"{}", settings)
    if name not in methods:
        raise MethodNotFound("Method not found", {"method": name[:200]})
    return methods[name].command(raw, settings)
