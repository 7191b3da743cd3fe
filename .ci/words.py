"""Which texts use a phrase that this project writes in another way? `make check` asks this of the files in CHECKED.

Read are prose in Markdown (no code blocks, no inline code), text and labels in HTML templates, comments and string
literals in Python, and comments and descriptions in YAML, JSON and SQL. A phrase may run over the end of a line.

CHECKED grows directory by directory: `python .ci/words.py --all` counts what is left in each file of the repository,
`python .ci/words.py PATH ...` lists it for these files. Reword a file, then add it or a glob that covers it.
The nouns to write with stand in docs/glossary.md.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
READ = ("*.md", "*.html", "*.py", "*.yml", "*.yaml", "*.json", "*.sql", "Makefile")
FOLDERS = (".", "docs", "services", "examples", "terraform", "benchmarks", "migrations", "tests", "clients", ".ci")
LISTS_THE_PHRASES = (".ci/words.py", "tests/unit/test_words.py")
MEASURED = "benchmarks/results/"

# Globs of paths in which no phrase below may stand; `*` also matches a slash.
CHECKED = (
    ".ci/audit.py",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "benchmarks/[!d]*.py",
    "clients/*.md",
    "docker-compose.yml",
    "docs/architecture.md",
    "docs/autoscaling.md",
    "docs/batches.md",
    "docs/bulk.md",
    "docs/cli.md",
    "docs/comparison.md",
    "docs/configuration.md",
    "docs/dashboard.md",
    "docs/decisions/*.md",
    "docs/deliveries.md",
    "docs/features.md",
    "docs/generated.py",
    "docs/glossary.md",
    "docs/limits.md",
    "docs/methods.md",
    "docs/moving-from-*.md",
    "docs/operations.md",
    "docs/operations/*",
    "docs/payloads.md",
    "docs/performance.md",
    "docs/protocol.md",
    "docs/results.md",
    "docs/schedules.md",
    "docs/site/*",
    "docs/states.md",
    "docs/steps.md",
    "docs/tasks.md",
    "docs/tenants.md",
    "docs/threat-model.md",
    "docs/tracing.md",
    "docs/transactions.md",
    "docs/transports.md",
    "docs/tutorial.md",
    "docs/upgrading.md",
    "docs/waiting.md",
    "docs/workflows.md",
    "examples/*.md",
    "examples/*.py",
    "examples/*.y*ml",
    "services/penstock/api/*.py",
    "services/penstock/api/dashboard/*.html",
    "services/penstock/brokers/*.py",
    "services/penstock/cli/*.py",
    "services/penstock/client/*.py",
    "services/penstock/compat/*.py",
    "services/penstock/compat/*.sql",
    "services/penstock/db/*.py",
    "services/penstock/db/*.sql",
    "services/penstock/limits/*.sql",
    "services/penstock/limits/[st]*.py",
    "services/penstock/local/*.py",
    "services/penstock/methods/*.py",
    "services/penstock/payloads/*.py",
    "services/penstock/protocol/*.py",
    "services/penstock/resulter.py",
    "services/penstock/results/*.py",
    "services/penstock/results/*.sql",
    "services/penstock/runtime/*.py",
    "services/penstock/scheduler/*.py",
    "services/penstock/schedules/[cfrs]*",
    "services/penstock/settings/*.py",
    "services/penstock/submitter.py",
    "services/penstock/supervisor/*.py",
    "services/penstock/supervisor/*.sql",
    "services/penstock/tasks/*.py",
    "services/penstock/tasks/[bcrst]*.sql",
    "services/penstock/worker/*.py",
    "services/penstock/workflows/*.sql",
    "services/penstock/workflows/s*.py",
    "terraform/*.md",
    "tests/*.yml",
    "tests/[!i]*.py",
    "tests/integration/[!acp]*.py",
    "tests/integration/cli/*.py",
)

# A phrase as a regular expression, in which a space also matches a line break, and what to write instead.
PHRASES = {
    r"anew": "again",
    r"mend(?:s|ed|ing)?": "fix",
    r"deeds?": "action, button, audit entry",
    r"doom(?:s|ed)?": "schedule for deletion",
    r"who(?:m)?ever": "the caller, anyone who, or the name of the process",
    r"nobody": "no one, or name the process",
    r"somebody": "someone, or name the process",
    r"anybody": "anyone, or name the process",
    r"at the (?:most|least)": "at most, at least",
    r"in place of": "instead of",
    r"by (?:itself|themselves)": "automatically, alone",
    r"for good": "permanently",
    r"let(?:s|ting)? go": "release",
    r"call(?:s|ed|ing)? off|called-off": "cancel",
    r"(?:arm(?:s|ed|ing)|disarm(?:s|ed|ing)?)": "delayed record, put, cancel",
    r"patience": "timeout",
    r"reckon(?:s|ed|ing)?": "calculate",
    r"newcomers?": "the new task",
    r"(?:is|are|was|were|be|been|being) away": "unavailable",
    r"(?:tell|tells|telling|told)": "say, show, report, distinguish; is told: receives",
    r"doors?": "entry point, source",
    r"doorkeepers?": "authenticator",
    r"what (?:has )?(?:becomes?|became|comes?|came) of": "the outcome, what happens to",
    r"signs? of life": "heartbeats",
    r"(?:fall|falls|fell|fallen|falling) silent": "stopped heartbeating",
    r"company": "batch",
    r"guilty": "failing",
    r"dear(?:er|est)?": "expensive",
    r"beforehand": "first, in advance",
    r"(?:that|which) there (?:is|are|was|were) (?:not|none)": "unknown, missing",
    r"as (?:it is|they are)(?=[.,;:)]| and )": "unchanged, live",
    r"to be had": "available",
    r"nudg(?:e|es|ed|ing)": "wake-up",
    r"parcels?": "packed message",
    r"astray": "misaligned, of a deleted route",
    r"(?:ever more )?seldom": "rarely, with growing pauses",
    r"those that are due": "due tasks",
    r"what waits": "the backlog, waiting tasks",
}

_PHRASES = [
    (re.compile(rf"(?<![\w.$-])(?:{phrase})(?![\w=-])".replace(" ", r"\s+"), re.IGNORECASE), instead)
    for phrase, instead in PHRASES.items()
]
_INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_FENCED = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*\n.*?(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_LINK_TARGET = re.compile(r"(?<=\])\([^()\s]*\)|https?://\S+|<!--.*?-->", re.DOTALL)
_JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)
_JINJA_STRING = re.compile(r"\"[^\"]*\"|'[^']*'")
_TAG = re.compile(r"<(?:[^<>\"]|\"[^\"]*\")*>")
_SHOWN_ATTRIBUTE = re.compile(r"\b(?:title|placeholder|alt|aria-label|data-confirm)=\"([^\"]*)\"")
_EXPRESSION = re.compile(r"^( *)(?:- )?\"?expr\"?: *(?:[|>][-+]?[^\n]*\n(?:\1 +[^\n]*\n|\n)*|[^\n]*)", re.MULTILINE)
_UNRELEASED = re.compile(r"^## \[Unreleased\].*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)


class Text(NamedTuple):
    """A passage to read, and the line on which it begins."""

    line: int
    text: str


class Finding(NamedTuple):
    path: str
    line: int
    phrase: str
    instead: str

    def __str__(self) -> str:
        return f'{self.path}:{self.line}: "{self.phrase}": write "{self.instead}"'


def _blank(found: re.Match[str]) -> str:
    # A mark stands where code was, so that words around it are not read as one phrase.
    return "|" + re.sub(r"[^\n]", " ", found[0])[1:] if found[0] else ""


def _markdown(text: str) -> Iterator[Text]:
    for pattern in (_FENCED, _INLINE_CODE, _LINK_TARGET):
        text = pattern.sub(_blank, text)
    yield Text(1, text)


def _template(text: str) -> Iterator[Text]:
    for code in _JINJA.finditer(text):
        for shown in _JINJA_STRING.finditer(code[0]):
            if " " in shown[0]:  # a text without a space is a name
                yield Text(text.count("\n", 0, code.start() + shown.start()) + 1, shown[0])
    text = _JINJA.sub(_blank, text)
    for tag in _TAG.finditer(text):
        for shown in _SHOWN_ATTRIBUTE.finditer(tag[0]):
            yield Text(text.count("\n", 0, tag.start() + shown.start()) + 1, shown[1])
    yield Text(1, _TAG.sub(_blank, text))


def _python(text: str) -> Iterator[Text]:
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != last + 1:
                yield Text(last + 1 - len(block), "\n".join(block))
                block = []
            block.append(_INLINE_CODE.sub(_blank, token.string.lstrip("#")))
            last = token.start[0]
    if block:
        yield Text(last + 1 - len(block), "\n".join(block))

    def literals(node: ast.AST) -> Iterator[Text]:
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else "|" for part in node.values)
            yield Text(node.lineno, "".join(parts))
            children = [part for part in children if not isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(node.lineno, node.value)
        for child in children:
            yield from literals(child)

    for line, literal in literals(ast.parse(text)):
        if re.search(r"\S\s+\S", literal):  # a text without a space is a name
            yield Text(line, _INLINE_CODE.sub(_blank, literal))


def _plain(text: str) -> Iterator[Text]:
    for pattern in (_EXPRESSION, _JINJA, _INLINE_CODE):
        text = pattern.sub(_blank, text)
    yield Text(1, text)


def texts(path: str, content: str) -> Iterator[Text]:
    """The passages of a file that people read."""
    match Path(path).suffix:
        case ".md" if Path(path).name == "CHANGELOG.md":
            released = _UNRELEASED.search(content)
            if released:
                before = content.count("\n", 0, released.start())
                yield from (Text(before + line, text) for line, text in _markdown(released[0]))
        case ".md":
            yield from _markdown(content)
        case ".html":
            yield from _template(content)
        case ".py":
            yield from _python(content)
        case _:
            yield from _plain(content)


def findings(path: str, content: str) -> list[Finding]:
    """What stands in a file that should be written in another way, by line."""
    found = {
        Finding(path, line + text.count("\n", 0, match.start()), " ".join(match[0].split()), instead)
        for line, text in texts(path, content)
        for pattern, instead in _PHRASES
        for match in pattern.finditer(text)
    }
    return sorted(found)


def files(root: Path = ROOT) -> Iterator[str]:
    """Every file that can be read, by its path in the repository."""
    for folder in FOLDERS:
        for pattern in READ:
            for path in (root / folder).glob(pattern) if folder == "." else (root / folder).rglob(pattern):
                relative = path.relative_to(root).as_posix()
                if path.is_file() and relative not in LISTS_THE_PHRASES and not relative.startswith(MEASURED):
                    yield relative


def main(arguments: list[str]) -> int:
    everything = sorted(files())
    if arguments == ["--all"]:
        counts = [(len(findings(path, (ROOT / path).read_text("utf-8"))), path) for path in everything]
        print(*(f"{count:5} {path}" for count, path in sorted(counts, reverse=True) if count), sep="\n")
        print(f"{sum(count for count, _ in counts):5} in {sum(count > 0 for count, _ in counts)} files")
        return 0
    unused = [] if arguments else [glob for glob in CHECKED if not any(fnmatchcase(path, glob) for path in everything)]
    for glob in unused:
        print(f".ci/words.py: CHECKED has {glob!r}, which matches no file: correct or remove it")
    wanted = arguments or [path for path in everything if any(fnmatchcase(path, glob) for glob in CHECKED)]
    found = [finding for path in wanted for finding in findings(path, (ROOT / path).read_text("utf-8"))]
    print(*found, sep="\n", end="\n" * bool(found))
    print(f"wording: {len(found)} phrases to change in {len(wanted)} files")
    return 1 if found or unused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
