"""Command lines as pages and alerts show them, led to the command that would run."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer.main

from penstock.cli.app import app


@cache
def command_tree() -> Any:
    """The whole command line."""
    root: Any = typer.main.get_command(app)
    for name in root.list_commands(None):
        root.get_command(None, name)  # which loads its module
    return root


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command, or the group, that the words behind `penstock` call, and those that are left for it.

    Raises AssertionError for a word that is no command.
    """
    command = command_tree()
    while hasattr(command, "commands"):
        if words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        elif words and not words[0].startswith("-"):
            raise AssertionError(f"there is no command {words[0]!r}")
        elif getattr(command, "default", None) in command.commands:
            command = command.commands[command.default]
        else:
            break
    return command, words


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
