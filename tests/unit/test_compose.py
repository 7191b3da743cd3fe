"""docker-compose.yml, Dockerfile and the files they use, held against the settings, the metrics and each other."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import hcl2
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client import Counter, Gauge, Histogram

from penstock.brokers.base import MAX_RECEIVES
from penstock.local.postgres import SUPERUSER, EmbeddedPostgres
from penstock.local.service import HOST
from penstock.protocol.api_key import Permission, digest_of, parse_entries
from penstock.runtime import metrics
from penstock.settings.broker_urls import DEAD_LETTER_SUFFIX
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import PREFIX

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations" / "compose"
DASHBOARD = OPERATIONS / "grafana" / "penstock.json"
PROCESSES = ("submitter", "scheduler", "worker", "resulter", "supervisor", "api")
METRICS_PORT = 9464
QUEUES = {"inbound", "outbound", "results"}
# What an operator must set; the file has no default for a secret.
WORKER_KEY = "w" * 32
SECRETS = {
    "POSTGRES_PASSWORD": "pg0secret", "PENSTOCK_API_KEYS": "k" * 32, "GRAFANA_ADMIN_PASSWORD": "graf0secret",
    "APP_PASSWORD": "app0secret", "EXPORT_PASSWORD": "ex0secret", "PENSTOCK_WORKER_KEY": WORKER_KEY,
    "PENSTOCK_WORKER_KEY_SHA256": digest_of(WORKER_KEY.encode()).hex(),
}  # fmt: skip
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def interpolated(value: Any, environ: dict[str, str]) -> Any:
    """``value`` with ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}`` replaced as compose does."""
    if isinstance(value, dict):
        return {key: interpolated(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, environ) for item in value]
    if not isinstance(value, str):
        return value

    def replaced(match: re.Match[str]) -> str:
        name, operator, operand = match.groups()
        if environ.get(name):
            return environ[name]
        if operator == "?":
            raise KeyError(f"{name}: {operand}")
        return operand if operator == "-" else ""

    return VARIABLE.sub(replaced, value)


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    return loaded


@pytest.fixture(scope="module")
def compose(raw: dict[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = interpolated(raw, SECRETS)
    return filled


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert match is not None, duration
    return 60 * int(match[1] or 0) + int(match[2] or 0)


# Services


def test_all_six_processes_a_migration_and_what_they_lean_on_are_there(compose: dict[str, Any]) -> None:
    helpers = {"postgres", "elasticmq", "roles", "migrate", "prometheus", "grafana"}
    assert compose["services"].keys() == set(PROCESSES) | helpers


@pytest.mark.parametrize("name", [*PROCESSES, "migrate"])
def test_a_process_runs_its_own_command_of_the_image(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["command"][0] == name
    assert service["build"] == "."
    assert "entrypoint" not in service


def test_images_are_pinned_and_ours_carries_the_version_of_the_project(compose: dict[str, Any]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    for name, service in compose["services"].items():
        image, _, tag = service["image"].rpartition(":")
        assert image, f"{name} has no tag"
        assert re.match(r"v?\d+\.\d+\.\d+|\d+\.\d+-", tag), f"{name}: {tag} is no exact version"
        if "build" in service:
            assert (image, tag) == ("penstock", version)


def test_every_lasting_service_has_a_health_check_and_comes_back(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if name in ("roles", "migrate"):
            assert service["healthcheck"] == {"disable": True}
            assert service["restart"] == "no"
            continue
        check = service["healthcheck"]
        assert check["test"][0] == "CMD", name
        assert seconds(check["timeout"]) <= seconds(check["interval"]), name
        assert check["retries"] >= 1
        assert service["restart"] == "unless-stopped", name


@pytest.mark.parametrize("name", PROCESSES)
def test_health_of_a_process_is_its_readiness(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    command, *arguments = service["healthcheck"]["test"][1:]
    assert (command, arguments[0]) == ("python", "-c")
    compile(arguments[1], "healthcheck", "exec")
    port = service["environment"]["PENSTOCK_METRICS_PORT"]
    assert f"http://127.0.0.1:{port}/readyz" in arguments[1]


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_starts_after_the_migration_and_what_it_connects_to(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    conditions = {on: how["condition"] for on, how in service["depends_on"].items()}
    assert conditions["migrate"] == "service_completed_successfully"
    assert conditions["postgres"] == "service_healthy"
    if "PENSTOCK_SQS_ENDPOINT_URL" in service["environment"]:
        assert conditions["elasticmq"] == "service_healthy"


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_is_given_more_time_to_stop_than_its_grace(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    grace = float(service["environment"]["PENSTOCK_GRACE_SECONDS"])
    assert seconds(service["stop_grace_period"]) > grace
    assert service["init"] is True


@pytest.mark.parametrize("name", [*PROCESSES, "migrate", "roles"])
def test_a_process_has_no_privileges(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert "user" not in service, "the image's own user is not root; do not override it"


def test_ports_are_published_on_the_loopback_address_only_and_never_twice(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert published
    taken = []
    for port in published:
        assert isinstance(port, str), "a number would be published on every address"
        host, outer, _ = port.split(":")
        assert host == "127.0.0.1", port
        taken.append(outer)
    assert len(taken) == len(set(taken))


def test_scalable_processes_publish_no_port_and_bear_no_fixed_name(compose: dict[str, Any]) -> None:
    for name in PROCESSES:
        service = compose["services"][name]
        assert "container_name" not in service
        assert name == "api" or "ports" not in service


def test_nothing_outside_the_repository_is_mounted(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source, _, rest = volume.partition(":")
            if source in compose["volumes"]:
                continue
            assert source.startswith("./"), f"{name} mounts {source}"
            inside = (ROOT / source).resolve()
            assert inside.is_relative_to(ROOT.resolve())
            assert inside.exists(), source
            assert rest.endswith(":ro"), f"{name} may write to {source}"


def test_state_is_kept_in_named_volumes(compose: dict[str, Any]) -> None:
    for name, target in {
        "postgres": "/var/lib/postgresql",
        "prometheus": "/prometheus",
        "grafana": "/var/lib/grafana",
    }.items():
        assert f"{name}:{target}" in compose["services"][name]["volumes"]
        assert name in compose["volumes"]


def test_configuration_files_exist_and_each_is_used(compose: dict[str, Any]) -> None:
    used = {entry["source"] for service in compose["services"].values() for entry in service.get("configs", ())}
    assert used == compose["configs"].keys()
    files = {(ROOT / entry["file"]).resolve() for entry in compose["configs"].values()}
    assert files == {path.resolve() for path in OPERATIONS.rglob("*") if path.is_file()}


# Environment


def penstock_variables(service: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in service["environment"].items() if name.startswith(PREFIX)}


@pytest.mark.parametrize("name", [*PROCESSES, "migrate"])
def test_environment_of_a_process_is_made_of_settings_and_valid(
    compose: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables = penstock_variables(compose["services"][name])
    for variable, value in variables.items():
        assert variable.removeprefix(PREFIX).lower() in Settings.model_fields, f"{variable} is no setting"
        assert isinstance(value, str), f"{variable} must be quoted"
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    settings = load_settings()
    assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", METRICS_PORT)
    assert (settings.database_url is not None) == (name != "worker"), "only a worker needs no database"
    assert (settings.sqs_endpoint_url is not None) == (name != "migrate")
    if name == "api":
        assert settings.http_host == "0.0.0.0"
        assert settings.api_keys, "an api that listens beyond loopback must ask for a key"


def test_secrets_have_no_default_and_the_message_says_what_to_set(raw: dict[str, Any]) -> None:
    for missing in SECRETS:
        with pytest.raises(KeyError, match=f"set {missing} to"):
            interpolated(raw, {name: value for name, value in SECRETS.items() if name != missing})


def test_example_handlers_are_importable_by_the_worker_and_reach_their_database(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    assert worker["command"][1:] == ["--app", "examples.export"]
    assert worker["working_dir"] == "/app"
    assert "./examples:/app/examples:ro" in worker["volumes"]
    assert worker["environment"]["EXPORT_DATABASE_URL"] == "postgresql://export:ex0secret@postgres:5432/export"


def test_a_worker_is_given_no_secret_but_its_own(compose: dict[str, Any]) -> None:
    told = json.dumps(compose["services"]["worker"])
    for name in ("POSTGRES_PASSWORD", "APP_PASSWORD", "PENSTOCK_API_KEYS", "GRAFANA_ADMIN_PASSWORD"):
        assert SECRETS[name] not in told
    entries = compose["services"]["api"]["environment"]["PENSTOCK_API_KEYS"].split(",")
    (key,) = (key for key in parse_entries(entries) if key.digest == digest_of(WORKER_KEY.encode()))
    assert (key.name, key.permissions) == ("worker", {Permission.WORKER})


@pytest.mark.parametrize("name", sorted({*PROCESSES} - {"worker"}))
def test_a_process_uses_the_role_that_the_migration_grants_its_rights(compose: dict[str, Any], name: str) -> None:
    migrate, process = (compose["services"][one] for one in ("migrate", name))
    role = urlsplit(process["environment"]["PENSTOCK_DATABASE_URL"]).username
    assert migrate["command"] == ["migrate", "--grant", role]
    assert role != urlsplit(migrate["environment"]["PENSTOCK_DATABASE_URL"]).username
    assert SECRETS["POSTGRES_PASSWORD"] not in json.dumps(process)


def test_the_queues_are_not_published(compose: dict[str, Any]) -> None:
    assert "ports" not in compose["services"]["elasticmq"]


async def test_the_script_of_roles_sets_up_a_database_and_may_run_again(
    compose: dict[str, Any], data_path: Path
) -> None:
    service = compose["services"]["roles"]
    with ExitStack() as held:
        server = EmbeddedPostgres(data_path)
        server.start()
        held.callback(server.stop)
        environment = service["environment"]
        assert environment["PGUSER"] == SUPERUSER
        command = [str(server._bin / "psql"), *service["entrypoint"][1:-1], f"--file={OPERATIONS / 'roles.sql'}"]
        server.create_database("penstock")
        given = environment | {
            "PGHOST": HOST,
            "PGPORT": str(server.port),
            "PGPASSWORD": urlsplit(server.dsn()).password,
        }
        for _ in range(2):
            done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
        assert server.fetch_value("select current_setting('search_path')", database="penstock") == "public"
        await (await asyncpg.connect(f"postgresql://penstock_app:app0secret@{HOST}:{server.port}/postgres")).close()
        server.execute("create role rds_iam")  # as RDS has it
        for _ in range(2):
            role = [*command[:-1], f"--file={ROOT / 'examples' / 'terraform-ecs' / 'role.sql'}"]
            subprocess.run(role, env=given | {"PGDATABASE": "postgres"}, check=True, timeout=60)
        assert server.fetch_value("select pg_has_role('penstock_app', 'rds_iam', 'member')")
        connection = await asyncpg.connect(f"postgresql://export:ex0secret@{HOST}:{server.port}/export")
        await connection.execute("create table t_object (id int)")
        await connection.close()


# ElasticMQ


@pytest.fixture(scope="module")
def elasticmq() -> dict[str, Any]:
    """elasticmq.conf, which keeps to the part of HOCON that HCL reads as well, but for its first line."""
    text = (OPERATIONS / "elasticmq.conf").read_text("utf-8")
    include, _, rest = text.partition("\n")
    assert include == 'include classpath("application.conf")'

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            assert len(value) == 1, f"defined twice: {value}"
            return plain(value[0])
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items() if not key.startswith("__")}
        return value.strip('"') if isinstance(value, str) else value

    parsed: dict[str, Any] = plain(hcl2.loads(rest))
    return parsed


def test_elasticmq_makes_the_queues_of_the_settings_each_with_a_dead_letter_queue(elasticmq: dict[str, Any]) -> None:
    defaults = {role: Settings.model_fields[f"{role}_queue"].default for role in QUEUES}
    queues = elasticmq["queues"]
    dead = {name + DEAD_LETTER_SUFFIX for name in defaults.values()}
    assert queues.keys() == set(defaults.values()) | dead
    for name in defaults.values():
        queue = queues[name]
        letters = queue["deadLettersQueue"]
        assert letters == {"name": name + DEAD_LETTER_SUFFIX, "maxReceiveCount": MAX_RECEIVES}
        visibility = Settings.model_fields["visibility_timeout_seconds"].default
        assert queue["defaultVisibilityTimeout"] == f"{visibility} seconds"
        assert queue["receiveMessageWait"] == f"{Settings.model_fields['receive_wait_seconds'].default} seconds"


def test_elasticmq_holds_to_the_limits_of_sqs_and_answers_with_urls_that_work_inside_and_outside(
    elasticmq: dict[str, Any], compose: dict[str, Any]
) -> None:
    assert elasticmq["rest-sqs"]["sqs-limits"] == "strict"
    assert elasticmq["node-address"]["host"] == "*"
    assert elasticmq["aws"]["region"] == compose["services"]["scheduler"]["environment"]["PENSTOCK_AWS_REGION"]


# Prometheus and Grafana


def target_of(service: dict[str, Any], config: str) -> str:
    found = [entry["target"] for entry in service["configs"] if entry["source"] == config]
    assert len(found) == 1, config
    return str(found[0])


def test_prometheus_scrapes_every_instance_of_every_process(compose: dict[str, Any]) -> None:
    config = yaml.safe_load((OPERATIONS / "prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "penstock"
    (discovery,) = job["dns_sd_configs"]
    assert sorted(discovery["names"]) == sorted(PROCESSES)
    assert (discovery["type"], discovery["port"]) == ("A", METRICS_PORT)
    for name in PROCESSES:
        environment = compose["services"][name]["environment"]
        assert environment["PENSTOCK_METRICS_HOST"] == "0.0.0.0"
        assert int(environment["PENSTOCK_METRICS_PORT"]) == METRICS_PORT


def test_prometheus_finds_its_configuration_and_rules_where_compose_puts_them(compose: dict[str, Any]) -> None:
    service = compose["services"]["prometheus"]
    path = target_of(service, "prometheus")
    assert f"--config.file={path}" in service["command"]
    config = yaml.safe_load((OPERATIONS / "prometheus.yml").read_text("utf-8"))
    (rules,) = config["rule_files"]
    assert str(PurePosixPath(path).parent / rules) == target_of(service, "alerts")


def test_grafana_finds_datasource_and_dashboard_where_compose_puts_them(compose: dict[str, Any]) -> None:
    service = compose["services"]["grafana"]
    source = yaml.safe_load((OPERATIONS / "grafana" / "datasource.yml").read_text("utf-8"))["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"] is True
    provider = yaml.safe_load((OPERATIONS / "grafana" / "dashboards.yml").read_text("utf-8"))["providers"][0]
    dashboard = target_of(service, "grafana-penstock")
    assert str(PurePosixPath(dashboard).parent) == provider["options"]["path"]
    assert service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    provisioning = PurePosixPath("/etc/grafana/provisioning")
    assert PurePosixPath(target_of(service, "grafana-datasource")).parent == provisioning / "datasources"
    assert PurePosixPath(target_of(service, "grafana-dashboards")).parent == provisioning / "dashboards"


def exported() -> dict[str, set[str]]:
    """Every series name that the processes export, with its labels."""
    series: dict[str, set[str]] = {}
    for metric in vars(metrics).values():
        if not isinstance(metric, Counter | Gauge | Histogram):
            continue
        (family,) = metric.describe()
        labels = set(metric._labelnames)
        if isinstance(metric, Counter):
            series[f"{family.name}_total"] = labels
        elif isinstance(metric, Gauge):
            series[family.name] = labels
        else:
            series |= {f"{family.name}_bucket": labels | {"le"}}
            series |= {f"{family.name}_{part}": labels for part in ("sum", "count")}
    return series


SERIES = exported()
# What a scrape adds to the labels of a series, and a series of Prometheus itself.
ADDED = {"job", "instance", "service"}
FOREIGN = {"up"}


def alert_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OPERATIONS / "alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return loaded


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alert_rules():
        yield rule["alert"], rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def test_what_each_supervisor_counts_alike_is_not_added_up() -> None:
    alike = "backlog|due|oldest_due_seconds|queue_depth|scaling_\\w+|rejected_kept|delayed_records|action_w\\w+"
    for where, expression in expressions():
        assert not re.search(rf"\bsum\b(?: by \([^)]*\))? ?\(penstock_(?:{alike})\b", expression), where


def complaints(expression: str) -> list[str]:
    """Series that are not exported, and labels that the series of an expression do not have."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    found = []
    for name, selector in re.findall(r"\b(penstock_\w+|up)\b(?:\{([^}]*)\})?", bare):
        if name not in SERIES and name not in FOREIGN:
            found.append(f"no metric {name}")
            continue
        used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)
        found += [f"{name} has no label {label}" for label in used if label not in SERIES.get(name, set()) | ADDED]
    names = [name for name in re.findall(r"\bpenstock_\w+\b", bare) if name in SERIES]
    known = ADDED.union(*(SERIES[name] for name in names))
    for grouping in re.findall(r"\bby \(([^)]*)\)", bare):
        labels = re.split(r",\s*", grouping)
        found += [f"no series here has the label {label}" for label in labels if names and label not in known]
    return found


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_dashboard_and_alerts_use_exported_metrics_and_their_labels(where: str, expression: str) -> None:
    assert complaints(expression) == [], where


