"""Writes the reference of docs/python-reference.md from signatures and docstrings: `make reference`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import griffe

import penstock
from docs.generated import write

PAGE = Path(__file__).with_name("python-reference.md")
_WIDTH = 110

# The public names by subject; a new one joins one of these, which a test checks.
SUBJECTS = {
    "Handlers": (
        "action", "Context", "Wait", "TaskCancelled", "Call", "Retry", "Fail", "Snooze", "Backoff", "lifespan",
        "inject", "around_attempt", "Batcher", "TaskLogFilter",
    ),
    "Durable steps": ("Step", "StepFailed", "StepChanged", "EventTimeout"),
    "On AWS Lambda": ("lambda_handler",),
    "Enqueueing": ("Action", "Bound", "Task", "EnqueueOptions", "connect"),
    "In a transaction": (
        "enqueue", "enqueue_sync", "enqueue_many", "enqueue_many_sync", "settle", "settle_sync",
    ),
    "Clients": ("AsyncClient", "Client", "InboundClient", "SyncInboundClient", "Workflow", "Unfinished"),
    "Settings": ("Settings", "load_settings", "__version__"),
    "Errors": (),  # all that are left
}  # fmt: skip
# What the fixtures of penstock.testing give, and what their attributes are.
TESTING = {
    "plugin": ("penstock_inline", "penstock_pipeline", "penstock_postgres"),
    "inline": ("Inline", "InlineTask"),
    "pipeline": ("Pipeline",),
    "clock": ("Clock",),
    "faults": ("Faults", "WorkerCrash"),
}
# Classes whose members are described at another one, and classes that attributes of one lead to.
_BLOCKING = {"Client": "AsyncClient", "SyncInboundClient": "InboundClient"}
_LED_TO = {
    "AsyncClient": ("client.methods.ScheduleMethods", "client.methods.WorkflowMethods"),
    "Workflow": ("client.workflows.Step",),
}
_WAY = re.compile(r"\[((?:Async)?(?:Answer|Nothing)|Way)\]")  # of a base: what the methods of a client return
_ELSEWHERE = {"Settings"}  # docs/configuration.md has the fields


def subjects() -> dict[str, list[str]]:
    named = {name for names in SUBJECTS.values() for name in names}
    rest = sorted(name for name in penstock.__all__ if name not in named)
    return {subject: [*names] or rest for subject, names in SUBJECTS.items()}


def reference() -> str:
    package = griffe.load("penstock", search_paths=[str(Path(__file__).parents[1] / "services")])
    assert isinstance(package, griffe.Module)
    homes = {name: home for home, names in penstock._HOMES.items() for name in names}
    parts: list[str] = []
    for subject, names in subjects().items():
        parts.append(f"## {subject}\n")
        for name in names:
            parts += _entry(name, package[f"{homes[name]}.{name}"], package)
    parts.append("## Testing\n")
    parts.append(
        "[Test your code](testing.md) has examples. The fixtures are there for every test; nothing is imported.\n"
    )
    for module, names in TESTING.items():
        for name in names:
            parts += _entry(name, package[f"testing.{module}.{name}"], package, of=f"penstock.testing.{module}")
    return "\n" + "\n".join(parts)


def _entry(
    name: str, of_name: griffe.Object | griffe.Alias, package: griffe.Module, of: str = "penstock"
) -> Iterator[str]:
    yield f"### {name}\n".replace("__", "\\_\\_")
    if of != "penstock":
        yield f"`{of}.{name}`\n"
    yield from _described(name, of_name)
    if name in _BLOCKING:
        other = _BLOCKING[name]
        yield f"Its methods are those of [{other}](#{other.lower()}), and block.\n"
    elif isinstance(of_name, griffe.Class) and name not in _ELSEWHERE:
        yield from _members(of_name)
    for path in _LED_TO.get(name, ()):
        led = package[path]
        yield f"#### {led.name}\n"
        yield from _described(led.name, led)
        yield from _members(led, _way_of(of_name))


def _described(name: str, one: griffe.Object | griffe.Alias, way: str = "") -> Iterator[str]:
    """Its signature, or signatures, and its docstring."""
    yield "```python\n" + "\n".join(_signatures(name, one, way)) + "\n```\n"
    if text := _text(one):
        yield f"{text}\n"


def _signatures(name: str, one: griffe.Object | griffe.Alias, way: str) -> list[str]:
    if isinstance(one, griffe.Function) and one.module.name == "plugin":
        return [f"{name}: {str(one.returns).removeprefix('Iterator[').rstrip(']')}"]  # a fixture
    if isinstance(one, griffe.Function):
        overloads = (
            one.parent.overloads.get(one.name, []) if isinstance(one.parent, griffe.Class | griffe.Module) else []
        )
        return [_signature(name, each, way) for each in one.overloads or overloads or [one]]
    if isinstance(one, griffe.Class):
        bases = ", ".join(_WAY.sub("", str(base)) for base in one.bases if str(base)[0] != "_")
        made = one.all_members.get("__init__")
        head = f"class {name}({bases})" if bases else f"class {name}"
        if fields := _fields(one):
            return [f"{head}:", *fields]
        if not isinstance(made, griffe.Function) or _is_an_exception(one):
            return [head]
        return [head, _signature(name, made).removesuffix(" -> None").removeprefix("def ")]
    if isinstance(one, griffe.Attribute) and one.annotation is not None:
        return [f"{name}: {one.annotation}"]
    return [name]


def _fields(one: griffe.Class) -> list[str]:
    """Of a TypedDict, those that it inherits first."""
    order = [*reversed(one.mro()), one]
    if not any(str(base) == "TypedDict" for each in order for base in each.bases):
        return []
    found = {
        field.name: f"    {field.name}: {field.annotation}" for each in order for field in each.attributes.values()
    }
    return [*found.values()]


def _is_an_exception(one: griffe.Class) -> bool:
    """Such a class is caught, not made."""
    return "Exception" in {str(base) for base in one.bases} or one.module.path == "penstock.protocol.errors"


def _signature(name: str, function: griffe.Function, way: str = "") -> str:
    """The parameters as they are written, one a line where they are long. way: what a client's calls return."""
    call = re.fullmatch(r"(?:Request|Exchange|Call)\[(.*)\]", str(function.returns))
    is_async = "async" in function.labels or (call and way.startswith("Async"))
    returns = ("None" if "Nothing" in way else call[1]) if call else function.returns
    start = "async def" if is_async else "def"
    parts = [*_parameters(function)]
    end = ")" if returns is None else f") -> {returns}"
    line = f"{start} {name}({', '.join(parts)}{end}"
    return line if len(line) <= _WIDTH else "\n".join([f"{start} {name}(", *(f"    {part}," for part in parts), end])


