"""`make terraform`: all checks of the configurations that can be made here, and which could not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.terraform.provider import SCHEMA, schema_provider
from tests.terraform.runs import CONFIGURATIONS, ROOT, copies, init, program, run


def main() -> int:
    if program() is None:
        print("terraform is not installed: the files are parsed and held against the settings and the code instead")
        code = subprocess.call([sys.executable, "-m", "pytest", "-q", "tests/unit/test_terraform.py"], cwd=ROOT)
        print("left out: terraform fmt, validate and test")
        return code
    bad = 0
    for name in CONFIGURATIONS:
        bad += tell(f"fmt      {name}", run(ROOT / name, "fmt", "-check", "-diff", "-recursive"))
    with copies() as folder, ExitStack() as stack:
        env: Mapping[str, str] | None = None
        about = "AWS' own provider, from the registry or a mirror"
        if not has_provider(folder / CONFIGURATIONS[0]):
            env = stack.enter_context(schema_provider())
            about = f"the schema of AWS' provider ({SCHEMA.relative_to(ROOT)})"
        for name in CONFIGURATIONS:
            bad += check(folder, name, env)
    print(f"checked against {about}")
    if env is not None:
        print("left out: what AWS' own provider checks beyond its schema, for no registry of providers can be reached")
    print("left out: plan and apply against an account")
    return int(bool(bad))


def has_provider(folder: Path) -> bool:
    """Whether AWS' own provider can be had, from where this machine is configured to take it."""
    try:
        return init(folder, None, seconds=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def check(folder: Path, name: str, env: Mapping[str, str] | None) -> int:
    """Returns how many steps failed."""
    ready = init(folder / name, env)
    if ready.returncode:
        return tell(f"init     {name}", ready)
    bad = tell(f"validate {name}", run(folder / name, "validate", env=env))
    if (folder / name / "tests").is_dir():
        done = run(folder / name, "test", env=env)
        bad += tell(f"test     {name}", done)
    return bad


def tell(what: str, done: subprocess.CompletedProcess[str]) -> int:
    print(f"{'ok' if done.returncode == 0 else 'FAILED':6} {what}")
    if done.returncode:
        print(done.stdout + done.stderr)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
