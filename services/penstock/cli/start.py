"""The entry point of `penstock`: what needs no library is answered at once, and a missing one is named by its extra."""

import os
import sys
from io import StringIO, TextIOWrapper
from pathlib import Path

# What each command needs; the others need `cli`.
EXTRAS = {
    "local": ("up", "down", "ps", "env", "logs", "conformance"),
    "worker": ("worker", "create-queues"),
    "server": (
        "submitter", "scheduler", "resulter", "supervisor", "api", "run", "kafka-source", "clockwork-source", "migrate",
        "partition-tasks", "grants", "claim-key", "doctor", "keys", "credential",
    ),
}  # fmt: skip
HELP = Path(__file__).with_name("help.txt")  # `make reference` writes it: to load all commands takes most of a second


def main() -> None:
    """Run the command; see the epilog of --help for the exit codes."""
    sys.stdin = sys.stdin or StringIO()  # closed by the caller
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # what its encoding, such as Latin-1, does not have
    words = sys.argv[1:]
    if words == ["--version"]:
        from penstock.protocol.version import __version__

        _print(f"penstock {__version__}\n")
    elif words in (["--help"], ["-h"]):
        _print(HELP.read_text("utf-8"))
    else:
        try:
            from penstock.cli.app import main as run

            run()
        except ModuleNotFoundError as exc:
            if exc.name is None or exc.name.startswith("penstock"):
                raise
            command = next((word for word in words if not word.startswith("-")), "")
            extra = next((extra for extra, commands in EXTRAS.items() if command in commands), "cli")
            print(f"penstock {command} needs: pip install 'penstock[{extra}]' ({exc.name} is missing)", file=sys.stderr)
            sys.exit(2)


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # its reader has ended
        os._exit(1)
