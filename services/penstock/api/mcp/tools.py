"""The methods as tools: which ones, their names, schemas and hints, and how their changes are confirmed."""

import hmac
import json
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from penstock.api.access import Caller
from penstock.api.openrpc import schema_of_params
from penstock.api.table import METHODS
from penstock.protocol.api_key import Permission
from penstock.protocol.errors import InvalidParams
from penstock.protocol.json_text import decode_any
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


def confirmation(caller: Caller, method: str, arguments: Mapping[str, msgspec.Raw], count: int) -> str:
    """The value that a look answers, and that the change must bring. count: of tasks found; 0 if it counts none."""
    until = int(time.time() + CONFIRM_SECONDS)
    return f"{until}.{count}.{_signature(caller, method, arguments, until, count)}"


def check_confirmation(caller: Caller, method: str, arguments: Mapping[str, msgspec.Raw], given: str) -> int:
    """The count of the dry run. Raises InvalidParams."""
    until, count, signature = _parts(given)
    if not hmac.compare_digest(signature, _signature(caller, method, arguments, until, count)):
        raise InvalidParams(
            CONFIRM,
            f"is of another key, tool or other arguments: call without it first, and again with the {CONFIRM} value of "
            "that answer and the same arguments",
        )
    if until < time.time():
        raise InvalidParams(CONFIRM, f"is older than {CONFIRM_SECONDS:.0f} s: call without it for a new one")
    return count


def _parts(given: str) -> tuple[int, int, str]:
    until, _, rest = given.partition(".")
    count, _, signature = rest.partition(".")
    if not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in (until, count)):
        return 0, 0, ""
    return int(until), int(count), signature.encode("ascii", "replace").decode()


def _signature(caller: Caller, method: str, arguments: Mapping[str, msgspec.Raw], until: int, count: int) -> str:
    """Made with the digest of the caller's key, which every api process has, and only the caller's answers depend on.

    A caller that knows its key can make one. It is against changes that no one looked at, not against the key's
    holder, who may call ``/rpc``.
    """
    same = {name: decode_any(value) for name, value in arguments.items() if name != "dry_run"}
    signed = json.dumps([method, same, until, count], sort_keys=True)
    return hmac.digest(caller.digest, signed.encode(), "sha256").hex()[:32]