def test_a_metric_or_label_that_does_not_exist_is_found() -> None:
    assert complaints("rate(penstock_transitions[5m])") == ["no metric penstock_transitions"]
    assert complaints("penstock_run_seconds") == ["no metric penstock_run_seconds"]
    assert complaints('penstock_backlog{action="a"}') == ["penstock_backlog has no label action"]
    assert complaints("sum by (colour) (penstock_backlog)") == ["no series here has the label colour"]
    assert complaints('sum by (le) (rate(penstock_run_seconds_bucket{action=~"x"}[1m]))') == []


def test_dashboard_shows_every_metric() -> None:
    shown = {name for _, expression in expressions() for name in re.findall(r"\bpenstock_\w+\b", expression)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in SERIES if name.startswith("penstock_")}
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}


def test_dashboard_panels_have_ids_of_their_own_titles_and_no_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        cells |= mine
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_alerts_cover_what_an_operator_must_know_and_say_it() -> None:
    rules = {rule["alert"]: rule for rule in alert_rules()}
    assert len(rules) == len(alert_rules()), "two alerts of one name"
    watched = " ".join(rule["expr"] for rule in rules.values())
    for name in (
        "penstock_oldest_due_seconds",
        'penstock_transitions_total{state="CRITICAL_ERROR"}',
        "penstock_rejected_kept",
        "penstock_ready",
        'penstock_passes_total{process="scheduler"',
    ):
        assert name in watched, name
    for process in PROCESSES:
        assert f'absent(up{{job="penstock", service="{process}"}})' in watched
    for name, rule in rules.items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert rule["annotations"]["summary"], name


