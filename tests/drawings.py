"""Flowcharts of the documentation, as a test reads them: who leads to whom, and what is written beside the arrow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NODE = r"(\w+)(?:\(\[(.*?)\]\)|\[\[(.*?)\]\]|\[\((.*?)\)\]|\[/(.*?)/\])?"
_ARROW = re.compile(rf"    {_NODE} -->(?:\|(.*?)\|)? {_NODE}")


@dataclass(frozen=True)
class Flowchart:
    """arrows: from, label, to. titles: what stands in the nodes that have more than their name."""

    arrows: Sequence[tuple[str, str, str]]
    titles: Mapping[str, str]

    @property
    def nodes(self) -> set[str]:
        return {end for start, _, stop in self.arrows for end in (start, stop)}


def read_flowchart(text: str) -> Flowchart:
    """Of the part of Mermaid's language that is used here: an arrow a line. Raises ValueError for any other line."""
    first, *lines = text.splitlines()
    if not re.fullmatch(r"flowchart (LR|TB)", first):
        raise ValueError(f"no flowchart begins by {first!r}")
    arrows, titles = [], {}
    for line in lines:
        match = _ARROW.fullmatch(line)
        if match is None:
            raise ValueError(f"no arrow: {line!r}")
        start, *start_titles, label, stop = match.groups()[:7]
        for name, found in ((start, start_titles), (stop, match.groups()[7:])):
            titles.update((name, title) for title in found if title)
        arrows.append((start, label or "", stop))
    return Flowchart(arrows, titles)
