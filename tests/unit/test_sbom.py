from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("sbom") / "new folder" / "penstock.cdx.json"
    subprocess.run([sys.executable, ROOT / ".ci" / "sbom.py", path], check=True, capture_output=True, timeout=120)
    return json.loads(path.read_text("utf-8"))


def names(requirements: list[str]) -> set[str]:
    found = [Requirement(text) for text in requirements]
    return {canonicalize_name(one.name) for one in found if one.marker is None or one.marker.evaluate()}


def test_the_bill_names_every_dependency_its_version_and_where_to_have_it(bill: dict[str, Any]) -> None:
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["version"] == PROJECT["version"]
    listed = {entry["name"]: entry for entry in bill["components"]}
    assert all(entry["purl"] == f"pkg:pypi/{name}@{entry['version']}" for name, entry in listed.items())
    # Those of others too: botocore comes by aiobotocore.
    assert names(PROJECT["dependencies"]) | {"botocore", "anyio"} <= listed.keys()
    assert all(listed[name]["scope"] == "required" for name in names(PROJECT["dependencies"]))


def test_what_only_an_extra_brings_is_optional_and_tools_of_development_are_not_in_the_bill(
    bill: dict[str, Any],
) -> None:
    scopes = {entry["name"]: entry["scope"] for entry in bill["components"]}
    optional = [
        text
        for extra, texts in PROJECT["optional-dependencies"].items()
        if extra not in ("dev", "docs")
        for text in texts
        if not text.startswith("penstock[")
    ]
    assert names(optional)
    assert {scopes[name] for name in names(optional)} == {"optional"}
    assert not {"pytest", "mypy", "ruff", "moto", "mkdocs", "hatchling"} & scopes.keys()


def test_the_bill_tells_what_needs_what(bill: dict[str, Any]) -> None:
    needs = {entry["ref"].partition("==")[0]: entry.get("dependsOn", []) for entry in bill["dependencies"]}
    assert names(PROJECT["dependencies"]) <= {ref.partition("==")[0] for ref in needs["penstock"]}
    assert "botocore" in {ref.partition("==")[0] for ref in needs["aiobotocore"]}
    assert "botocore" not in {ref.partition("==")[0] for ref in needs["penstock"]}
