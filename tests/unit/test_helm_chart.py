"""The Helm chart: rendered by Go's templates, checked against Kubernetes' schemas and the plain manifests.

Where `helm` is installed it lints and renders the chart too, and both renderings must be the same.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.command_lines import find_command
from tests.docs_blocks import all_blocks
from tests.unit.test_kubernetes_manifests import VERSIONS, complaints, documents

ROOT = Path(__file__).parents[2]
CHART = ROOT / "examples" / "helm" / "penstock"
PLAIN = ROOT / "examples" / "kubernetes"
RENDERER = ROOT / "tests" / "helm" / "render.go"
SPRIG = Path("/usr/share/gocode/src/github.com/Masterminds/sprig")
PROCESSES = ("api", "resulter", "scheduler", "submitter", "supervisor")
QUEUE = "https://sqs.eu-central-1.amazonaws.com/123456789012/penstock"
VIDEO = {
    "image": {"repository": "registry.example.com/myapp", "tag": "1.0.0"}, "app": ["myapp.video", "myapp.audio"],
    "queue": f"{QUEUE}-video", "concurrency": 4, "graceSeconds": 120, "roleArn": "arn:aws:iam::123456789012:role/video",
    "env": {"PENSTOCK_WORKER_CONCURRENCY": "8"},
    "keda": {"enabled": True, "max": 10, "route": "video", "slots": 2, "drainSeconds": 600},
}  # fmt: skip

Objects = dict[tuple[str, str], dict[str, Any]]


def values(**changes: Any) -> dict[str, Any]:
    """The values of the chart, filled in; each change replaces members of one of them."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    found["settings"] = {name: f"{QUEUE}-{name[9:-6].lower()}" for name in found["settings"]}
    found["settings"]["PENSTOCK_AWS_REGION"] = "eu-central-1"
    found["workers"]["default"]["app"] = ["myapp.tasks"]
    for name, change in copy.deepcopy(changes).items():
        found[name] = found[name] | change if isinstance(change, dict) else change
    return found


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go")
    if go is None or not SPRIG.exists():
        assert not os.environ.get("CI"), "Go or Sprig is missing: .ci/run installs Debian's packages"
        pytest.skip("Go, its Sprig and its YAML are not installed: .ci/run names the packages")
    program = tmp_path_factory.mktemp("helm") / "render"
    env = {
        **os.environ,
        "GO111MODULE": "off",
        "GOPATH": "/usr/share/gocode",
        "GOFLAGS": "",
        "GOCACHE": str(program.parent / "cache"),
    }
    subprocess.run([go, "build", "-o", str(program), str(RENDERER)], env=env, check=True, timeout=300)
    return program


