"""The pages of the documentation: those outside docs/, the navigation, and llms.txt.

llms.txt (https://llmstxt.org) lists the pages with a sentence of each, for models that read the documentation. `make
reference` writes that of the repository, whose links lead to its files. The build of the site writes one whose links
lead to the Markdown of its pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "clients/go/README.md": "client-go.md",
    "clients/node/README.md": "client-node.md",
    "examples/export/README.md": "example-export.md",
    "examples/helm/README.md": "example-helm.md",
    "examples/orders/README.md": "example-orders.md",
    "examples/kubernetes/README.md": "example-kubernetes.md",
    "examples/lambda/README.md": "example-lambda.md",
    "examples/terraform-ecs/README.md": "example-terraform-ecs.md",
    "terraform/README.md": "terraform.md",
}
_ORIGIN = {page: origin for origin, page in OUTSIDE.items()}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^()\s]+\)")
_NO_TEXT = ("#", "```", "|", "!", "- ", "<", ">")
_SENTENCE = re.compile(r".*?\.(?=\s|$)")


def origin_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    return _ORIGIN.get(page, f"docs/{page}")


def navigation(entries: list[Any]) -> list[Any]:
    """The entries of a navigation whose pages are there, patterns replaced by what they match."""
    kept: list[Any] = []
    for entry in entries:
        title, content = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(content, list):
            if below := navigation(content):
                kept.append({title: below})
        elif "*" in content:
            kept += sorted(path.relative_to(DOCS).as_posix() for path in DOCS.glob(content))
        elif content in _ORIGIN or (DOCS / content).is_file():
            kept.append(entry)
    return kept


def llms_txt(entries: list[Any], place: Callable[[str], str]) -> str:
    """The file for a navigation. place: the link to a page of the site."""
    sections: dict[str, list[str]] = {}
    for section, title, page in _listed(entries):
        note = _first_sentence((ROOT / origin_of(page)).read_text("utf-8"))
        sections.setdefault(section, []).append(f"- [{title}]({place(page)}): {note}")
    sections["Reference"].append(f"- [OpenRPC document]({place('openrpc.json')}): Every method with its JSON Schemas.")
    about = _first_paragraph((ROOT / "README.md").read_text("utf-8"))
    parts = [f"## {section}\n\n" + "\n".join(lines) for section, lines in sections.items()]
    return "\n\n".join(["# Penstock", f"> {about}", *parts]) + "\n"


def _listed(entries: list[Any]) -> Iterator[tuple[str, str, str]]:
    """Section, title and page; of a list that is nested deeper, its first page."""
    for entry in entries:
        ((section, content),) = entry.items()
        if isinstance(content, str):
            yield "Start", section, content
            continue
        for below in content:
            ((title, page),) = below.items()
            yield section, title, page if isinstance(page, str) else page[0]


def _first_paragraph(text: str) -> str:
    """Of a page, in one line without links and emphasis."""
    found = next(part for part in text.split("\n\n") if part.strip() and not part.lstrip().startswith(_NO_TEXT))
    return " ".join(_LINK.sub(r"\1", found).replace("**", "").split())


def _first_sentence(text: str) -> str:
    paragraph = _first_paragraph(text)
    found = _SENTENCE.match(paragraph)
    return found[0] if found else paragraph


if __name__ == "__main__":
    nav = yaml.load((DOCS / "site" / "mkdocs.yml").read_text("utf-8"), yaml.SafeLoader)["nav"]
    (ROOT / "llms.txt").write_text(llms_txt(navigation(nav), origin_of), "utf-8")
    print(f"{ROOT / 'llms.txt'} is written", file=sys.stderr)
