"""Write aws_schema.json: the part of the AWS provider's schema that the configurations here use.

    python -m tests.terraform.make_schema PACKAGE

PACKAGE is an unpacked `@cdktf/provider-aws` of npm, whose bindings are generated from the provider's own schema and
carry all of it but one thing: which optional attributes the provider fills in when they are left out. Those are named
below.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCHEMA = Path(__file__).with_name("aws_schema.json")
PLACES = (ROOT / "terraform", ROOT / "examples")
TYPES: dict[str, Any] = {
    "string": "string", "number": "number", "boolean": "bool", "stringList": ["list", "string"],
    "numberList": ["list", "number"], "stringMap": ["map", "string"], "anyMap": ["map", "string"],
}  # fmt: skip
GETTERS: dict[str, Any] = {
    "getStringAttribute": "string", "getNumberAttribute": "number", "getBooleanAttribute": "bool",
    "getListAttribute": ["list", "string"],
}  # fmt: skip
FILLED_IN = {"id", "region", "tags_all"}
# Lists of objects that the provider alone sets.
OBJECTS: dict[tuple[str, str], Any] = {
    ("aws_db_instance", "master_user_secret"): [
        "list", ["object", {"kms_key_id": "string", "secret_arn": "string", "secret_status": "string"}],
    ],
}  # fmt: skip
ATTRIBUTE = re.compile(
    r"(\w+): \{\s+value: (.*?),\s+isBlock: (true|false),\s+type: \"(\w+)\",\s+storageClassType: \"(\w+)\",\s+\}", re.S
)


def used() -> dict[str, set[str]]:
    """The kinds of resources and data sources that any configuration names."""
    found: dict[str, set[str]] = {"resource": set(), "data": set()}
    for place in PLACES:
        for path in place.rglob("*.tf"):
            for block, kind in re.findall(r'^(resource|data) "(aws_\w+)"', path.read_text("utf-8"), re.M):
                found[block].add(kind)
    return found


class Bindings:
    """One module of the package: a resource, a data source or the provider."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.js = "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.js")))
        self.types = "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.d.ts")))
        self.structs = {
            match[1]: match[2]
            for match in re.finditer(
                r"function (\w+)ToHclTerraform\(struct\) \{.*?const attrs = \{(.*?)\n    \};", self.js, re.S
            )
        }

    def schema(self) -> dict[str, Any]:
        top = re.search(r"synthesizeHclAttributes\(\) \{\s+const attrs = \{(.*?)\n        \};", self.js, re.S)
        config = re.search(r"export interface (\w+Config)\b", self.types)
        if top is None or config is None:
            raise SystemExit(f"{self.kind}: these bindings are of another form than expected")
        block = self.block(top[1], config[1])
        main = self.js[self.js.rindex("extends cdktf.Terraform") :]
        for name, body in re.findall(
            r"// (\w+) - computed: true, optional: false, required: false\s+get \w+\(\) \{\s+return (.*?);", main
        ):
            getter = re.match(r"this\.(\w+)\(", body)
            if getter is not None and getter[1] in GETTERS:
                block["attributes"][name] = [GETTERS[getter[1]], "computed"]
        for (kind, name), form in OBJECTS.items():
            if kind == self.kind:
                block["attributes"][name] = [form, "computed"]
        return block

    def block(self, body: str, interface: str) -> dict[str, Any]:
        declared = re.search(rf"export interface {interface}\b.*?\{{(.*?)\n\}}", self.types, re.S)
        required = set(re.findall(r"readonly (\w+):", declared[1])) if declared else set()
        attributes: dict[str, Any] = {}
        blocks: dict[str, Any] = {}
        for name, value, is_block, form, storage in ATTRIBUTE.findall(body):
            given = re.search(r"(?:struct\.|this\._)(\w+)", value)
            need = "required" if given and given[1] in required else "optional"
            inner = re.search(r"(\w+)ToHclTerraform", value.replace("cdktf.", "cdktf_"))
            if is_block == "true" and inner and inner[1] in self.structs:
                many = "listMapper" in value
                nesting = {"list": "list", "set": "set", "struct": "single"}[form]
                title = inner[1][0].upper() + inner[1][1:]
                blocks[name] = {
                    "nesting": nesting,
                    "min": int(need == "required" and nesting != "single"),
                    "max": 0 if many or nesting == "single" else 1,
                    **self.block(self.structs[inner[1]], title),
                }
                continue
            kind = TYPES.get(storage, "dynamic")
            if form == "set" and isinstance(kind, list):
                kind = ["set", kind[1]]
            attributes[name] = [kind, "filled_in" if need == "optional" and name in FILLED_IN else need]
        return {"attributes": attributes} | ({"blocks": blocks} if blocks else {})


def main(package: str) -> None:
    lib = Path(package) / "lib"
    about = json.loads((Path(package) / "package.json").read_text("utf-8"))["cdktf"]["provider"]
    kinds = used()
    written = {
        "provider": about,
        "config": Bindings(lib / "provider", "provider").schema(),
        "resources": {
            kind: Bindings(lib / kind.removeprefix("aws_").replace("_", "-"), kind).schema()
            for kind in sorted(kinds["resource"])
        },
        "data": {
            kind: Bindings(lib / ("data-" + kind.replace("_", "-")), kind).schema() for kind in sorted(kinds["data"])
        },
    }
    SCHEMA.write_text(json.dumps(written, separators=(",", ":"), sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
