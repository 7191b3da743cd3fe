"""`penstock up`, `down`, `ps`, `env`, `logs`: everything on this machine."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.common import DataDirOption, Shown, folder_of, listing, load_settings, print_fields
from penstock.protocol.errors import StackError
from penstock.protocol.views import span

# Options of `up`, for URLs that contain a password.
_DATABASE_URL = "PENSTOCK_UP_DATABASE_URL"
_TRANSPORT_URL = "PENSTOCK_UP_TRANSPORT_URL"
ReloadOption = Annotated[
    bool, typer.Option("--reload", help="Start workers again when a Python file below the current folder changes.")
]


def up(
    data_dir: DataDirOption = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, show_default="8080 or the next free")] = None,
    workers: Annotated[int, typer.Option(min=0, max=256)] = 1,
    fleet: Annotated[list[str] | None, typer.Option(metavar="QUEUE=N")] = None,
    one_process: bool = False,
    app: Annotated[list[str] | None, typer.Option(metavar="MODULE")] = None,
    reload: ReloadOption = False,
    detach: Annotated[bool, typer.Option("--detach", "-d")] = False,
    database_url: Annotated[str | None, typer.Option(envvar=_DATABASE_URL)] = None,
    sqs_endpoint_url: str | None = None,
    transport_url: Annotated[str | None, typer.Option(envvar=_TRANSPORT_URL)] = None,
) -> None:
    """Start everything on this machine: Postgres, SQS, schema, queues and all processes.

    Needs only Python. Data stays in --data-dir; stacks in different folders can run side by side. Processes that die
    are restarted. Ctrl-C stops everything in order, a second Ctrl-C immediately. Other PENSTOCK_* settings apply to the
    processes.

    port: Port of the api; must be free.
    workers: Number of worker processes; 0 if you run your own.
    fleet: N more workers for a separate queue, which is created; see `penstock routes`. Repeatable.
    one_process: Run all but the workers in one process, which starts faster and needs less memory.
    app: Module with handlers for the workers. Repeatable. Default: the example of a clone, examples.export, if the
        current folder has it; else no worker is started.
    detach: Return when everything is ready; output goes to DATA_DIR/penstock.log.
    database_url: Use this Postgres instead of the embedded one; PENSTOCK_DATABASE_URL alone does not.
    sqs_endpoint_url: Use this SQS instead of the embedded one; PENSTOCK_SQS_ENDPOINT_URL alone does not.
    transport_url: Use this RabbitMQ (amqp://) or Kafka (kafka://) instead of SQS; PENSTOCK_TRANSPORT_URL alone does
        not.
    """
    secrets = {_DATABASE_URL: database_url, _TRANSPORT_URL: transport_url}
    for name in secrets:
        os.environ.pop(name, None)
    settings = load_settings()
    apps = app or (["examples.export"] if Path("examples/export/__init__.py").exists() else [])
    fleets: dict[str, int] = {}
    for text in fleet or ():
        queue, sign, count = text.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,76}", queue) or (sign and not re.fullmatch(r"[1-9]\d{0,2}", count)):
            raise typer.BadParameter(f"--fleet takes QUEUE=N, a queue's name and a number of workers, not {text!r}")
        fleets[queue] = int(count or 1)
    notes = []
    if not apps and not settings.deliveries and (workers or fleets):
        workers, fleets = 0, {}
        notes.append("no worker runs, since neither --app nor PENSTOCK_DELIVERIES is given: tasks wait for one")
    folder = folder_of(data_dir)
    if detach:
        from penstock.local.state import start_detached

        options = [
            ("data-dir", folder.path), ("workers", workers), ("port", port), ("sqs-endpoint-url", sqs_endpoint_url),
            *(("fleet", f"{name}={number}") for name, number in fleets.items()), *(("app", module) for module in apps),
        ]  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in options if value is not None]
        arguments += ["--one-process"] if one_process else []
        arguments += ["--reload"] if reload else []
        with _spinner("starting Postgres, SQS and the processes"):
            # In the environment, since every user can list the arguments of a process.
            state = start_detached(folder, arguments, {name: url for name, url in secrets.items() if url is not None})
        _print_summary(folder, state, notes, detached=True)
        return

    from penstock.local.stack import Stack
    from penstock.runtime.logs import setup_logging

    setup_logging("up", level=settings.log_level, form=settings.log_format)
    stack = Stack(
        data_dir, port=port, workers=workers, fleets=fleets, one_process=one_process, apps=apps, reload=reload,
        database_url=database_url, sqs_endpoint_url=sqs_endpoint_url, transport_url=transport_url or "sqs://",
    )  # fmt: skip
    asyncio.run(stack.run(lambda state: _print_summary(folder, state, notes, detached=False)))


def down(data_dir: DataDirOption = None) -> None:
    """Stop the stack of a folder and wait until it has ended; its data stays."""
    from penstock.local.state import stop_detached

    folder = folder_of(data_dir)
    with _spinner("stopping"):
        pid = stop_detached(folder)
    done = "nothing runs" if pid is None else f"stopped (process {pid}); data stays"
    typer.echo(f"{done} in {folder.path}")


def ps(*, data_dir: DataDirOption = None, shown: Shown) -> None:
    """Show the processes of a running stack and its URLs.

    With --json passwords and keys are included.
    """
    shown.show(folder_of(data_dir).running_state(), _print_processes)


def _print_processes(state: dict[str, Any]) -> None:
    print_fields(_urls(state))
    typer.echo()
    up = ("up", lambda entry: span(time.time() - entry["started"]))
    listing("processes", ("name", "pid", "state", "restarts", up, "metrics"), right=("pid", "restarts", "up"))(state)


def env(*, data_dir: DataDirOption = None, shown: Shown) -> None:
    """Print the variables that your own processes and SQS clients need to use a running stack, for `eval "$(...)"`.

    They include the access key of the embedded SQS, which changes at every start.
    """
    variables = folder_of(data_dir).running_state()["env"]
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    shown.show(variables, lambda _: typer.echo(exports))


def logs(
    data_dir: DataDirOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of last lines to print first.")] = 200,
) -> None:
    """Print the output of a stack that was started with --detach."""
    folder = folder_of(data_dir)
    with folder.using():
        if not folder.log.exists():
            raise StackError(f"{folder.log} does not exist: only a stack started with --detach writes it")
        file = folder.log.open("rb")
    with file:
        chunk = b"".join(file.read().splitlines(keepends=True)[-lines:] if lines else [])
        while chunk or follow:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            if not chunk:
                time.sleep(0.2)
            chunk = file.read(65536)


def _spinner(text: str) -> contextlib.AbstractContextManager[Any]:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:  # where no status is shown
        console.print(f"{text} ...", highlight=False)
    return console.status(text)


def _urls(state: dict[str, Any]) -> list[tuple[str, str]]:
    from penstock.settings.broker_urls import parse_broker_url
    from penstock.settings.values import masked

    broker = parse_broker_url(state["transport_url"])
    sqs = f"{state['sqs_endpoint_url']}   (with its access key: penstock env)"
    return [
        ("api", f"{state['api']}/rpc"),
        ("database", f"{masked(state['database_url'])}   (with its password: penstock ps --json)"),
        (broker.kind, sqs if broker.kind == "sqs" else broker.shown),
        *((f"  {label}", url) for label, url in state["queues"].items()),
    ]


def _print_summary(folder: Any, state: dict[str, Any], notes: list[str], *, detached: bool) -> None:
    where = folder.option
    metrics = [(f"  {entry['name']}", entry["metrics"]) for entry in state["processes"]]
    fields = [*_urls(state), ("metrics", ""), *metrics, *(("note", note) for note in notes)]
    if (task := state["suggestion"]) is not None:
        words = shlex.join([task["action"], json.dumps(task["payload"], ensure_ascii=False)])
        fields.append(("try", f"penstock enqueue{where} {words}"))
    if detached:
        fields += [("logs", f"penstock logs{where} --follow"), ("stop", f"penstock down{where}")]
    else:
        fields.append(("stop", "Ctrl-C"))
    typer.echo("penstock is up")
    print_fields(fields)
    sys.stdout.flush()
