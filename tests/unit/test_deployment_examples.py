"""examples/kubernetes and examples/autoscaling, held against the settings, the commands, the metrics and each other."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import hcl2
import httpx
import pytest
import yaml
from prometheus_client import Gauge

from penstock.api.http import SCALING_PATH
from penstock.api.scaling import _drain_seconds, _figures
from penstock.limits.scaling import COUNTED, OUTBOUND, RouteLoad
from penstock.runtime import metrics
from penstock.runtime.health import DEFAULT_PORT, Health, serve_health
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import PREFIX
from tests.command_lines import command_tree

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"
AUTOSCALING = ROOT / "examples" / "autoscaling"
PROCESSES = ("submitter", "scheduler", "worker", "resulter", "supervisor", "api")
SCALING_GAUGES = {"waiting", "in_flight", "oldest_seconds", "slots"}


@cache
def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def one(path: Path, kind: str, name: str | None = None) -> dict[str, Any]:
    (found,) = [
        document for document in documents(path)
        if document["kind"] == kind and name in (None, document["metadata"]["name"])
    ]  # fmt: skip
    return found


def pod_of(process: str) -> dict[str, Any]:
    kind = "Job" if process == "migrate" else "Deployment"
    pod: dict[str, Any] = one(KUBERNETES / f"{process}.yaml", kind)["spec"]["template"]
    return pod


def container_of(process: str) -> dict[str, Any]:
    (container,) = pod_of(process)["spec"]["containers"]
    assert container["name"] == process
    return dict(container)


def environment_of(process: str) -> dict[str, str]:
    """What the container is given, its references followed."""
    container = container_of(process)
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        for kind, field, reference in (("ConfigMap", "data", "configMapRef"), ("Secret", "stringData", "secretRef")):
            if reference in source:
                found |= one(KUBERNETES / "settings.yaml", kind, source[reference]["name"])[field]
    for variable in container.get("env", ()):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            reference = variable["valueFrom"]["secretKeyRef"]
            secret = one(KUBERNETES / "settings.yaml", "Secret", reference["name"])
            found[variable["name"]] = secret["stringData"][reference["key"]]
    return found


def scaling_gauges() -> dict[str, set[str]]:
    return {
        metric._name: set(metric._labelnames)
        for metric in vars(metrics).values()
        if isinstance(metric, Gauge) and metric._name.startswith("penstock_scaling_")
    }


# Kubernetes


def test_the_kustomization_names_every_file() -> None:
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    assert {f"{process}.yaml" for process in (*PROCESSES, "migrate")} <= files


@pytest.mark.parametrize("process", [*PROCESSES, "migrate"])
def test_a_container_runs_its_command_with_options_that_it_has(process: str) -> None:
    container = container_of(process)
    name, *options = container["args"]
    assert name == process
    command: Any = command_tree()
    known = {option for param in command.commands[name].params for option in param.opts}
    assert {option for option in options if option.startswith("-")} <= known
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if process == "worker":
        assert f"FROM penstock:{version}" in (KUBERNETES / "worker.yaml").read_text("utf-8")
    else:
        assert container["image"] == f"penstock:{version}"


@pytest.mark.parametrize("process", [*PROCESSES, "migrate"])
def test_the_environment_is_made_of_settings_and_valid(
    process: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in environment_of(process).items():
        assert isinstance(value, str), f"{name} must be quoted"
        assert name.removeprefix(PREFIX).lower() in Settings.model_fields, f"{name} is no setting"
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert (settings.database_url is None) == (process == "worker"), "only a worker needs no database"
    if process != "migrate":
        assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", DEFAULT_PORT)
    if process == "api":
        assert settings.needs_keys
        assert settings.http_host == "0.0.0.0"
        ports = {port["name"]: port["containerPort"] for port in container_of("api")["ports"]}
        assert ports == {"http": settings.http_port, "metrics": DEFAULT_PORT}
        (port,) = one(KUBERNETES / "api.yaml", "Service")["spec"]["ports"]
        assert port["targetPort"] == "http"
    if process == "worker":
        service = one(KUBERNETES / "api.yaml", "Service")
        assert settings.control_url == (
            f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/rpc"
        )


@pytest.mark.parametrize("process", PROCESSES)
def test_a_pod_is_given_more_time_to_stop_than_its_process_takes(process: str) -> None:
    grace = float(environment_of(process)["PENSTOCK_GRACE_SECONDS"])
    pause = container_of(process).get("lifecycle", {}).get("preStop", {}).get("exec", {"command": ["sleep", "0"]})
    assert pause["command"][0] == "sleep"
    spec = pod_of(process)["spec"]
    assert spec["terminationGracePeriodSeconds"] >= grace + float(pause["command"][1]) + 10
    assert spec["shareProcessNamespace"] is True, "as the first process it would not heed an early SIGTERM"


@pytest.mark.parametrize("process", PROCESSES)
def test_probes_ask_what_the_health_port_answers(process: str) -> None:
    container = container_of(process)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    server = serve_health([Health(process)], "127.0.0.1", 0)
    answers: list[int] = []
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        get = container[probe]["httpGet"]
        assert (get["path"], ports[get["port"]]) == (path, DEFAULT_PORT)
        answers.append(httpx.get(server.url + path).status_code)
    server.close()
    assert answers == [200, 503], "alive, and not ready yet"


@pytest.mark.parametrize("process", PROCESSES)
def test_a_budget_and_an_account_belong_to_the_pods_and_the_policy_to_the_process(process: str) -> None:
    path = KUBERNETES / f"{process}.yaml"
    deployment = one(path, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    assert labels["app.kubernetes.io/component"] == process
    budget = one(path, "PodDisruptionBudget")["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert budget["maxUnavailable"] in (1, "25%")
    # An apply must not undo what the autoscaler has set.
    assert deployment["spec"].get("replicas") == (None if process == "worker" else 2)
    account = one(path, "ServiceAccount")["metadata"]
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == account["name"]
    access = hcl2.loads((ROOT / "terraform" / "iam.tf").read_text("utf-8"))["locals"][0]["access"]
    assert process in {name.strip('"') for name in access}


@pytest.mark.parametrize("process", [*PROCESSES, "migrate"])
def test_a_container_has_no_privileges(process: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text("utf-8")
    context = pod_of(process)["spec"]["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}" in dockerfile
    assert context["runAsNonRoot"] is True
    assert container_of(process)["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert pod_of(process)["spec"]["automountServiceAccountToken"] is False


def test_the_monitor_makes_the_labels_that_the_alerts_ask_for() -> None:
    spec = one(KUBERNETES / "monitoring" / "podmonitor.yaml", "PodMonitor")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
    made = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
    assert made["job"]["replacement"] == "penstock"
    assert made["service"]["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    for process in PROCESSES:
        assert spec["selector"]["matchLabels"].items() <= pod_of(process)["metadata"]["labels"].items()


# Autoscaling


def scaled(name: str) -> dict[str, Any]:
    """The trigger of a ScaledObject, whose target and authentication exist."""
    spec = one(AUTOSCALING / name, "ScaledObject")["spec"]
    assert spec["scaleTargetRef"]["name"] == one(KUBERNETES / "worker.yaml", "Deployment")["metadata"]["name"]
    assert spec["minReplicaCount"] < spec["maxReplicaCount"]
    (trigger,) = spec["triggers"]
    assert trigger["authenticationRef"]["name"] == one(AUTOSCALING / name, "TriggerAuthentication")["metadata"]["name"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes strings alone"
    return dict(trigger)


def test_keda_asks_the_api_where_it_answers_for_a_figure_that_it_gives() -> None:
    trigger = scaled("keda-metrics-api.yaml")
    assert trigger["type"] == "metrics-api"
    asked = trigger["metadata"]
    url = urlsplit(asked["url"])
    (port,) = one(KUBERNETES / "api.yaml", "Service")["spec"]["ports"]
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    assert (url.hostname, url.port) == (f"penstock-api.{kustomization['namespace']}.svc", port["port"])
    assert url.path == f"{SCALING_PATH}/{OUTBOUND}"
    drain_seconds = _drain_seconds(dict(parse_qsl(url.query)))
    assert isinstance(_figures(RouteLoad(OUTBOUND, []), drain_seconds)[asked["valueLocation"]], float)
    assert 0 < float(asked["targetValue"]) <= float(environment_of("worker")["PENSTOCK_WORKER_CONCURRENCY"])
    assert (asked["authMode"], asked["method"], asked["keyParamName"]) == ("apiKey", "header", "X-API-Key")
    (reference,) = one(AUTOSCALING / "keda-metrics-api.yaml", "TriggerAuthentication")["spec"]["secretTargetRef"]
    assert reference["parameter"] == "apiKey"
    assert reference["key"] in one(KUBERNETES / "settings.yaml", "Secret", reference["name"])["stringData"]


def test_keda_watches_the_queue_that_the_workers_take_from() -> None:
    asked = scaled("keda-sqs.yaml")["metadata"]
    environment = environment_of("worker")
    assert asked["queueURL"] == environment["PENSTOCK_OUTBOUND_QUEUE"]
    assert asked["awsRegion"] == environment["PENSTOCK_AWS_REGION"]
    assert asked["scaleOnInFlight"] == "true"


def test_ecs_tracks_a_metric_that_the_agent_hands_on() -> None:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key.strip('"'): plain(item) for key, item in value.items() if not key.startswith("__")}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.strip('"') if isinstance(value, str) else value

    module = plain(hcl2.loads((AUTOSCALING / "ecs.tf").read_text("utf-8")))
    resources = {kind: body for resource in module["resource"] for kind, body in resource.items()}
    policy = resources["aws_appautoscaling_policy"]["worker"]
    (tracking,) = policy["target_tracking_scaling_policy_configuration"]
    (specification,) = tracking["customized_metric_specification"]
    found = {query["id"]: query for query in specification["metrics"]}
    (stat,) = found["slots"]["metric_stat"]
    (metric,) = stat["metric"]
    assert {dimension["name"] for dimension in metric["dimensions"]} == scaling_gauges()[metric["metric_name"]]
    (returned,) = [query for query in found.values() if query["return_data"]]
    assert set(returned["expression"].split(" / ")) == found.keys() - {returned["id"]}
    variables = {name: body for variable in module["variable"] for name, body in variable.items()}
    assert variables["route"]["default"] == OUTBOUND

    agent = json.loads((AUTOSCALING / "cloudwatch-agent.json").read_text("utf-8"))
    prometheus = agent["logs"]["metrics_collected"]["prometheus"]
    assert Path(prometheus["prometheus_config_path"]).name == "cloudwatch-prometheus.yaml"
    assert prometheus["emf_processor"]["metric_namespace"] == metric["namespace"]
    (declaration,) = prometheus["emf_processor"]["metric_declaration"]
    assert declaration["dimensions"] == [["route"]]
    assert {selector.strip("^$") for selector in declaration["metric_selectors"]} == scaling_gauges().keys()
    (config,) = documents(AUTOSCALING / "cloudwatch-prometheus.yaml")
    (job,) = config["scrape_configs"]
    assert declaration["label_matcher"] == f"^{job['job_name']}$"
    assert job["dns_sd_configs"][0]["port"] == DEFAULT_PORT


def test_the_gauges_for_scaling_tell_what_the_api_tells() -> None:
    assert scaling_gauges() == {f"penstock_scaling_{name}": {"route"} for name in SCALING_GAUGES}
    assert _figures(RouteLoad(OUTBOUND, []), 60).keys() == SCALING_GAUGES | {"tasks"}


def test_the_page_speaks_of_settings_metrics_files_and_figures_that_exist() -> None:
    page = (ROOT / "docs" / "autoscaling.md").read_text("utf-8")
    settings = set(re.findall(rf"\b{PREFIX}([A-Z_]+)", page))
    assert {name.lower() for name in settings} <= set(Settings.model_fields)
    exported = {family.name for family in metrics.REGISTRY.collect()}
    assert set(re.findall(r"`(penstock_[a-z_]+)`", page)) <= exported
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (ROOT / "docs" / link).exists(), link
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`|the sum)", page, re.MULTILINE)
    assert {name for name, _ in rows} == _figures(RouteLoad(OUTBOUND, []), 60).keys()
    assert {metric for _, metric in rows if metric} == scaling_gauges().keys()
    assert f"stops at {COUNTED:,}" in page
    assert f"counted up to {COUNTED}" in (ROOT / "docs" / "metrics.md").read_text("utf-8")
