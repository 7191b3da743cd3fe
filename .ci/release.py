"""`python .ci/release.py 1.2.3`: the notes of a release, or why the repository is not ready for its tag.

All versions must be this one: of the package, the Node kit and the Helm chart. The changelog must have a section of it,
with a date.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def versions(root: Path = ROOT) -> dict[str, str]:
    """The version in each file that has one."""
    chart = (root / "examples/helm/penstock/Chart.yaml").read_text("utf-8")
    found = re.search(r'^version: (\S+)\nappVersion: "(\S+)"$', chart, re.MULTILINE)
    assert found is not None, "Chart.yaml has a version and an appVersion"
    return {
        "pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"],
        "clients/node/package.json": json.loads((root / "clients/node/package.json").read_text("utf-8"))["version"],
        "clients/node/package-lock.json": json.loads((root / "clients/node/package-lock.json").read_text("utf-8"))[
            "version"
        ],
        "examples/helm/penstock/Chart.yaml": found[1],
        "appVersion of examples/helm/penstock/Chart.yaml": found[2],
    }


def notes(changelog: str, version: str) -> str:
    """The section of a version. Raises ValueError without one, or without a date."""
    section = re.search(rf"^## \[{re.escape(version)}\](.*)\n([\s\S]*?)(?=^## \[|\Z)", changelog, re.MULTILINE)
    if section is None:
        raise ValueError(f"CHANGELOG.md has no section [{version}]: move what is under [Unreleased] there")
    if not re.fullmatch(r" - \d{4}-\d\d-\d\d", section[1]):
        raise ValueError(f"the section [{version}] of CHANGELOG.md has no date: ## [{version}] - 2026-01-31")
    if not section[2].strip():
        raise ValueError(f"the section [{version}] of CHANGELOG.md is empty")
    return section[2].strip() + "\n"


def main(version: str) -> int:
    wrong = [f"{path} has {found}" for path, found in versions().items() if found != version]
    if wrong:
        print(f"the tag says {version}, but {', '.join(wrong)}", file=sys.stderr)
        return 1
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version), end="")
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
