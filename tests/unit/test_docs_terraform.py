"""Commands of the documentation for terraform: as they stand, by terraform itself where it is, with AWS stood in for.

Everywhere their outputs, variables and files are held against the configurations.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import botocore.session
import pytest

from penstock.settings.model import load_settings
from penstock.settings.values import PREFIX
from tests.docs_blocks import ROOT, Block, all_blocks
from tests.terraform.provider import ACCOUNT, REGION, schema_provider
from tests.terraform.runs import copies, program

needs_terraform = pytest.mark.skipif(program() is None, reason="terraform is not installed")


def block(page: str, info: str) -> Block:
    (found,) = (one for one in all_blocks() if (one.page, one.info) == (page, info))
    return found


def shell(text: str, folder: Path, env: Mapping[str, str]) -> None:
    """Done as by a user who reads the plan and agrees."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    done = subprocess.run(
        ["bash", "-euc", text], cwd=folder, env=environ | {"CHECKPOINT_DISABLE": "1"} | dict(env), input="yes\n",
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def commands(text: str) -> str:
    lines = text.splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return "\n".join(prompted or lines)


def settings_of(path: Path) -> dict[str, str]:
    """What an environment file sets, all of it settings that can be loaded."""
    found = dict(line.split("=", 1) for line in path.read_text("utf-8").splitlines())
    load_settings(**{name.removeprefix(PREFIX).lower(): value for name, value in found.items()})
    return found


def assert_queues_of(prefix: str, found: Mapping[str, str]) -> None:
    for role in ("inbound", "outbound", "results"):
        url = f"https://sqs.{REGION}.amazonaws.com/{ACCOUNT}/{prefix}-{role}"
        assert found[f"{PREFIX}{role.upper()}_QUEUE"] == url
    assert found[f"{PREFIX}AWS_REGION"] == REGION


@pytest.mark.parametrize(
    ("page", "info", "configuration"),
    [
        ("terraform/README.md", "console terraform", ROOT / "terraform"),
        ("examples/terraform-ecs/README.md", "sh terraform", ROOT / "examples" / "terraform-ecs"),
        ("examples/lambda/README.md", "sh terraform", ROOT / "examples" / "lambda"),
        ("docs/tutorial.md", "sh terraform", None),
    ],
)
def test_outputs_that_a_page_asks_for_are_there(page: str, info: str, configuration: Path | None) -> None:
    asked = set(re.findall(r"terraform output -raw (\w+)", block(page, info).text))
    assert asked
    sources = [block(page, "hcl").text] if configuration is None else [
        path.read_text("utf-8") for path in configuration.glob("*.tf")
    ]  # fmt: skip
    assert asked <= set(re.findall(r'^output "(\w+)"', "\n".join(sources), re.MULTILINE))


@needs_terraform
def test_the_module_as_it_is_gives_the_environment_of_the_processes() -> None:
    page = (ROOT / "terraform" / "README.md").read_text("utf-8")
    (told,) = re.findall(r"`(terraform init && [^`]+)`", page)
    with copies() as folder, schema_provider() as env:
        shell(f"{told}\n{commands(block('terraform/README.md', 'console terraform').text)}", folder / "terraform", env)
        assert_queues_of("penstock", settings_of(folder / "terraform" / "penstock.env"))


@needs_terraform
def test_the_configuration_of_the_tutorial_gives_the_environment_of_the_processes() -> None:
    with copies() as folder, schema_provider() as env:
        (folder / "main.tf").write_text(block("docs/tutorial.md", "hcl").text, "utf-8")
        shell(block("docs/tutorial.md", "sh terraform").text, folder, env)
        assert_queues_of("shop", settings_of(folder / "penstock.env"))
        state = json.loads((folder / "terraform.tfstate").read_text("utf-8"))
        alarms = [one for one in state["resources"] if one["type"] == "aws_cloudwatch_metric_alarm"]
        assert alarms, "the topic makes alarms"


@needs_terraform
def test_the_steps_of_the_ecs_example_end_in_a_run_of_the_migration() -> None:
    page = "examples/terraform-ecs/README.md"
    with copies() as folder, schema_provider() as env:
        here = folder / "examples" / "terraform-ecs"
        (here / "penstock.auto.tfvars").write_text(block(page, "hcl").text, "utf-8")
        (folder / "bin").mkdir()
        aws = folder / "bin" / "aws"
        aws.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" >{folder}/called\n")
        aws.chmod(0o755)
        shell(block(page, "sh terraform").text, here, {**env, "PATH": f"{folder}/bin:{os.environ['PATH']}"})
        secrets = {"TF_VAR_database_password": "0" * 48, "TF_VAR_reader_key": "pstk_" + "0" * 64}
        again = "terraform plan -detailed-exitcode && terraform apply -target aws_ecs_task_definition.migrate"
        assert f"`{again.partition('&& ')[2]}`" in (ROOT / page).read_text("utf-8")
        shell(again, here, {**env, **secrets})  # of what was applied nothing is to be changed
        service, operation, *options = (folder / "called").read_text("utf-8").rstrip("\0").split("\0")
        state = json.loads((here / "terraform.tfstate").read_text("utf-8"))
    assert "pstk_" not in json.dumps(state), "the state holds no key"
    assert (service, operation) == ("ecs", "run-task")
    given = dict(zip(options[::2], options[1::2], strict=True))
    shape = botocore.session.get_session().get_service_model("ecs").operation_model("RunTask").input_shape
    names = {"--" + re.sub(r"(?=[A-Z])", "-", name).lower(): name for name in shape.members}
    assert given.keys() <= names.keys()
    assert {names[option] for option in given} >= set(shape.required_members)
    assert given["--launch-type"] in shape.members["launchType"].enum
    made = {one["instances"][0]["attributes"]["family"] for one in state["resources"]
            if (one["type"], one["name"]) == ("aws_ecs_task_definition", "migrate")}  # fmt: skip
    assert {given["--task-definition"]} == made
    network = shape.members["networkConfiguration"].members["awsvpcConfiguration"]
    told = re.fullmatch(r"awsvpcConfiguration=\{(\w+)=\[[\w,-]+\],(\w+)=\[[\w-]+\]\}", given["--network-configuration"])
    assert told is not None
    assert set(told.groups()) <= network.members.keys()
