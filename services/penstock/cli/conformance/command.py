"""`penstock conformance`: a table of the rules that a worker program keeps, and of those that it does not."""

import asyncio
import contextlib
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.common import print_json, print_table

_STYLES = {"passed": "green", "failed": "red", "not supported": "yellow"}


def conformance(
    worker: Annotated[str, typer.Option(metavar="COMMAND")],
    require: Annotated[list[str] | None, typer.Option(metavar="FEATURE")] = None,
    timeout: Annotated[float, typer.Option(min=5)] = 40,
    logs: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcomes as JSON.")] = False,
) -> None:
    """Check a worker program in any language against the rules of docs/protocol.md, with an embedded SQS.

    Starts the command several times, each with queues of its own, kills it and stops it. Exits with 1 if it breaks a
    rule of the minimum, or of a feature of --require.

    worker: Starts a worker that has the actions of docs/protocol.md.
    require: An optional feature that must pass too, or `all`. Repeatable.
    timeout: Seconds for each answer that is awaited.
    logs: Keep the worker's output here; default: do not keep it.
    """
    from rich.text import Text

    from penstock.cli.conformance.checks import CHECKS, MINIMUM, examine

    features = {feature for feature, *_ in CHECKS}
    required = features if require and "all" in require else {MINIMUM, *(require or ())}
    if unknown := required - features:
        raise typer.BadParameter(f"{unknown.pop()} is no feature: use all, {', '.join(sorted(features - {MINIMUM}))}")
    words: list[str] = []
    with contextlib.suppress(ValueError):
        words = shlex.split(worker)
    if not words:
        raise typer.BadParameter(f"{worker!r} is no command: look at its quotes", param_hint="--worker")
    with tempfile.TemporaryDirectory(prefix="penstock-conformance-") as temporary:
        folder = logs.absolute() if logs else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = asyncio.run(examine(worker, folder, timeout))
    missed = [one for one in found if one.feature in required and one.outcome != "passed"]
    if as_json:
        print_json([one._asdict() for one in found])
    else:
        rows = [(*one[:2], Text(one.outcome, _STYLES[one.outcome]), one.detail) for one in found]
        print_table(("feature", "rule", "outcome", "detail"), rows)
        kept = sum(one.outcome == "passed" for one in found)
        typer.echo(f"{kept} of {len(found)} rules are kept, and all but {len(missed)} of those required.")
    if missed:
        raise typer.Exit(1)
