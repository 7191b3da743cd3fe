"""Payloads checked against the JSON Schemas that workers announce (PENSTOCK_CHECK_PAYLOADS)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.db.session import Session
from penstock.protocol.errors import InvalidParams
from penstock.protocol.json_text import decode_any
from penstock.protocol.task import ANNOUNCED_SECONDS

Schemas = Mapping[str, Sequence[str]]
"""JSON Schemas of payloads as text, by action: of each version that runs now, the newest announcement first."""

_SHOWN_CHARS = 100
_KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}


async def read_schemas(session: Session, actions: Iterable[str]) -> Schemas:
    found = defaultdict(list)
    for row in await session.fetch("read_announced_params", list(set(actions)), ANNOUNCED_SECONDS):
        found[row["action"]].append(row["params"])
    return found


def check_fits(schemas: Schemas, action: str, payload: str) -> None:
    """Raises InvalidParams for a payload that fits none of its action's schemas; arrays by position are not checked."""
    texts = schemas.get(action, ())
    if not texts or payload.startswith("["):
        return
    value, problem = decode_any(payload), None
    for text in texts:
        try:
            misfit = _first_misfit(text, value)
        except Exception:  # a schema that cannot be applied checks nothing
            return
        if misfit is None:
            return
        problem = problem or misfit
    if problem is not None:
        raise InvalidParams(f"payload{problem[0]}", f"{problem[1]}, as workers announce the action {action!r}")


def _first_misfit(schema: str, value: Any) -> tuple[str, str] | None:
    """Where a value does not fit, as a path, and how, without the value itself."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator(schema).iter_errors(value))
    if error is None:
        return None
    path, seen, wanted = error.json_path[1:], error.instance, error.validator_value
    match error.validator:
        case "required":
            return f"{path}.{next(name for name in wanted if name not in seen)}"[:_SHOWN_CHARS], "is missing"
        case "additionalProperties" if wanted is False:
            unknown = next(name for name in seen if name not in error.schema.get("properties", {}))
            return f"{path}.{unknown}"[:_SHOWN_CHARS], "is no parameter"
        case "type":
            kinds = wanted if isinstance(wanted, str) else " or ".join(wanted)
            problem = f"must be {kinds}"
        case keyword:
            problem = f"must fit {keyword} {str(wanted)[:_SHOWN_CHARS]}"
    return path[:_SHOWN_CHARS], f"{problem}, and is of type {_KINDS.get(type(seen), 'null')}"


@lru_cache(maxsize=1000)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator  # not before the setting asks for it
    from referencing import Registry

    return Draft202012Validator(decode_any(schema), registry=Registry())  # which fetches nothing