def _parameters(function: griffe.Function) -> Iterator[str]:
    kinds = griffe.ParameterKind
    given = [one for one in function.parameters if one.name not in ("self", "cls") and one.name[:1] != "_"]
    had_star = False
    for place, one in enumerate(given):
        if one.kind is kinds.keyword_only and not had_star:
            had_star = True
            yield "*"
        star = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(one.kind, "")
        had_star |= one.kind is kinds.var_positional
        text = f"{star}{one.name}" + ("" if one.annotation is None else f": {one.annotation}")
        if one.default is not None and not star:
            text += f" = {one.default}" if one.annotation is not None else f"={one.default}"
        yield text
        following = given[place + 1] if place + 1 < len(given) else None
        if one.kind is kinds.positional_only and (following is None or following.kind is not kinds.positional_only):
            yield "/"


def _way_of(of_class: griffe.Object | griffe.Alias) -> str:
    found = [_WAY.search(str(base)) for base in of_class.bases] if isinstance(of_class, griffe.Class) else []
    return next((one[1] for one in found if one), "")


def _members(of_class: griffe.Object | griffe.Alias, way: str = "") -> Iterator[str]:
    """Public methods, properties and annotated attributes, inherited ones of the package included."""
    assert isinstance(of_class, griffe.Class)
    way = way or _way_of(of_class)
    for name, one in of_class.all_members.items():
        if name.startswith("_") or not str(one.canonical_path).startswith("penstock."):
            continue
        target = one.final_target if isinstance(one, griffe.Alias) else one
        if isinstance(target, griffe.Function) or (isinstance(target, griffe.Attribute) and target.annotation):
            if isinstance(target, griffe.Attribute) and "property" not in target.labels and not target.docstring:
                continue  # a field: the class's docstring and its signature have it
            yield from _described(name, target, way)


def _text(one: griffe.Object | griffe.Alias) -> str:
    if one.docstring is None:
        return ""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", one.docstring.value.strip())
    outside = re.split(r"(``[^`]+``|`[^`]+`)", text)
    return "".join(part if part[:1] == "`" else part.replace("<", "&lt;").replace("*", "\\*") for part in outside)


if __name__ == "__main__":
    write(PAGE, reference)
