"""examples/terraform-ecs against the settings, the commands, the image and the files that it uses."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from penstock.api.server import HttpServer
from penstock.cli.run import PROCESSES
from penstock.protocol.api_key import Permission, parse_entries
from penstock.runtime.health import DEFAULT_PORT
from penstock.settings.model import Settings
from penstock.settings.values import PREFIX
from penstock.tasks.params import LONGEST_WAIT_SECONDS
from tests.command_lines import command_tree

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "terraform-ecs"
TEXT = {path.name: path.read_text("utf-8") for path in EXAMPLE.glob("*.tf")}
ALL = "\n".join(TEXT.values())


def test_the_environment_is_made_of_settings() -> None:
    names = set(re.findall(rf"\b{PREFIX}([A-Z_]+)\b", ALL))
    assert {name.lower() for name in names} <= set(Settings.model_fields)
    assert {"DATABASE_URL", "API_REQUIRE_KEYS", "CONTROL_URL", "METRICS_HOST", "GRACE_SECONDS"} <= names


def test_values_of_the_environment_are_valid() -> None:
    given = dict(re.findall(rf'\b{PREFIX}([A-Z_]+)\s+= "([^"$]+)"', ALL))
    settings = Settings.model_validate({name.lower(): value for name, value in given.items()})
    assert settings.needs_keys
    assert (settings.http_host, settings.http_port) == ("0.0.0.0", 8080)
    assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", DEFAULT_PORT)
    for mode in re.findall(r'"(require|verify-full)"', TEXT["processes.tf"]):
        Settings(database_url="postgresql://u:p@h/d", database_ssl_mode=mode)  # type: ignore[arg-type]


def test_every_process_runs_its_command_with_options_that_it_has() -> None:
    command: Any = command_tree()
    sizes = TEXT["processes.tf"].split("for process, size in {", 1)[1].split("} : process", 1)[0]
    processes = set(re.findall(r"^\s+(\w+)\s+= \{ cpu", sizes, re.M)) | {"worker"}
    assert processes == {*PROCESSES, "worker"}
    assert processes | {"migrate"} <= command.commands.keys()
    assert "command  = [process]" in TEXT["processes.tf"]
    assert 'command     = ["migrate", "--grant", "penstock_app"]' in TEXT["processes.tf"]
    options = {
        option for name in ("worker", "migrate") for param in command.commands[name].params for option in param.opts
    }
    assert set(re.findall(r'"(--[a-z-]+)"', TEXT["processes.tf"])) <= options
    routes = {option for param in command.commands["routes"].commands["set"].params for option in param.opts}
    assert set(re.findall(r"--\w+", TEXT["outputs.tf"].split("penstock routes set")[1])) <= routes


def test_the_health_check_asks_what_the_health_port_answers() -> None:
    (code,) = re.findall(r'"python", "-c", "([^"]+)"', TEXT["processes.tf"])
    compile(code, "health check", "exec")
    assert f"http://127.0.0.1:{DEFAULT_PORT}/healthz" in code
    assert re.search(rf'health_check \{{\s+port\s+= "{DEFAULT_PORT}"\s+path\s+= "/readyz"', TEXT["balancer.tf"])


def test_the_key_of_workers_may_ask_for_cancelled_tasks_and_no_more() -> None:
    (form,) = re.findall(r'secret_string_wo\s+= "(\w+:\w+:)\$\{sha256\(var\.reader_key\)\}"', TEXT["database.tf"])
    (key,) = parse_entries([form + hashlib.sha256(b"pstk_key").hexdigest()])
    assert key.permissions == {Permission.WORKER}
    assert key.digest == hashlib.sha256(b"pstk_key").digest()


def test_the_agent_is_given_the_files_of_the_autoscaling_example() -> None:
    replaced = re.findall(r'file\("\$\{path\.module\}/(\S+)"\),\s+"([^"]+)"', TEXT["autoscaling.tf"])
    assert len(replaced) == 2
    for path, old in replaced:
        assert old in (EXAMPLE / path).read_text("utf-8"), f"{path} has no {old} to be replaced"


def test_the_page_speaks_of_variables_outputs_and_files_that_exist() -> None:
    page = (EXAMPLE / "README.md").read_text("utf-8")
    variables = set(re.findall(r'^variable "(\w+)"', ALL, re.M))
    assert set(re.findall(r"\bTF_VAR_(\w+)=", page)) <= variables
    example = page.split("```hcl\n", 1)[1].split("```", 1)[0]
    assert set(re.findall(r"^(\w+)\s+=", example, re.M)) <= variables
    required = {name for name, body in re.findall(r'^variable "(\w+)" \{\n(.*?)^\}', ALL, re.M | re.S)
                if "default" not in re.findall(r"^  (\w+)", body, re.M)}  # fmt: skip
    assert required == set(re.findall(r"^(\w+)\s+=", example, re.M)) | set(re.findall(r"\bTF_VAR_(\w+)=", page))
    assert set(re.findall(r"terraform output (?:-raw )?(\w+)", page)) <= set(re.findall(r'^output "(\w+)"', ALL, re.M))
    for link in re.findall(r"\]\(([^)#]+)", page):
        assert (EXAMPLE / link).exists(), link


def test_the_api_keeps_idle_connections_for_longer_than_the_load_balancer() -> None:
    (seconds,) = map(int, re.findall(r"idle_timeout = (\d+)", TEXT["balancer.tf"]))
    server = HttpServer(None, Settings(), 0)
    assert LONGEST_WAIT_SECONDS < seconds < server._server.config.timeout_keep_alive
