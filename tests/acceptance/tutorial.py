"""docs/tutorial.md and the README as a test reads them: files to write, commands with their output, and the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def steps_of(page: str) -> list[Step]:
    """The blocks of a page that name a language, in order."""
    found = re.findall(r"^```(\w*)( [^\n]*)?\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [Step(kind, option.strip(), text) for kind, option, text in found if kind]


STEPS = steps_of("docs/tutorial.md")


def shows(page: str, output: str) -> bool:
    """Whether this is what the page shows: ``...`` is anything, alone on its line any lines; spaces do not count."""
    lines = [" ".join(line.split()) for line in page.strip().splitlines()]
    wanted = [
        r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r" ?\n" for line in lines
    ]
    found = "".join(" ".join(line.split()) + "\n" for line in output.strip().splitlines())
    return re.fullmatch("".join(wanted), found) is not None