def render(renderer: Path, given: dict[str, Any]) -> tuple[Objects, str]:
    """Objects by kind and name, and what was said against the values."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    data = {
        "values": given,
        "release": {"Name": "penstock", "Namespace": "jobs"},
        "chart": {"Name": chart["name"], "AppVersion": chart["appVersion"]},
    }
    done = subprocess.run(
        [str(renderer), str(CHART)], input=json.dumps(data), capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        return {}, done.stderr
    texts = [text for name, text in json.loads(done.stdout).items() if name.endswith(".yaml")]
    return objects_of("\n---\n".join(texts)), ""


def objects_of(text: str) -> Objects:
    found: Objects = {}
    for document in yaml.safe_load_all(text):
        if document:
            key = document["kind"], document["metadata"]["name"]
            assert key not in found, key
            found[key] = document
    return found


EVERYTHING = {
    "workers": {"video": VIDEO},
    "monitoring": {"serviceMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
    "workerKeySecret": "penstock-worker-key", "scalingKeySecret": "penstock-scaling-key",
    "imagePullSecrets": [{"name": "registry"}], "podLabels": {"team": "jobs"}, "priorityClassName": "penstock",
    "nodeSelector": {"pool": "jobs"}, "tolerations": [{"key": "jobs", "operator": "Exists"}],
}  # fmt: skip
CASES = {
    "default": {},
    "everything": EVERYTHING,
    "all in one": {"allInOne": {"enabled": True, "roleArn": "arn:aws:iam::1:role/x"}},
}


@pytest.fixture(scope="module", params=CASES)
def case(renderer: Path, request: pytest.FixtureRequest) -> tuple[str, Objects]:
    found, problem = render(renderer, values(**CASES[request.param]))
    assert problem == ""
    return request.param, found


@pytest.fixture(scope="module")
def everything(renderer: Path) -> Objects:
    return render(renderer, values(**EVERYTHING))[0]


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


def env_of(deployment: dict[str, Any]) -> dict[str, Any]:
    entries = pod(deployment)["containers"][0]["env"]
    assert len({entry["name"] for entry in entries}) == len(entries), "a variable is set twice"
    return {entry["name"]: entry.get("value") for entry in entries}


def test_every_object_is_one_that_kubernetes_takes(case: tuple[str, Objects]) -> None:
    _, found = case
    assert found
    for key, document in found.items():
        assert complaints(document, VERSIONS) == [], key
        assert document["metadata"]["namespace"] == "jobs"
        assert "template" not in document.get("spec", ()) or pod(document)["enableServiceLinks"] is False, key


def test_each_process_is_that_of_the_plain_manifests(case: tuple[str, Objects]) -> None:
    name, found = case
    if name == "all in one":
        assert [key for key in found if key[0] == "Deployment"] == [
            ("Deployment", "penstock-run"),
            ("Deployment", "penstock-worker"),
        ]
        assert pod(found["Deployment", "penstock-run"])["containers"][0]["args"] == ["run"]
        assert found["Service", "penstock-api"]["spec"]["selector"]["app.kubernetes.io/component"] == "run"
        return
    for process in PROCESSES:
        plain = next(one for one in documents(PLAIN / f"{process}.yaml") if one["kind"] == "Deployment")
        ours = found["Deployment", f"penstock-{process}"]
        assert ours["spec"]["replicas"] == plain["spec"]["replicas"]
        expected, container = pod(plain)["containers"][0], pod(ours)["containers"][0]
        for member in (
            "args",
            "startupProbe",
            "livenessProbe",
            "readinessProbe",
            "lifecycle",
            "resources",
            "securityContext",
            "volumeMounts",
        ):
            assert container.get(member) == expected.get(member), (process, member)
        for member in (
            "securityContext",
            "terminationGracePeriodSeconds",
            "shareProcessNamespace",
            "automountServiceAccountToken",
        ):
            assert pod(ours)[member] == pod(plain)[member], (process, member)
        assert [one for one in container["envFrom"] if "secretRef" in one] == [
            {"secretRef": {"name": "penstock-database"}}
        ]
        assert ("PodDisruptionBudget", f"penstock-{process}") in found
        assert ("ServiceAccount", pod(ours)["serviceAccountName"]) in found


def test_selectors_take_their_own_pods_alone(case: tuple[str, Objects]) -> None:
    _, found = case
    labels = {
        name: one["spec"]["template"]["metadata"]["labels"]
        for (kind, name), one in found.items()
        if kind == "Deployment"
    }
    for (kind, name), document in found.items():
        if kind in ("Deployment", "PodDisruptionBudget"):
            wanted = document["spec"]["selector"]["matchLabels"].items()
            assert [one for one, given in labels.items() if wanted <= given.items()] == [name]


def test_the_migration_is_a_hook_that_alone_has_the_owners_secret(everything: Objects) -> None:
    job = everything["Job", "penstock-migrate"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    (container,) = pod(job)["containers"]
    assert container["args"] == ["migrate", "--grant", "penstock_app"]
    assert "penstock-database-owner" in json.dumps(job)
    assert not [
        key for key, one in everything.items() if "penstock-database-owner" in json.dumps(one) and key[0] != "Job"
    ]


def test_the_migration_runs_where_the_processes_run(everything: Objects) -> None:
    job, api = everything["Job", "penstock-migrate"], everything["Deployment", "penstock-api"]
    for member in ("imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName"):
        assert pod(job)[member] == pod(api)[member] == EVERYTHING[member]
    assert job["spec"]["template"]["metadata"]["labels"]["team"] == "jobs"


def test_a_route_has_its_own_workers_without_a_database(everything: Objects) -> None:
    workers = everything["Deployment", "penstock-worker-video"]
    (container,) = pod(workers)["containers"]
    assert container["args"] == ["worker", "--app", "myapp.video", "--app", "myapp.audio", "--queue", f"{QUEUE}-video"]
    assert container["image"] == "registry.example.com/myapp:1.0.0"
    assert env_of(workers)["PENSTOCK_WORKER_CONCURRENCY"] == "8", "env wins"
    assert env_of(workers)["PENSTOCK_GRACE_SECONDS"] == "120"
    assert pod(workers)["terminationGracePeriodSeconds"] > 120
    assert "penstock-database" not in json.dumps(pod(workers))
    account = everything["ServiceAccount", "penstock-worker-video"]["metadata"]
    assert account["annotations"] == {"eks.amazonaws.com/role-arn": VIDEO["roleArn"]}
    assert "annotations" not in everything["ServiceAccount", "penstock-worker"]["metadata"]


def test_workers_have_as_long_to_start_as_the_plain_ones(everything: Objects) -> None:
    plain = next(one for one in documents(PLAIN / "worker.yaml") if one["kind"] == "Deployment")
    probe = pod(plain)["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 300
    for name in ("worker", "worker-video"):
        assert pod(everything["Deployment", f"penstock-{name}"])["containers"][0]["startupProbe"] == probe


def test_keda_scales_it_by_its_route_and_sets_the_replicas(everything: Objects) -> None:
    assert "replicas" not in everything["Deployment", "penstock-worker-video"]["spec"]
    scaled = everything["ScaledObject", "penstock-worker-video"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "penstock-worker-video"
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 10)
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["url"] == "http://penstock-api.jobs.svc:8080/scaling/video?drain_seconds=600"
    assert trigger["metadata"]["targetValue"] == "2"
    authentication = everything["TriggerAuthentication", trigger["authenticationRef"]["name"]]
    assert authentication["spec"]["secretTargetRef"][0]["name"] == "penstock-scaling-key"
    assert ("ScaledObject", "penstock-worker") not in everything


def test_prometheus_finds_all_pods_and_the_alerts_that_ask_for_their_labels(everything: Objects) -> None:
    service, monitor = everything["Service", "penstock-metrics"], everything["ServiceMonitor", "penstock"]
    selected = service["spec"]["selector"].items()
    for (kind, _), document in everything.items():
        if kind == "Deployment":
            assert selected <= document["spec"]["template"]["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    plain = documents(PLAIN / "monitoring" / "podmonitor.yaml")[0]["spec"]["podMetricsEndpoints"][0]
    assert endpoint["relabelings"] == plain["relabelings"]


KEDA = {"enabled": True}
FIVE = set(PROCESSES)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, FIVE | {"worker"}),
        ({"workers": {"video": VIDEO}}, FIVE | {"worker"}),
        ({"workers": {"video": VIDEO | {"keda": KEDA | {"min": 1}}}}, FIVE | {"worker", "worker-video"}),
        ({"workers": {"video": {"app": ["myapp.video"]}}}, FIVE | {"worker", "worker-video"}),
        ({"workers": {"default": {"app": ["myapp.tasks"], "keda": KEDA}}}, FIVE),
        ({"workers": {"default": {"app": ["myapp.tasks"], "replicas": 0}}}, FIVE),
        ({"processes": {"submitter": {"replicas": 0}}}, FIVE - {"submitter"} | {"worker"}),
        ({"allInOne": {"enabled": True}}, {"run", "worker"}),
    ],
)
def test_the_alert_of_a_missing_process_expects_what_the_values_start(
    renderer: Path, changes: dict[str, Any], expected: set[str]
) -> None:
    found, problem = render(renderer, values(**changes, monitoring={"rules": True}))
    assert problem == ""
    groups = found["PrometheusRule", "penstock"]["spec"]["groups"]
    plain = yaml.safe_load((ROOT / "docs" / "operations" / "compose" / "alerts.yml").read_text("utf-8"))["groups"]
    missing, plain_missing = groups[0]["rules"][0], plain[0]["rules"][0]
    first, *others = missing["expr"].splitlines()
    assert first == plain_missing["expr"].splitlines()[0]
    assert sorted(others) == sorted(f'  or absent(up{{job="penstock", service="{name}"}})' for name in expected)
    assert missing == plain_missing | {"expr": missing["expr"]}
    assert groups[0]["rules"][1:] == plain[0]["rules"][1:]


@pytest.mark.parametrize("keda", [{}, {"keda": {}}, {"keda": {"enabled": False}}])
def test_workers_need_no_more_than_their_handlers(renderer: Path, keda: dict[str, Any]) -> None:
    given = values()
    given["workers"] = {"video": {"app": ["myapp.video"], **keda}}
    found, problem = render(renderer, given)
    assert problem == ""
    workers = found["Deployment", "penstock-worker-video"]
    assert complaints(workers, VERSIONS) == []
    assert workers["spec"]["replicas"] == 2
    assert ("ScaledObject", "penstock-worker-video") not in found


def test_a_zero_is_a_value(renderer: Path) -> None:
    zero = {"replicas": 0, "maxUnavailable": 0}
    found, _ = render(renderer, values(workers={"default": {"app": ["a"], **zero}, "video": VIDEO | zero}))
    assert found["Deployment", "penstock-worker"]["spec"]["replicas"] == 0
    assert found["PodDisruptionBudget", "penstock-worker"]["spec"]["maxUnavailable"] == 0
    assert found["ScaledObject", "penstock-worker-video"]["spec"]["fallback"]["replicas"] == 0


def test_numbers_of_the_environment_are_written_out(renderer: Path) -> None:
    env = {"PENSTOCK_A": 33554432, "PENSTOCK_B": 0.5, "PENSTOCK_C": True, "PENSTOCK_D": "1e3", "PENSTOCK_E": 0}
    found, _ = render(renderer, values(processes={"api": {"env": env}}))
    given = env_of(found["Deployment", "penstock-api"])
    assert [given[name] for name in env] == ["33554432", "0.5", "true", "1e3", "0"]


def test_the_migration_is_of_the_schema_of_the_processes_and_checks_the_server_as_they_do(renderer: Path) -> None:
    given = values()
    shared = {"PENSTOCK_DATABASE_SCHEMA": "orders", "PENSTOCK_DATABASE_SSL_MODE": "verify-full",
              "PENSTOCK_DATABASE_SSL_ROOT_CERT": "/etc/ssl/rds.pem"}  # fmt: skip
    given["settings"] |= shared
    found, _ = render(renderer, given)
    assert env_of(found["Job", "penstock-migrate"]) == shared


def test_an_autoscaler_may_set_the_replicas_of_the_api(renderer: Path) -> None:
    given = values()
    del given["processes"]["api"]["replicas"]  # as Helm does for null
    assert "replicas" not in render(renderer, given)[0]["Deployment", "penstock-api"]["spec"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"PENSTOCK_INBOUND_QUEUE": ""}}, "settings.PENSTOCK_INBOUND_QUEUE is empty"),
        ({"workers": {"default": {"app": []}}}, "workers.default.app is empty"),
    ],
)
def test_what_is_missing_is_said(renderer: Path, changes: dict[str, Any], said: str) -> None:
    assert said in render(renderer, values(**changes))[1]


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_schema_takes_the_values(changes: dict[str, Any]) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values(**changes), schema, jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": {"default": {"replica": 3}}}, {"replicas": 3}, {"settings": {"INBOUND_QUEUE": "x"}},
        {"processes": {"apo": {"replicas": 1}}}, {"processes": {"api": {"enabled": False}}},
        {"workers": {"Video": VIDEO}}, {"allInOne": {"roleArn": "role/x"}},
    ],
)  # fmt: skip
def test_the_schema_finds_a_misspelt_value(changes: dict[str, Any]) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    given = values()
    for name, change in changes.items():
        given[name] = given.get(name, {}) | change if isinstance(change, dict) else change
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(given, schema, jsonschema.Draft7Validator)


def test_the_page_names_the_chart_and_objects_that_it_makes() -> None:
    commands, given = (block.text for block in all_blocks() if block.page == "examples/helm/README.md")
    assert f" {CHART.relative_to(ROOT)} " in commands
    for called in re.findall(r"-- penstock (.+)", commands):
        command, rest = find_command(called.split())
        assert command.name == "create"
        assert "--permission" in rest
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    jsonschema.validate(yaml.safe_load(given), schema, jsonschema.Draft7Validator)


def test_the_values_of_the_page_make_a_fleet_for_its_route(renderer: Path) -> None:
    (text,) = (
        block.text for block in all_blocks() if block.page == "examples/helm/README.md" and block.info == "yaml values"
    )
    merged = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    for name, value in yaml.safe_load(text).items():
        merged[name] = merged[name] | value if isinstance(value, dict) else value
    found, problem = render(renderer, merged)
    assert problem == ""
    assert {name for kind, name in found if kind == "ScaledObject"} == {"penstock-worker", "penstock-worker-video"}
    assert ("PrometheusRule", "penstock") in found


def test_its_version_is_ours() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'\nversion = "{chart["version"]}"\n' in project
    assert chart["appVersion"] == chart["version"]


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
@pytest.mark.parametrize("name", CASES)
def test_helm_renders_the_same(renderer: Path, name: str, tmp_path: Path) -> None:
    given = values(**CASES[name])
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(given), "utf-8")
    options = ["--values", str(tmp_path / "values.yaml"), "--namespace", "jobs"]
    subprocess.run(["helm", "lint", "--strict", str(CHART), *options], check=True, timeout=60)
    done = subprocess.run(
        ["helm", "template", "penstock", str(CHART), *options], capture_output=True, text=True, timeout=60, check=True
    )
    assert objects_of(done.stdout) == render(renderer, given)[0]
