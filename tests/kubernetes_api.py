"""As much of the API of Kubernetes as `kubectl` asks of it: discovery, and objects that are made, seen and replaced.

There is no cluster behind it: an object that the schemas allow is kept, a Job is complete as soon as it is there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.protobuf import fields_of

# Kinds that it knows, by version; those of operators as on a cluster that has them.
KINDS = {
    "v1": ("Namespace", "ConfigMap", "Secret", "Service", "ServiceAccount", "Pod"),
    "apps/v1": ("Deployment",),
    "batch/v1": ("Job",),
    "policy/v1": ("PodDisruptionBudget",),
    "keda.sh/v1alpha1": ("ScaledObject", "TriggerAuthentication"),
    "monitoring.coreos.com/v1": ("PrometheusRule",),
}
_PROTOBUF = b"k8s\0"
_VERBS = ["create", "delete", "get", "list", "patch", "watch"]

Complaints = Callable[[dict[str, Any]], Sequence[str]]


def _plural(kind: str) -> str:
    return kind.lower() + "s"


def _place(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


class Cluster:
    """objects: what was made, by path; all others would be 404."""

    def __init__(self, complaints: Complaints) -> None:
        self._complaints = complaints
        self._made = 0
        self.objects: dict[str, dict[str, Any]] = {}

    def get(self, path: str) -> dict[str, Any] | None:
        return self._discovered(path) or self.objects.get(path) or self._list(path)

    def create(self, path: str, document: dict[str, Any]) -> str | None:
        """What is to be said against it; None when it was made."""
        version, kind = document["apiVersion"], document["kind"]
        if kind not in KINDS.get(version, ()) or not path.startswith(_place(version)):
            return f"there is no {kind} of {version} at {path}"
        parts = path.split("/")
        if (
            "namespaces" in parts[:-1]
            and f"/api/v1/namespaces/{parts[parts.index('namespaces') + 1]}" not in self.objects
        ):
            return f"there is no namespace for {path}"
        if said := self._complaints(document):
            return "; ".join(said)
        self._made += 1
        document["metadata"] |= {"uid": f"u{self._made}", "resourceVersion": str(self._made)}
        if kind == "Job":
            document["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        self.objects[f"{path}/{document['metadata']['name']}"] = document
        return None

    def _discovered(self, path: str) -> dict[str, Any] | None:
        groups = [version for version in KINDS if "/" in version]
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            found = []
            for group in groups:
                name, _, version = group.partition("/")
                about = {"groupVersion": group, "version": version}
                found.append({"name": name, "versions": [about], "preferredVersion": about})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
        if path == "/openapi/v3":
            return {"paths": {_place(one)[1:]: {"serverRelativeURL": f"/openapi/v3{_place(one)}"} for one in KINDS}}
        for version, kinds in KINDS.items():
            if path == _place(version):
                return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": [
                    {"name": _plural(kind), "singularName": kind.lower(), "kind": kind, "verbs": _VERBS,
                     "namespaced": kind != "Namespace"} for kind in kinds
                ]}  # fmt: skip
            if path == f"/openapi/v3{_place(version)}":
                return _described(version, kinds)
        return None

    def _list(self, path: str) -> dict[str, Any] | None:
        for version, kinds in KINDS.items():
            for kind in kinds:
                if path.startswith(_place(version) + "/") and path.endswith("/" + _plural(kind)):
                    items = [one for place, one in self.objects.items() if place.rpartition("/")[0] == path]
                    about = {"resourceVersion": str(self._made)}
                    return {"kind": f"{kind}List", "apiVersion": version, "metadata": about, "items": items}
        return None


def _described(version: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Says no more than that the server looks for unknown fields itself, so that kubectl leaves it to it."""
    group, _, bare = version.rpartition("/")
    paths = {
        f"{_place(version)}/{_plural(kind)}/{{name}}": {"patch": {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "x-kubernetes-group-version-kind": {"group": group, "version": bare, "kind": kind},
            "responses": {},
        }} for kind in kinds
    }  # fmt: skip
    return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": "1"}, "paths": paths}


def _decoded(body: bytes) -> dict[str, Any]:
    """An object; a namespace that is made by its name comes as protobuf."""
    if not body.startswith(_PROTOBUF):
        return dict(json.loads(body))
    wrapped = fields_of(body.removeprefix(_PROTOBUF))
    kind = fields_of(wrapped[1])
    metadata = fields_of(fields_of(wrapped[2])[1])
    return {"apiVersion": kind[1].decode(), "kind": kind[2].decode(), "metadata": {"name": metadata[1].decode()}}


def _failure(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """Serve it on loopback; gives the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, code: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode() if body else b""  # nothing changes while one watches
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def do_GET(self) -> None:
            path, query = urlsplit(self.path)[2:4]
            found = {} if "watch=" in query else cluster.get(path)
            if found is None:
                self._answer(404, _failure(404, "NotFound", f"{path} not found"))
            else:
                self._answer(200, found)

        def do_POST(self) -> None:
            document = _decoded(self.rfile.read(int(self.headers["Content-Length"])))
            said = cluster.create(urlsplit(self.path).path, document)
            if said is None:
                self._answer(201, document)
            else:
                self._answer(422, _failure(422, "Invalid", said))

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if cluster.objects.pop(urlsplit(self.path).path, None) is None:
                self._answer(404, _failure(404, "NotFound", f"{self.path} not found"))
            else:
                self._answer(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="kubernetes")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
