"""The manifests against the schemas of Kubernetes, rendered by kubectl; those for production against code and base."""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.api.http import SCALING_PATH
from penstock.api.scaling import _figures
from penstock.limits.scaling import OUTBOUND, RouteLoad
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import PREFIX
from tests.command_lines import command_tree

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PRODUCTION = EXAMPLES / "kubernetes-production"
FILES = sorted(
    path
    for folder in ("kubernetes", "kubernetes-production", "autoscaling")
    for path in (EXAMPLES / folder).rglob("*.yaml")
    if path.name not in ("kustomization.yaml", "cloudwatch-prometheus.yaml")
)
VERSIONS = ("1.27", kubernetes_validate.latest_version())
# Kinds that are not built in.
OPERATORS = {"keda.sh", "monitoring.coreos.com", "external-secrets.io"}


@cache
def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def complaints(document: dict[str, Any], versions: Sequence[str] = VERSIONS) -> list[str]:
    """What the schemas have against an object; nothing for kinds of operators, which must be those that we know."""
    group = document["apiVersion"].rpartition("/")[0]
    if "." in group and not group.endswith(".k8s.io"):
        return [] if group in OPERATORS else [f"unknown group {group}"]
    found = []
    for version in versions:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as exc:
            found.append(f"{version}: {exc}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_object_is_one_that_kubernetes_takes(path: Path) -> None:
    if path == PRODUCTION / "settings.yaml":
        assert path.name in str(documents(PRODUCTION / "kustomization.yaml")[0]["patches"]), "it is a patch"
    for document in documents(path):
        assert complaints(document) == [], document["metadata"]["name"]


def test_no_pod_takes_the_variables_of_a_service_for_settings() -> None:
    specs = [document.get("spec", {}) for path in FILES for document in documents(path)]
    pods = [spec["template"]["spec"] for spec in specs if "containers" in spec.get("template", {}).get("spec", {})]
    assert len(pods) > 7
    assert not any(pod.get("enableServiceLinks", True) for pod in pods)


def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    (job,) = documents(EXAMPLES / "kubernetes" / "migrate.yaml")
    assert complaints(job | {"spec": job["spec"] | {"backofLimit": 5}})
    assert complaints({"apiVersion": "apps/v2", "kind": "Deployment", "metadata": {"name": "x"}})


@pytest.fixture(scope="module")
def rendered() -> dict[tuple[str, str], dict[str, Any]]:
    """What kubectl makes of the kustomization for production, which takes in all the others, by kind and name."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which renders kustomizations, is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(PRODUCTION)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = list(yaml.safe_load_all(done.stdout))
    named = {(document["kind"], document["metadata"]["name"]): document for document in found}
    assert len(named) == len(found)
    return named


Rendered = dict[tuple[str, str], dict[str, Any]]


def test_production_renders_to_objects_that_kubernetes_takes(rendered: Rendered) -> None:
    for (kind, name), document in rendered.items():
        assert complaints(document, VERSIONS[-1:]) == [], name
        if kind not in ("Namespace", "PriorityClass"):
            assert document["metadata"]["namespace"] == "penstock"


def test_production_has_everything_of_the_others_but_the_secrets(rendered: Rendered) -> None:
    base = {
        (document["kind"], document["metadata"]["name"])
        for path in FILES
        if path.name != "keda-sqs.yaml"
        for document in documents(path)
    }
    assert base - rendered.keys() == {
        ("Secret", f"penstock-{name}") for name in ("database", "database-owner", "worker-key", "scaling-key")
    }
    scaled = {
        document["spec"]["scaleTargetRef"]["name"]
        for (kind, _), document in rendered.items()
        if kind in ("ScaledObject", "HorizontalPodAutoscaler")
    }
    for (kind, name), document in rendered.items():
        if kind not in ("Deployment", "Job"):
            continue
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"].startswith("123456789012.dkr.ecr."), f"{name}: not from your registry"
        if kind == "Deployment":
            assert pod["topologySpreadConstraints"]
            # An apply must not undo what an autoscaler has set.
            assert ("replicas" in document["spec"]) == (name not in scaled), name
            assert ("PriorityClass", pod["priorityClassName"]) in rendered


def of_production(name: str, kind: str) -> list[dict[str, Any]]:
    return [document for document in documents(PRODUCTION / name) if document["kind"] == kind]


def test_files_of_production_are_all_used() -> None:
    (kustomization,) = documents(PRODUCTION / "kustomization.yaml")
    used = {name for name in kustomization["resources"] if not name.startswith("..")}
    used |= {patch["path"] for patch in kustomization["patches"] if "path" in patch}
    assert used == {path.name for path in PRODUCTION.glob("*.yaml")} - {"kustomization.yaml"}
    for name in kustomization["resources"]:
        assert (PRODUCTION / name).exists(), name
    base = {image["name"] for image in kustomization["images"]}
    assert base == {
        container["image"].rpartition(":")[0]
        for path in FILES
        for document in documents(path)
        if document["kind"] in ("Deployment", "Job")
        for container in document["spec"]["template"]["spec"]["containers"]
    }


def test_settings_and_secrets_of_production_are_what_the_pods_ask_for() -> None:
    base = EXAMPLES / "kubernetes" / "settings.yaml"
    keys = {document["metadata"]["name"]: set(document.get("stringData", {})) for document in documents(base)}
    for secret in of_production("secrets.yaml", "ExternalSecret"):
        spec = secret["spec"]
        name = spec["target"]["name"]
        assert name == secret["metadata"]["name"]
        made = set(spec["target"].get("template", {}).get("data", {})) or {one["secretKey"] for one in spec["data"]}
        assert made == keys[name]
    (settings,) = of_production("settings.yaml", "ConfigMap")
    (given,) = [document for document in documents(base) if document["kind"] == "ConfigMap"]
    assert settings["metadata"]["name"] == given["metadata"]["name"]
    for name in settings["data"]:
        assert name.removeprefix(PREFIX).lower() in Settings.model_fields, f"{name} is no setting"


def test_the_fleet_of_a_route_runs_as_the_other_workers_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (fleet,) = of_production("worker-video.yaml", "Deployment")
    (plain,) = [one for one in documents(EXAMPLES / "kubernetes" / "worker.yaml") if one["kind"] == "Deployment"]
    mine, other = (one["spec"]["template"]["spec"]["containers"][0] for one in (fleet, plain))
    same = (
        "ports",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "securityContext",
        "volumeMounts",
        "envFrom",
        "image",
    )
    assert {key: mine[key] for key in same} == {key: other[key] for key in same}
    assert "replicas" not in fleet["spec"]
    name, *options = mine["args"]
    command: Any = command_tree()
    known = {option for param in command.commands[name].params for option in param.opts}
    assert {option for option in options if option.startswith("-")} <= known
    for variable in mine["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "pstk_key"))
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    grace = fleet["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= settings.grace_seconds + 10
    labels = fleet["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "penstock", "by which it is scraped"
    assert fleet["spec"]["selector"]["matchLabels"] == labels != plain["spec"]["selector"]["matchLabels"]
    (budget,) = of_production("worker-video.yaml", "PodDisruptionBudget")
    assert budget["spec"]["selector"]["matchLabels"] == labels
    (account,) = of_production("worker-video.yaml", "ServiceAccount")
    assert fleet["spec"]["template"]["spec"]["serviceAccountName"] == account["metadata"]["name"]


def test_the_fleet_of_a_route_is_scaled_by_that_route() -> None:
    (scaled,) = of_production("worker-video.yaml", "ScaledObject")
    (fleet,) = of_production("worker-video.yaml", "Deployment")
    assert scaled["spec"]["scaleTargetRef"]["name"] == fleet["metadata"]["name"]
    (trigger,) = scaled["spec"]["triggers"]
    (plain,) = [one for one in documents(EXAMPLES / "autoscaling" / "keda-metrics-api.yaml")
                if one["kind"] == "ScaledObject"]  # fmt: skip
    (theirs,) = plain["spec"]["triggers"]
    asked = trigger["metadata"]
    assert asked["url"].partition("?")[0] == theirs["metadata"]["url"].partition("?")[0].replace(
        f"{SCALING_PATH}/{OUTBOUND}", f"{SCALING_PATH}/video"
    )
    assert asked["valueLocation"] in _figures(RouteLoad("video", []), 600)
    assert trigger["authenticationRef"] == theirs["authenticationRef"]


def test_network_policies_speak_of_pods_and_ports_that_there_are() -> None:
    pods = [
        document["spec"]["template"]
        for path in FILES
        for document in documents(path)
        if document["kind"] == "Deployment"
    ]
    for policy in of_production("network.yaml", "NetworkPolicy"):
        if policy["spec"]["policyTypes"] == ["Egress"]:
            continue
        wanted = policy["spec"]["podSelector"]["matchLabels"]
        chosen = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
        assert chosen
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                for pod in chosen:
                    assert port["port"] in {one["name"] for one in pod["spec"]["containers"][0]["ports"]}


def test_workers_reach_neither_private_networks_nor_metadata_but_the_api() -> None:
    (policy,) = [
        one for one in of_production("network.yaml", "NetworkPolicy") if one["spec"]["policyTypes"] == ["Egress"]
    ]
    (chosen,) = policy["spec"]["podSelector"]["matchExpressions"]
    fleets = {
        document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        for path in FILES
        for document in documents(path)
        if document["kind"] == "Deployment"
        and document["spec"]["template"]["spec"]["containers"][0]["name"] == "worker"
    }
    assert (chosen["operator"], set(chosen["values"])) == ("In", fleets)
    blocks = [to["ipBlock"] for rule in policy["spec"]["egress"] for to in rule["to"] if "ipBlock" in to]
    refused = [ipaddress.ip_network(network) for block in blocks for network in block["except"]]
    for address in ("10.1.2.3", "172.20.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200"):
        assert any(ipaddress.ip_address(address) in network for network in refused), address
    assert {"podSelector": {"matchLabels": one_label("api")}} in policy["spec"]["egress"][0]["to"]


def one_label(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/component": component}


def test_the_rules_become_an_object_of_the_prometheus_operator() -> None:
    page = (EXAMPLES / "kubernetes" / "README.md").read_text("utf-8")
    (command,) = re.findall(r"^sed .*?(?= \| kubectl)", page, re.M | re.S)
    done = subprocess.run(["bash", "-euc", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    made = yaml.safe_load(done.stdout)
    rules = yaml.safe_load((ROOT / "docs" / "operations" / "compose" / "alerts.yml").read_text("utf-8"))
    assert (made["kind"], made["spec"]) == ("PrometheusRule", rules)


def test_links_of_the_page_lead_somewhere() -> None:
    page = EXAMPLES / "kubernetes" / "README.md"
    for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / link).exists(), link
