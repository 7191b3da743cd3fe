"""The value that a dry run answers, and that the change which it showed must bring."""

import hmac
import json
import time
from collections.abc import Mapping

import msgspec

from penstock.api.access import Caller
from penstock.api.mcp.tools import CONFIRM, CONFIRM_SECONDS
from penstock.protocol.errors import InvalidParams
from penstock.protocol.json_text import decode_any


def confirmation(caller: Caller, method: str, arguments: Mapping[str, msgspec.Raw], count: int) -> str:
    """count: of the tasks that the dry run found; 0 where it counts none."""
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
