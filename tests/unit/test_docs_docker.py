"""Commands of the tutorial for docker: as they stand, by docker itself where it is, with its daemon stood in for.

Everywhere their processes, options and files are held against the commands, the settings and the blocks before.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.settings.model import Settings, load_settings
from penstock.settings.values import PREFIX
from tests.command_lines import find_command
from tests.docker_api import Daemon, serving
from tests.docs_blocks import ROOT, all_blocks
from tests.unit.test_compose import PROCESSES, instructions

BLOCKS = {block.info: block.text for block in all_blocks() if block.page == "docs/tutorial.md"}
BUILD, RUN = BLOCKS["sh image"], BLOCKS["sh docker"]
DATABASE_URL = "postgresql://penstock:secret@db.example.org/penstock"
ENVIRONMENT_FILE = (
    "PENSTOCK_AWS_REGION=eu-central-1\n"
    "PENSTOCK_INBOUND_QUEUE=https://sqs.eu-central-1.amazonaws.com/123456789012/shop-inbound\n"
)
needs_docker = pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")


def parsed(arguments: list[str]) -> str:
    """The process that these arguments of the image start; an option that it does not have is an error."""
    command, options = find_command(arguments)
    command.make_context(command.name, options)
    return arguments[0]


def test_every_process_is_started_from_the_image_that_is_built_with_what_was_written_before() -> None:
    image = f"penstock:{penstock.__version__}"
    assert shlex.split(BUILD) == ["docker", "build", "--tag", image, "."]
    lines = RUN.replace("\\\n", " ").splitlines()
    started = [shlex.split(line.partition(f" {image} ")[2]) for line in lines]
    assert sorted(map(parsed, started)) == sorted(PROCESSES)
    assert set(re.findall(r"--env-file (\S+)", RUN)) == set(re.findall(r"> (\S+)", BLOCKS["sh terraform"]))
    assert {name.removeprefix(PREFIX).lower() for name in re.findall(r"-e (\w+)", RUN)} <= Settings.model_fields.keys()
    assert set(re.findall(r"\$PWD/([\w.]+)", RUN)) == {"shop.py", "outbox"}
    assert "python shop.py" in BLOCKS
    assert "\n$ mkdir outbox\n" in "\n" + (ROOT / "docs" / "tutorial.md").read_text("utf-8")


@needs_docker
def test_docker_makes_the_image_and_the_containers_of_every_process(tmp_path: Path) -> None:
    daemon = Daemon()
    shop = tmp_path / "shop"
    (shop / "outbox").mkdir(parents=True)
    (shop / "shop.py").write_text(BLOCKS["python shop.py"])
    (shop / "penstock.env").write_text(ENVIRONMENT_FILE)
    # A socket's path must be short.
    with tempfile.TemporaryDirectory() as folder, serving(daemon, Path(folder) / "docker.sock") as host:
        env = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")} | {
            "DOCKER_HOST": host, "DOCKER_CONFIG": folder, "DOCKER_BUILDKIT": "0", "PENSTOCK_DATABASE_URL": DATABASE_URL,
        }  # fmt: skip
        for text, place in ((BUILD, ROOT), (RUN, shop)):
            done = subprocess.run(
                ["bash", "-euc", text], cwd=place, env=env, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
    (context,) = daemon.images.values()
    copied = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    assert copied
    assert {source.removeprefix("./") for source in copied} | {"Dockerfile"} <= set(context)
    assert not [name for name in context if name.startswith(("tests", "docs", ".git", ".venv"))]
    assert daemon.started == list(range(len(PROCESSES)))
    assert sorted(parsed(asked["Cmd"]) for asked in daemon.containers) == sorted(PROCESSES)
    for asked in daemon.containers:
        assert_started_as_told(asked, shop)


def assert_started_as_told(asked: dict[str, Any], shop: Path) -> None:
    process = asked["Cmd"][0]
    given = dict(variable.split("=", 1) for variable in asked["Env"])
    settings = load_settings(**{name.removeprefix(PREFIX).lower(): value for name, value in given.items()})
    assert settings.inbound_queue.endswith("/shop-inbound")
    assert (given.get("PENSTOCK_DATABASE_URL") == DATABASE_URL) == (process != "worker"), "workers need none"
    assert asked["HostConfig"]["Init"] is True
    if process == "api":
        assert (settings.http_host, settings.api_require_keys) == ("0.0.0.0", True)
        assert asked["HostConfig"]["PortBindings"] == {
            f"{settings.http_port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(settings.http_port)}]
        }
    if process == "worker":
        (folder,) = [rest for word, rest in instructions() if word == "WORKDIR" and rest == "/app"]
        assert set(asked["HostConfig"]["Binds"]) == {
            f"{shop}/shop.py:{folder}/shop.py:ro", f"{shop}/outbox:{folder}/outbox",
        }  # fmt: skip
        assert asked["User"] == str(os.getuid()), "who may write to the outbox"