# Image


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest), continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_image_is_built_in_two_stages_from_one_pinned_base() -> None:
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert len(bases) == 2
    assert set(bases) == {"${PYTHON_IMAGE}"}
    (default,) = [rest for word, rest in instructions() if word == "ARG"]
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.1[1-9]\.\d+-slim-\w+", default)


def test_image_installs_pinned_packages_with_hashes_that_fit_the_project() -> None:
    (wheels,) = [rest for word, rest in instructions() if word == "RUN" and "pip wheel" in rest]
    assert "--require-hashes -r image-requirements.txt" in wheels
    assert "--no-deps ." in wheels
    text = (ROOT / ".ci" / "image-requirements.txt").read_text("utf-8")
    pinned = dict(re.findall(r"^([a-z0-9._-]+)(?:\[[a-z,]+\])?==(\S+)", text, re.MULTILINE))
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}", text)) >= len(pinned) > 40
    (extras,) = set(re.findall(r'"penstock\[([a-z,]+)\]"', " ".join(rest for _, rest in instructions())))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], f"penstock[{extras}]"]
    while found := [text for text in wanted if text.startswith("penstock[")]:
        named = [extra for text in found for extra in Requirement(text).extras]
        wanted = [text for text in wanted if text not in found]
        wanted += [text for extra in named for text in project["optional-dependencies"][extra]]
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate():
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not pinned: run make lock"
            assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}: run make lock"


