"""Run `terraform` over the configurations of this repository, in copies, so that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = ("terraform", "examples/autoscaling", "examples/terraform-ecs", "examples/lambda")


def program() -> str | None:
    """Where terraform is, if it is installed."""
    return shutil.which("terraform")


def run(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = 600
) -> subprocess.CompletedProcess[str]:
    """One command of terraform there. env: None leaves everything to the environment, for mirrors and plugin caches."""
    environ = dict(os.environ) if env is None else {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
    return subprocess.run(
        [str(program()), *arguments, "-no-color"],
        cwd=folder, env=environ | {"CHECKPOINT_DISABLE": "1"} | dict(env or {}), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


@contextmanager
def copies() -> Iterator[Path]:
    """A folder with all configurations at their places; they name each other by relative paths."""
    with tempfile.TemporaryDirectory(prefix="penstock-tf-") as folder:
        for name in CONFIGURATIONS:
            shutil.copytree(
                ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*")
            )
        yield Path(folder)


def init(folder: Path, env: Mapping[str, str] | None, *, seconds: float = 600) -> subprocess.CompletedProcess[str]:
    return run(folder, "init", "-backend=false", "-input=false", env=env, seconds=seconds)
