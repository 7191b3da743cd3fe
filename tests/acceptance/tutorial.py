"""docs/tutorial.md as a test reads it: the file that it makes, its commands with what they print, and all the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text("utf-8")


@dataclass(frozen=True)
class Step:
    """kind: ``console``, ``python`` or another language. option: what stands beside it. text: the block."""

    kind: str
    option: str
    text: str

    def commands(self) -> Iterator[tuple[str, str]]:
        """Of a console: each command with what the page shows of its output."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


STEPS = [
    Step(kind, option.strip(), text)
    for kind, option, text in re.findall(r"^```(\w+)( [^\n]*)?\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
]


def shows(page: str, output: str) -> bool:
    """Whether this is what the page shows: ``...`` is anything, alone on its line any lines; spaces do not count."""
    lines = [" ".join(line.split()) for line in page.strip().splitlines()]
    wanted = [
        r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r" ?\n" for line in lines
    ]
    found = "".join(" ".join(line.split()) + "\n" for line in output.strip().splitlines())
    return re.fullmatch("".join(wanted), found) is not None
