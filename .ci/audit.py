"""Dependencies: do they fit together, and are any of those that ship known to be vulnerable?

The first question is answered offline. The second is put to the advisory database of the Python Packaging Authority by
pip-audit, for a few seconds; where it cannot be reached, that is printed, and fails only with --required.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 8
DEVELOPMENT = ("dev", "docs")  # extras whose packages do not ship


_NOT_LOOKED = "vulnerabilities: not looked for, "


class Shipped(NamedTuple):
    """An installed package: its version, and the names of those that it was found to need."""

    version: str
    needs: set[str]


def resolve(wanted: Iterable[str]) -> dict[str, Shipped]:
    """All that these requirements bring along, by name; what is not installed here is left out."""
    todo = [("", Requirement(text)) for text in wanted]
    found: dict[str, Shipped] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        by, wanted_here = todo.pop()
        name, extras = canonicalize_name(wanted_here.name), frozenset(wanted_here.extras)
        if wanted_here.marker is not None and not wanted_here.marker.evaluate({"extra": ""}):
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        found.setdefault(name, Shipped(package.version, set()))
        if by:
            found[by].needs.add(name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in package.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                needed.marker = None
                todo.append((name, needed))
    return found


def direct(pyproject: dict[str, Any]) -> list[str]:
    """The requirements of the package and of its extras for users; of extras that name others, those others'."""
    project = pyproject["project"]
    optional = project["optional-dependencies"]
    extras = [text for extra, texts in optional.items() if extra not in DEVELOPMENT for text in texts]
    return [text for text in (*project["dependencies"], *extras) if Requirement(text).name != project["name"]]


def shipped(pyproject: dict[str, Any]) -> dict[str, str]:
    """Versions of everything that an installation brings along, by name."""
    return {name: package.version for name, package in resolve(direct(pyproject)).items()}


def verdict(report: dict[str, Any], *, required: bool = False) -> tuple[int, list[str]]:
    """Exit code and lines to print, of what pip-audit reports as JSON. required: to audit nothing is a failure."""
    audited = [entry for entry in report["dependencies"] if "vulns" in entry]
    if not audited:
        return int(required), [f"{_NOT_LOOKED}the advisory database knows none of the packages from here"]
    lines = [
        f"{entry['name']} {entry['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'none yet'}"
        for entry in audited
        for found in entry["vulns"]
    ]
    skipped = len(report["dependencies"]) - len(audited)
    lines.append(
        f"vulnerabilities: {len(lines)} in {len(audited)} packages" + f" ({skipped} not known)" * bool(skipped)
    )
    return (1 if len(lines) > 1 else 0), lines


def ask(versions: dict[str, str], *, required: bool = False) -> tuple[int, list[str]]:
    """Have pip-audit ask, for up to SECONDS."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        pins.write_text("".join(f"{name}=={version}\n" for name, version in sorted(versions.items())), "ascii")
        command = [
            sys.executable, "-m", "pip_audit", "--requirement", str(pins), "--no-deps", "--disable-pip",
            "--format", "json", "--progress-spinner", "off", "--timeout", "3",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            report = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return int(required), [f"{_NOT_LOOKED}no answer of the advisory database within {SECONDS} s"]
        except ValueError:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            return int(required), [f"{_NOT_LOOKED}the advisory database cannot be reached ({reason[:200]})"]
    return verdict(report, required=required)


def main() -> int:
    fits = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    print(f"dependencies: {fits.stdout.strip() or fits.stderr.strip()}")
    required = "--required" in sys.argv[1:]
    code, lines = ask(shipped(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))), required=required)
    print("\n".join(lines))
    return fits.returncode or code


if __name__ == "__main__":
    sys.exit(main())
