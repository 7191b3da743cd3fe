"""Write client/client.py from client/async_client.py: the same methods, blocking. `make clients` runs this.

With --check nothing is written, and the exit code is 1 if the file differs.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "services" / "penstock" / "client"
SOURCE = FOLDER / "async_client.py"
TARGET = FOLDER / "client.py"
HEADER = "# Generated from async_client.py by .ci/unasync.py: edit that file, then run `make clients`.\n"
DROPPED = {"async", "await"}
RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "aclose": "close", "asyncio": "time",
           "aiter_lines": "iter_lines", "aread": "read"}  # fmt: skip


def blocking(source: str) -> str:
    """Return the source without async and await; names that begin with Async lose it. Strings are copied unchanged."""
    lines = source.splitlines(keepends=True)
    text, row, column, skip_space = "", 1, 0, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        between = ""
        while row < token.start[0]:
            between, row, column = between + lines[row - 1][column:], row + 1, 0
        if row <= len(lines):
            between += lines[row - 1][column : token.start[1]]
        text += "" if skip_space else between
        word, is_name = token.string, token.type == tokenize.NAME
        skip_space = is_name and word in DROPPED
        text += "" if skip_space else RENAMED.get(word, word.removeprefix("Async")) if is_name else word
        row, column = token.end
    return text


def formatted(text: str) -> str:
    """Sort the imports and format, as `make format` does."""
    for command in (("check", "--fix-only", "--select", "I,F401", "-q"), ("format", "-q")):
        run = (sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-")
        text = subprocess.run(run, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    made = formatted(HEADER + blocking(SOURCE.read_text("utf-8")))
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made, "utf-8")
    elif made != TARGET.read_text("utf-8"):
        print("client/client.py is not what .ci/unasync.py writes: run `make clients`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
