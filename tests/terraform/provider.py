"""A provider for `terraform` that knows the schema of AWS and nothing else, for where the registry cannot be reached.

With it `terraform validate` checks every name, type and required attribute, and `terraform test` runs files that mock
the provider: values come from the mock, and all else (variables, conditions, expressions, outputs) from Terraform
itself. What it cannot tell is what AWS' own provider checks beyond its schema, such as the range of a number.

The protocol is version 6 of terraform-plugin-go's tfplugin, of which but one answer is not empty; it is encoded here.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

SCHEMA = Path(__file__).with_name("aws_schema.json")
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


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self._schema = encoded_schema()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        if not method.startswith(_SERVICE):
            return None
        if method.removeprefix(_SERVICE) == "GetMetadata":
            return None  # it may be left out, and an empty one would say that there are no resources
        answer = self._schema if method.removeprefix(_SERVICE) == "GetProviderSchema" else b""
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)


@contextmanager
def schema_provider() -> Iterator[dict[str, str]]:
    """Serve it; gives the variables by which Terraform finds it, in place of one from the registry."""
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
