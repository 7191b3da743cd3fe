"""Extensions of mkdocs for this site, whose pages are written to be read in the repository.

- Pages outside docs/, such as the README, join the site.
- Links work as in the repository. A link to a file without a page, such as a module, becomes plain text; a link to a
  missing file is a warning, which fails the build.
- A navigation entry with a star expands to the matching pages; an entry without a page is left out.
- A list may follow a line of text, and the first word after a fence is its language, as in CommonMark.
- Mermaid diagrams are rendered as SVG at build time, so that no browser loads a program of 3 MB for them.
- Nothing on a page may be loaded from another host.
- Beside each page stands its Markdown, and llms.txt in the root lists the pages for models that read them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import OUTSIDE, ROOT, llms_txt, navigation, origin_of
from pymdownx.slugs import slugify

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#|//", re.IGNORECASE)
_FENCE = re.compile(r"^(\s*)(`{3,})(.*)$")
_ITEM = re.compile(r"([-*+]|1\.) ")
_NO_TEXT = re.compile(r"\s*$|\s|#|\||>|([-*+]|\d+\.) ")
_FOREIGN = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")

_markdown: dict[str, str] = {}  # of the pages, as the site shows them

log = logging.getLogger("mkdocs.hooks.penstock")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # the anchors that GitHub makes
    config.nav = navigation(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for origin, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / origin).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    origin = PurePosixPath(origin_of(uri))
    parts: list[str] = []
    prose: list[str] = []
    fence = ""
    diagram: list[str] | None = None
    for line in markdown.split("\n"):
        found = _FENCE.match(line)
        if diagram is not None:
            if found:
                parts.append(f"![Diagram]({_drawn(diagram, uri, config, files)})")
                diagram = None
            else:
                diagram.append(line)
        elif fence:
            parts.append(line)
            if found and found[2].startswith(fence) and not found[3].strip():
                fence = ""
        elif found:
            parts += [_links("\n".join(prose), origin, uri)] if prose else []
            prose = []
            if found[3].strip() == "mermaid":
                diagram = []
                continue
            fence = found[2]
            parts.append(found[1] + fence + _language(found[3]))
        else:
            if _ITEM.match(line) and prose and not _NO_TEXT.match(prose[-1]):
                prose.append("")
            prose.append(line)
    parts += [_links("\n".join(prose), origin, uri)] if prose else []
    _markdown[uri] = "\n".join(parts)
    return _markdown[uri]


def _language(words: str) -> str:
    return words.strip().partition(" ")[0] or "text"


def _drawn(lines: list[str], uri: str, config: MkDocsConfig, files: Files) -> str:
    """Add a diagram to the site's files; returns its path as seen from the page."""
    from mmdr import render

    source = "\n".join(lines)
    path = f"diagrams/{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"
    if files.get_file_from_path(path) is None:
        svg = render(source).svg().replace('style="', 'style="background:#fff;', 1)  # readable in the dark theme too
        if not ElementTree.fromstring(svg).findall(".//{*}text"):
            raise PluginError(f"{uri}: the diagram that begins with {lines[:1]} cannot be drawn")
        files.append(File.generated(config, path, content=svg))
    return os.path.relpath(path, PurePosixPath(uri).parent).replace(os.sep, "/")


def _links(text: str, origin: PurePosixPath, uri: str) -> str:
    def lead(link: re.Match[str]) -> str:
        shown, target = link[1], link[2]
        if _ELSEWHERE.match(target):
            return link[0]
        path, mark, anchor = target.partition("#")
        place = os.path.normpath(origin.parent / path).replace(os.sep, "/")
        if (ROOT / place).is_dir() and (ROOT / place / "README.md").is_file():
            place += "/README.md"
        if not (ROOT / place).exists():
            log.warning("%s: the link to %s leads to no file of the repository", origin, target)
            return shown
        there = OUTSIDE.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if there is None or not (ROOT / place).is_file() or place.endswith(".py"):
            return shown
        return f"[{shown}]({os.path.relpath(there, PurePosixPath(uri).parent).replace(os.sep, '/')}{mark}{anchor})"

    return _LINK.sub(lead, text)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    if foreign := _FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from another host: {foreign[0][:200]}")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    site = Path(config.site_dir)
    for uri, markdown in _markdown.items():
        (site / uri).write_text(markdown, "utf-8")
    text = llms_txt(config.nav or [], lambda page: page)
    if missing := [target for target in re.findall(r"\]\(([^()]+)\)", text) if not (site / target).is_file()]:
        raise PluginError(f"llms.txt has links to what is not there: {', '.join(missing)}")
    (site / "llms.txt").write_text(text, "utf-8")