def test_image_runs_penstock_as_an_ordinary_user_and_holds_no_secret() -> None:
    final = instructions()
    final = final[max(at for at, (word, _) in enumerate(final) if word == "FROM") :]
    found = dict(final)
    user = found["USER"].split(":")[0]
    assert user.isdigit(), "by number, so that an orchestrator sees that it is not root"
    assert int(user) > 0
    assert json.loads(found["ENTRYPOINT"]) == ["penstock"]
    assert "CMD" not in found
    assert "HEALTHCHECK" not in found
    assert not any(word in ("ARG", "COPY", "ADD") for word, _ in final), "the last stage takes nothing but wheels"
    assert not any("[local]" in rest or "PENSTOCK_" in rest for _, rest in final)


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    ignore = [
        line
        for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    assert ignore[0] == "*", "the list names what goes in, so that nothing else can"
    admitted = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copied: set[str] = set()
    for word, rest in instructions():
        if word == "COPY" and "--from" not in rest:
            *sources, _ = rest.split()
            copied.update(source.removeprefix("./") for source in sources)
    assert copied == admitted
    for source in copied:
        assert (ROOT / source).exists(), source


def test_image_gets_everything_that_the_wheel_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        project["project"]["readme"],
        *project["project"]["license-files"],
        "pyproject.toml",
        *wheel["packages"],
        *wheel["force-include"],
    }
    copied = {source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]}
    for path in needed:
        assert path in copied or PurePosixPath(path).parts[0] in copied, path
