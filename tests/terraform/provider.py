"""A provider for `terraform` that knows the schema of AWS and nothing else, for where the registry cannot be reached.

With it `terraform validate` checks every name, type and required attribute, and `terraform test` runs files that mock
the provider: values come from the mock, and all else (variables, conditions, expressions, outputs) from Terraform
itself. `terraform apply` goes through too: every resource becomes as it was asked for, and what AWS would fill in (an
ARN, a URL) is made up. What it cannot check is what AWS' own provider checks beyond its schema, such as the range of a
number, or what AWS itself would refuse.

The protocol is version 6 of terraform-plugin-go's tfplugin; the few messages that are not empty are encoded here.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
from msgspec.msgpack import Ext

from tests.protobuf import fields_of

SCHEMA = Path(__file__).with_name("aws_schema.json")
REGION, ACCOUNT = "eu-central-1", "123456789012"
_NESTING = {"single": 1, "list": 2, "set": 3}
_SERVICE = "/tfplugin6.Provider/"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _bytes(field: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(raw)) + raw


def _block(block: Mapping[str, Any]) -> bytes:
    out = b""
    for name, (kind, need) in block["attributes"].items():
        out += _bytes(
            2,
            _bytes(1, name)
            + _bytes(2, json.dumps(kind))
            + _number(4, need == "required")
            + _number(5, need in ("optional", "filled_in"))
            + _number(6, need in ("computed", "filled_in"))
            + _number(11, name.endswith("_wo")),  # write-only, by the provider's own rule for names
        )
    for name, inner in block.get("blocks", {}).items():
        nesting = _NESTING[inner["nesting"]]
        out += _bytes(
            3,
            _bytes(1, name)
            + _bytes(2, _block(inner))
            + _number(3, nesting)
            + _number(4, inner["min"])
            + _number(5, inner["max"]),
        )
    return out


def _schema(block: Mapping[str, Any]) -> bytes:
    return _bytes(2, _block(block))


def encoded_schema() -> bytes:
    """The answer to GetProviderSchema."""
    known = json.loads(SCHEMA.read_text("utf-8"))
    out = _bytes(1, _schema(known["config"]))
    for field, blocks in ((2, known["resources"]), (3, known["data"])):
        for name, block in blocks.items():
            out += _bytes(field, _bytes(1, name) + _bytes(2, _schema(block)))
    return out


_UNKNOWN = Ext(0, b"\0")


def _value(fields: Mapping[int, bytes], field: int) -> Any:
    """A DynamicValue, which Terraform sends as MessagePack."""
    return msgspec.msgpack.decode(fields_of(fields[field])[1])


def _dynamic(value: Any) -> bytes:
    return _bytes(1, msgspec.msgpack.encode(value))


def _filled(block: Mapping[str, Any], value: Any, fill: Callable[[str, Any], Any], missing: Any) -> Any:
    """``value`` of a block in which what is ``missing`` of its computed attributes is filled: by name and type."""
    if not isinstance(value, dict):
        return value
    found = dict(value)
    for name, (kind, need) in block["attributes"].items():
        if name.endswith("_wo"):
            found[name] = None  # never part of a state
        elif need in ("computed", "filled_in") and found[name] == missing:
            found[name] = fill(name, kind)
    for name, inner in block.get("blocks", {}).items():
        inside = found[name]
        if isinstance(inside, list):
            found[name] = [_filled(inner, one, fill, missing) for one in inside]
        else:
            found[name] = _filled(inner, inside, fill, missing)
    return found


class _Account:
    """Answers to what changes: resources as they were asked for, the rest of their attributes made up."""

    def __init__(self) -> None:
        known = json.loads(SCHEMA.read_text("utf-8"))
        self._resources, self._data = known["resources"], known["data"]

    def plan(self, request: bytes) -> bytes:
        fields = fields_of(request)
        block = self._resources[fields[1].decode()]
        return _bytes(1, _dynamic(_filled(block, _value(fields, 3), lambda name, kind: _UNKNOWN, None)))

    def apply(self, request: bytes) -> bytes:
        fields = fields_of(request)
        kind = fields[1].decode()
        planned = _value(fields, 3)
        made = _filled(self._resources[kind], planned, self._made_up(kind, planned), _UNKNOWN)
        return _bytes(1, _dynamic(made))

    def upgrade(self, request: bytes) -> bytes:
        """A state that was kept as JSON is of this version already."""
        return _bytes(1, _bytes(2, fields_of(fields_of(request)[3])[1]))

    def refresh(self, request: bytes) -> bytes:
        """No other program changes anything."""
        return _bytes(1, fields_of(request)[2])

    def read(self, request: bytes) -> bytes:
        """Of a data source."""
        fields = fields_of(request)
        kind = fields[1].decode()
        asked = _value(fields, 2)
        return _bytes(1, _dynamic(_filled(self._data[kind], asked, self._made_up(kind, asked), None)))

    def _made_up(self, kind: str, about: Any) -> Callable[[str, Any], Any]:
        service = kind.split("_")[1]
        name = (about or {}).get("name") or (about or {}).get("bucket") or kind
        known = {
            "arn": f"arn:aws:{service}:{REGION}:{ACCOUNT}:{name}",
            "url": f"https://{service}.{REGION}.amazonaws.com/{ACCOUNT}/{name}",
            "account_id": ACCOUNT, "region": REGION, "partition": "aws",
        }  # fmt: skip

        def made_up(attribute: str, form: Any) -> Any:
            if form == "string":
                return known.get(attribute, f"{name}-{attribute}")
            return {"number": 0, "bool": False}[form] if isinstance(form, str) else {} if form[0] == "map" else []

        return made_up


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        account, schema = _Account(), encoded_schema()
        self._answers: dict[str, Callable[[bytes], bytes]] = {
            "GetProviderSchema": lambda _request: schema,
            "PlanResourceChange": account.plan,
            "ApplyResourceChange": account.apply,
            "ReadDataSource": account.read,
            "ReadResource": account.refresh,
            "UpgradeResourceState": account.upgrade,
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        if not method.startswith(_SERVICE):
            return None
        name = method.removeprefix(_SERVICE)
        if name == "GetMetadata":
            return None  # it may be left out, and an empty one would say that there are no resources
        answer = self._answers.get(name, lambda _request: b"")
        return grpc.unary_unary_rpc_method_handler(lambda request, _context: answer(request))


@contextmanager
def schema_provider() -> Iterator[dict[str, str]]:
    """Serve it; gives the variables by which Terraform finds it, instead of one from the registry."""
    with tempfile.TemporaryDirectory(prefix="penstock-tf-") as folder:
        address = f"{folder}/provider.sock"
        server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(_Handlers(),))
        server.add_insecure_port(f"unix:{address}")
        server.start()
        about = {
            "Protocol": "grpc",
            "ProtocolVersion": 6,
            "Pid": os.getpid(),
            "Test": True,
            "Addr": {"Network": "unix", "String": address},
        }
        try:
            yield {"TF_REATTACH_PROVIDERS": json.dumps({"registry.terraform.io/hashicorp/aws": about})}
        finally:
            server.stop(None)
