"""Every JSON-RPC method by name, and the OpenRPC document of the parameters and results that they really have."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args, get_origin

import msgspec
from msgspec.structs import fields

from penstock.api import audit, dead_letters, keys, rejected
from penstock.methods import table
from penstock.methods.table import SUBMIT_PREFIX
from penstock.protocol import errors
from penstock.protocol.api_key import Permission
from penstock.protocol.method import Method, NoParams, Scope, by_name, described, method
from penstock.protocol.record import struct_of
from penstock.protocol.version import __version__

_OF_BODIES = (errors.ParseError, errors.InvalidRequest, errors.MethodNotFound, errors.RateLimited)
_ALWAYS = (errors.InvalidParams, errors.InternalError, errors.AccessDenied)

_RAW: dict[str, dict[str, Any]] = {"payload": {"type": ["object", "array"]}, "result": {}}  # taken as they are written
_RESULT_NAMES = {"status": "tasks", "result": "outcome", "rpc.discover": "document"}


@method("rpc.discover", permission=Permission.READ, scope=Scope.OPEN)
async def discover(_context: Any, _given: NoParams) -> msgspec.Raw:
    """This document."""
    return msgspec.Raw(msgspec.json.encode(describe()))


METHODS = {**table.METHODS, **by_name(rejected, dead_letters, keys, audit), discover.name: discover}
"""Those of ``methods/table.py``, and those that only the api carries out."""


def method_of(name: str) -> Method | None:
    """The method of that name, ``submit:<action>`` included; None for an unknown one."""
    return METHODS.get("enqueue" if name.startswith(SUBMIT_PREFIX) else name)


@cache
def describe() -> dict[str, Any]:
    shown = sorted(METHODS.values(), key=lambda method: method.name.rpartition(".")[0])  # of one family in their order
    raised: list[type[errors.RpcError]] = [*_OF_BODIES, *_ALWAYS, *(one for method in shown for one in method.errors)]
    kinds = dict.fromkeys(
        kind
        for method in shown
        for kind in (
            *_plain_types(struct_of(method.result)),
            *(described(field.type)[0] for field in fields(method.params)),
        )
    )  # in this order, not in that of a set, which differs between runs
    known = [kind for kind in kinds if kind is not msgspec.Raw]
    found, components = msgspec.json.schema_components(known, ref_template="#/components/schemas/{name}")
    for component in components.values():
        if "description" in component:  # a docstring, whose indentation depends on the version of Python
            component["description"] = inspect.cleandoc(component["description"])
    schemas: dict[Any, dict[str, Any]] = {msgspec.Raw: {"type": "object"}, **dict(zip(known, found, strict=True))}
    listed = [
        {
            "name": method.name,
            "summary": method.summary,
            "paramStructure": "either",
            "params": [_parameter(field, schemas) for field in fields(method.params)],
            "result": _result(method, schemas),
            "errors": _references(*method.errors),
        }
        for method in shown
    ]
    return {
        "openrpc": "1.3.2",
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "A durable task pipeline. Send JSON-RPC 2.0 requests, single or batch, to POST /rpc.",
        },
        "methods": [*listed, _submit(_result(METHODS["enqueue"], schemas))],
        "components": {
            "schemas": dict(sorted(components.items())),
            "errors": {
                error.__name__: {"code": error.code, "message": _meaning(error)} for error in dict.fromkeys(raised)
            },
        },
    }


def schema_of_params(method: Method) -> dict[str, Any]:
    """The JSON Schema of a method's parameters by name, complete in itself."""
    plain = {field.name: described(field.type)[0] for field in fields(method.params)}
    known = list(dict.fromkeys(kind for kind in plain.values() if kind is not msgspec.Raw))
    found, components = msgspec.json.schema_components(known, ref_template="#/$defs/{name}")
    schemas = dict(zip(known, found, strict=True))
    listed = [_parameter(field, schemas) for field in fields(method.params)]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {one["name"]: one["schema"] | {"description": one["description"]} for one in listed},
        "required": [one["name"] for one in listed if one["required"]],
        "additionalProperties": False,
    }
    return schema | {"$defs": components} if components else schema


def _meaning(error: type[errors.RpcError]) -> str:
    """The first sentence of its docstring, which not every error of an unknown object has."""
    text = error.__doc__ or f"No such {vars(error)['what']}"
    return " ".join(text.partition("\n\n")[0].split()).removesuffix(".")


def _parameter(field: Any, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    kind, description = described(field.type)
    schema = _RAW[field.name] if kind is msgspec.Raw else schemas[kind]
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if not field.required and default is not msgspec.UNSET:
        schema = schema | {"default": msgspec.json.decode(default) if isinstance(default, msgspec.Raw) else default}
    return {"name": field.name, "description": description, "required": field.required, "schema": schema}


def _result(method: Method, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    schema = _schema(struct_of(method.result), schemas)
    name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else method.name
    return {"name": _RESULT_NAMES.get(method.name, name), "schema": schema}


def _schema(kind: Any, schemas: Mapping[Any, dict[str, Any]]) -> dict[str, Any]:
    """Of a result: msgspec describes no union of structs."""
    inner = [_schema(one, schemas) for one in get_args(kind)]
    if get_origin(kind) is list:
        return {"type": "array", "items": inner[0]}
    return {"anyOf": inner} if inner else schemas[kind]


def _plain_types(kind: Any) -> list[Any]:
    """Those in a result, out of lists and unions."""
    return [plain for one in get_args(kind) for plain in _plain_types(one)] or [kind]


def _submit(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"{SUBMIT_PREFIX}<action>",
        "summary": "Add a task of the action that stands behind the colon; the parameters are its payload.",
        "description": inspect.cleandoc(
            """
            Any name that begins with `submit:` is this method: `submit:export` adds a task of the action `export`.
            All members of `params` make up the payload. With a member `objectID`, a string or a number, the task is
            unique per action and objectID, as with `unique_key`.
            """
        ),
        "paramStructure": "either",
        "params": [
            {
                "name": "objectID",
                "description": "Makes the task unique; a part of the payload like every other member.",
                "required": False,
                "schema": {"type": ["string", "number", "null"]},
            }
        ],
        "result": result,
        "errors": _references(errors.TooLarge),
    }


def _references(*more: type[errors.RpcError]) -> list[dict[str, str]]:
    return [{"$ref": f"#/components/errors/{error.__name__}"} for error in (*_ALWAYS, *more)]
