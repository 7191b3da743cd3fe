"""Write client/records.py, the answers of the api as the clients return them.

They are the structs of the api that the clients name, and what these consist of.
`make clients` runs this; with --check nothing is written, and the exit code is 1 if the file differs.
"""

from __future__ import annotations

import enum
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.methods.table import METHODS

TARGET = Path(__file__).resolve().parents[1] / "services" / "penstock" / "client" / "records.py"
USED = re.compile(r"\brecords\.(\w+)")
HEADER = '''# Generated from the api's structs by .ci/records.py: run `make clients`.
"""The answers of the api: dicts whose members are attributes too."""

from typing import Any, Literal

from penstock.client.record import Record

'''


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type consists of, each after those that it contains or inherits from."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for part in (*kind.__bases__, *typing.get_type_hints(kind).values()):
            yield from structs_in(part)
        if kind is not msgspec.Struct:
            yield kind
    for part in typing.get_args(kind):
        yield from structs_in(part)


def written(kind: Any, enums: dict[str, type[enum.Enum]]) -> str:
    """A type as source."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return written(parts[0], enums)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(written(part, enums) for part in parts))
    if origin is typing.Literal:
        for name, known in enums.items():
            if {one.value for one in known} < {*parts}:  # such as the states of tasks, and what else a run may come to
                more = [part for part in parts if part not in [*known]]
                return f"{name} | Literal[{', '.join(map(repr, more))}]"
        return f"Literal[{', '.join(map(repr, parts))}]"
    if origin is not None:
        name = "dict" if issubclass(origin, Mapping) else origin.__name__
        return f"{name}[{', '.join(written(part, enums) for part in parts)}]"
    if kind in (Any, msgspec.Raw):
        return "Any"
    if kind is type(None):
        return "None"
    if issubclass(kind, enum.Enum):
        enums[kind.__name__] = kind
    return str(kind.__name__)


def class_of(struct: type[msgspec.Struct], enums: dict[str, type[enum.Enum]]) -> str:
    (base,) = struct.__bases__
    inherited = set() if base is msgspec.Struct else set(base.__struct_fields__)
    lines = [f"class {struct.__name__}({'Record' if base is msgspec.Struct else base.__name__}):"]
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in inherited or hasattr(dict, field.name):  # such as "keys", which is read as a key
            continue
        default = [] if field.default is msgspec.NODEFAULT else [f" = {field.default!r}"]
        default = default or ([] if field.default_factory is msgspec.NODEFAULT else [" = []  # noqa: RUF012"])
        lines.append("".join((f"    {field.name}: {written(hints[field.name], enums)}", *default)))
    return "\n".join([*lines, *(["    pass"] if len(lines) == 1 else [])])


def source() -> str:
    sources = "".join(path.read_text("utf-8") for path in TARGET.parent.glob("*.py") if path != TARGET)
    used = set(USED.findall(sources))
    found: dict[str, type[msgspec.Struct]] = {}
    for method in METHODS.values():
        for struct in structs_in(method.result):
            if struct.__name__ in used:
                for part in structs_in(struct):
                    assert found.setdefault(part.__name__, part) is part, f"two structs are named {part.__name__}"
    enums: dict[str, type[enum.Enum]] = {}
    classes = [class_of(struct, enums) for struct in found.values()]
    aliases = [f"{name} = Literal[{', '.join(repr(one.value) for one in kind)}]" for name, kind in enums.items()]
    return HEADER + "\n".join(aliases) + "\n\n\n" + "\n\n\n".join(classes) + "\n"


def main() -> int:
    command = (sys.executable, "-m", "ruff", "format", "-q", "--stdin-filename", str(TARGET), "-")
    made = subprocess.run(command, input=source(), capture_output=True, text=True, check=True).stdout
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made, "utf-8")
    elif made != TARGET.read_text("utf-8"):
        print("client/records.py is not what .ci/records.py writes: run `make clients`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
