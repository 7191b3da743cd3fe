"""The methods as tools: which ones, and their names, schemas and hints."""

from functools import cache
from typing import Any

from penstock.api.access import Caller
from penstock.api.openrpc import schema_of_params
from penstock.api.table import METHODS
from penstock.protocol.api_key import Permission
from penstock.protocol.method import Method

CONFIRM = "confirm"
CONFIRM_SECONDS = 300.0

# Keys decide who may do what, and the answer of one is a secret; the others are for programs: a worker's claims and
# tokens, imports of thousands, and a document that tools/list stands for.
_NO_TOOLS = ("keys.", "claims.", "rpc.", "task.complete", "task.fail", "schedule.create_many", "schedule.import_status")
_TWO_CALLS = f" Changes nothing without `{CONFIRM}`: the first answer shows what it is about, and has the value."

# A dot is no character of a tool's name for every model.
TOOLS = {name.replace(".", "_"): method for name, method in METHODS.items() if not name.startswith(_NO_TOOLS)}


def needs_confirmation(method: Method) -> bool:
    """Whether it changes what is there; to add tasks needs none."""
    return method.audited


def has_dry_run(method: Method) -> bool:
    return "dry_run" in method.params.__struct_fields__


def listed(caller: Caller) -> list[dict[str, Any]]:
    """The tools that a caller may call, as ``tools/list`` has them."""
    shown = [_described(tool) for tool, method in TOOLS.items() if caller.may(method.name)]
    if caller.actions is None:
        return shown
    limit = f" This key may enqueue {', '.join(caller.actions)} alone."
    return [
        one | {"description": one["description"] + limit}
        if TOOLS[one["name"]].permission is Permission.ENQUEUE
        else one
        for one in shown
    ]


@cache
def _described(tool: str) -> dict[str, Any]:
    method = TOOLS[tool]
    schema = schema_of_params(method)
    description = method.summary
    if needs_confirmation(method):
        description += _TWO_CALLS
        schema["properties"].pop("dry_run", None)  # the first call is the dry run
        schema["properties"][CONFIRM] = {"type": "string", "description": "From the answer to the first call."}
    reads = method.permission is not Permission.ENQUEUE and not method.audited
    hints = {"readOnlyHint": reads, "openWorldHint": False}
    if not reads:
        hints |= {"destructiveHint": method.audited, "idempotentHint": False}
    return {"name": tool, "description": description, "inputSchema": schema, "annotations": hints}
