"""Commands of the documentation for kubectl: as they stand, by kubectl itself where it is, with a cluster stood in for.

Everywhere the files that they name are among those that tests/unit/test_kubernetes_manifests.py holds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs_blocks import ROOT, all_blocks
from tests.kubernetes_api import Cluster, serving
from tests.unit.test_kubernetes_manifests import FILES, VERSIONS, complaints, documents

BLOCKS = [block for block in all_blocks() if block.info == "sh kubectl"]
README = (ROOT / "examples" / "kubernetes" / "README.md").read_text("utf-8")
OLDEST = 29  # before 1.29 kubectl wants a description of all objects, which the stand-in has not


def minor_version() -> int:
    """Of the kubectl that is installed, 0 where there is none."""
    if shutil.which("kubectl") is None:
        return 0
    done = subprocess.run(
        ["kubectl", "version", "--client", "--output=json"], capture_output=True, text=True, timeout=60, check=True
    )
    return int(json.loads(done.stdout)["clientVersion"]["minor"].rstrip("+"))


needs_kubectl = pytest.mark.skipif(minor_version() < OLDEST, reason=f"kubectl 1.{OLDEST} or newer is not installed")

Shell = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(lambda document: complaints(document, VERSIONS[-1:]))


@pytest.fixture
def shell(cluster: Cluster, tmp_path: Path) -> Iterator[Shell]:
    """Runs lines as a user would in a clone, with this cluster."""
    with serving(cluster) as address:
        config = tmp_path / "config"
        config.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": address}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": ""}}],
        }))  # fmt: skip
        env = os.environ | {"KUBECONFIG": str(config), "KUBECACHEDIR": str(tmp_path / "cache")}

        def run(text: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip

        yield run


def named(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def asked_for(text: str) -> set[tuple[str, str]]:
    """The objects of the files and kustomizations that are applied."""
    found = set()
    for option, name in re.findall(r"^kubectl apply -([kf]) ([\w./-]+)", text, re.MULTILINE):
        path = ROOT / name
        files = [path]
        if option == "k":
            (kustomization,) = documents(path / "kustomization.yaml")
            files = [path / resource for resource in kustomization["resources"]]
        assert set(files) <= set(FILES), "not held by the tests of the manifests"
        found |= {named(document) for file in files for document in documents(file)}
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_files_that_are_applied_are_held_by_the_tests_of_the_manifests(block: Any) -> None:
    assert ("Deployment", "penstock-api") in asked_for(block.text)


@needs_kubectl
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_makes_the_objects_of_the_files_that_it_names(block: Any, cluster: Cluster, shell: Shell) -> None:
    done = shell(block.text)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {named(document) for document in cluster.objects.values()}
    rules = {("PrometheusRule", "penstock")} if "alerts.yml" in block.text else set()
    assert made == asked_for(block.text) | rules | {("Namespace", "penstock")}
    spaces = {
        document["metadata"].get("namespace")
        for document in cluster.objects.values()
        if document["kind"] != "Namespace"
    }
    assert spaces == {"penstock"}


@needs_kubectl
def test_the_migration_of_a_new_version_replaces_the_one_before(cluster: Cluster, shell: Shell) -> None:
    (block,) = (block for block in BLOCKS if block.page == "examples/kubernetes/README.md")
    (command,) = re.findall(r"`(kubectl [^`]*replace [^`]+)`", README)
    done = shell(f"{block.text}\n{command}")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = {
        path: document["metadata"]["uid"] for path, document in cluster.objects.items() if document["kind"] == "Job"
    }
    assert list(jobs) == ["/apis/batch/v1/namespaces/penstock/jobs/penstock-migrate"]
    assert jobs.popitem()[1] == f"u{len(cluster.objects) + 1}", "made last, instead of the first"


@needs_kubectl
@pytest.mark.parametrize(
    ("change", "complaint"),
    [("s/replicas:/replica:/", "replica"), ("s/image: .*/image: 5/", "image"), ("s/spec:/spce:/", "spce")],
)
def test_what_a_cluster_would_not_take_is_found(change: str, complaint: str, cluster: Cluster, shell: Shell) -> None:
    done = shell(f"kubectl create namespace penstock; sed '{change}' examples/kubernetes/api.yaml | "
                 "kubectl --namespace penstock apply -f -")  # fmt: skip
    assert done.returncode != 0
    assert complaint in done.stderr


@needs_kubectl
@pytest.mark.parametrize(
    "command", ["apply -f examples/autoscaling/keda-metrics-api.yaml", "apply -k examples/kubernets", "get pods --al"]
)
def test_a_namespace_file_or_option_that_there_is_not_is_found(command: str, cluster: Cluster, shell: Shell) -> None:
    assert shell(f"kubectl {command}").returncode != 0
