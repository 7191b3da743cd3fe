"""A software bill of materials, CycloneDX as JSON: Penstock and all that it and its extras for users bring along.

The versions are those of this environment. What only an extra brings is optional in it. `make sbom` writes it beside
what `make build` makes.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parent))
from audit import ROOT, direct, resolve


def licence(name: str) -> Any | None:
    """What a package says of its licence: an expression, else what its classifiers name; None where neither does."""
    about = metadata(name)
    classified = [
        text.rpartition(" :: ")[2] for text in about.get_all("Classifier", []) if text.startswith("License ::")
    ]
    said = about.get("License-Expression") or " or ".join(classified)
    return LicenseFactory().make_from_string(said) if said else None


def component(name: str, version: str, scope: ComponentScope) -> Component:
    said = licence(name)
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        scope=scope,
        bom_ref=f"{name}=={version}",
        purl=PackageURL("pypi", name=name, version=version),
        licenses=[said] if said else [],
    )


def make(pyproject: dict[str, Any]) -> Bom:
    """The bill of the project that this pyproject.toml describes."""
    project = pyproject["project"]
    required = resolve(project["dependencies"])
    wanted = direct(pyproject)
    everything = resolve(wanted)
    bom = Bom()
    bom.metadata.component = root = Component(
        name=project["name"],
        version=project["version"],
        type=ComponentType.APPLICATION,
        bom_ref=f"{project['name']}=={project['version']}",
        purl=PackageURL("pypi", name=project["name"], version=project["version"]),
        description=project["description"],
        licenses=[LicenseFactory().make_from_string(project["license"])],
    )
    components = {
        name: component(name, package.version, ComponentScope.REQUIRED if name in required else ComponentScope.OPTIONAL)
        for name, package in everything.items()
    }
    bom.components.update(components.values())
    for name, package in everything.items():
        bom.register_dependency(components[name], [components[other] for other in package.needs])
    names = {canonicalize_name(Requirement(text).name) for text in wanted}
    bom.register_dependency(root, [components[name] for name in names & components.keys()])
    return bom


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the file to write")
    path = parser.parse_args().path
    bom = make(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n", "utf-8")
    print(f"{path}: {len(bom.components)} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
