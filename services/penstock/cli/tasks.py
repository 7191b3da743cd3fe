"""`penstock tasks`: many tasks, listed or changed by a filter."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    DelayOption,
    JsonOption,
    PriorityOption,
    RunAtOption,
    connect,
    given,
    print_cursor,
    print_json,
    print_table,
    progress,
    short,
)
from penstock.cli.groups import Commands, add_group
from penstock.cli.jobs import print_job
from penstock.cli.values import duration_option, instant, labels
from penstock.cli.values import state as parse_state
from penstock.protocol.task import State

if TYPE_CHECKING:
    from penstock.client.client import Client

ActionOption = Annotated[
    str | None, typer.Option("--action", show_default=False, help="Of this action; * stands for any characters.")
]
StateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--state",
        parser=parse_state,
        metavar="STATE",
        show_default=False,
        help=f"In this state, one of {', '.join(State)}; may be repeated.",
    ),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=TEXT", show_default=False, help="With this label; given twice, with both."),
]
OlderOption = Annotated[float | None, duration_option("--older-than", help="Added at least so long ago.")]
NewerOption = Annotated[float | None, duration_option("--newer-than", help="Added less than so long ago.")]
FromOption = Annotated[int | None, typer.Option("--from-id", show_default=False, help="With this id or a higher one.")]
ToOption = Annotated[int | None, typer.Option("--to-id", show_default=False, help="With this id or a lower one.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", show_default=False, help="For this tenant.")]
AllOption = Annotated[bool, typer.Option("--all", help="In place of a filter: every task there is now.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Tell how many tasks it would be, and change nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done, with its progress.")]


def add_to(app: typer.Typer) -> None:
    commands: Commands = {
        "list": list_tasks,
        "cancel": cancel,
        "retry": retry,
        "delete": delete,
        "reschedule": reschedule,
    }
    add_group(app, "tasks", commands, panel="Tasks", help="Many tasks: list them, or change all those of a filter.")


def list_tasks(
    state: Annotated[
        str | None,
        typer.Option(
            parser=parse_state,
            metavar="STATE",
            show_default=False,
            help=f"One of {', '.join(State)}.",
            autocompletion=lambda: [*State],
        ),
    ] = None,
    action: Annotated[str | None, typer.Option(show_default=False, help="Only tasks of this action.")] = None,
    tenant: Annotated[str | None, typer.Option(show_default=False, help="Only tasks of this tenant.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="Only tasks with this label; given several times, with all of them."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(show_default=False, help="Only tasks that have this unique key or ordering key.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(show_default=False, help="Created then or later: RFC 3339 with a zone, or epoch milliseconds."),
    ] = None,
    until: Annotated[str | None, typer.Option(show_default=False, help="Created before; as --since.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Tasks at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List tasks, newest first.

    With a filter, one call looks at a bounded number of tasks; the cursor that is printed leads further back.
    """
    params = {
        "state": state, "action": action, "labels": labels(label), "key": key,
        "since": instant(since), "until": instant(until), "limit": limit, "cursor": cursor, "tenant": tenant,
    }  # fmt: skip
    result = connect(api_url, data_dir).call("list", given(params))
    if as_json:
        print_json(result)
        return
    if result["tasks"]:
        print_tasks(result["tasks"])
    else:
        typer.echo("there is none" + (" among those looked at" if result["cursor"] else ""))
    print_cursor(result["cursor"])


def cancel(
    action: ActionOption = None,
    state: StateOption = None,
    label: LabelOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    from_id: FromOption = None,
    to_id: ToOption = None,
    tenant: TenantOption = None,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Cancel tasks that are not settled; results that come later are ignored."""
    params = _filter(action, state, label, older_than, newer_than, from_id, to_id, everything, tenant)
    _do("cancel", params, dry_run, yes, wait, as_json, connect(api_url, data_dir))


def retry(
    action: ActionOption = None,
    state: StateOption = None,
    label: LabelOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    from_id: FromOption = None,
    to_id: ToOption = None,
    tenant: TenantOption = None,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Start CRITICAL_ERROR and CANCELLED tasks anew, their attempts at 0."""
    params = _filter(action, state, label, older_than, newer_than, from_id, to_id, everything, tenant)
    _do("retry", params, dry_run, yes, wait, as_json, connect(api_url, data_dir))


def delete(
    action: ActionOption = None,
    state: StateOption = None,
    label: LabelOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    from_id: FromOption = None,
    to_id: ToOption = None,
    tenant: TenantOption = None,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Delete records of settled tasks for good; their unique keys are free again. Live tasks are not touched."""
    params = _filter(action, state, label, older_than, newer_than, from_id, to_id, everything, tenant)
    _do("delete", params, dry_run, yes, wait, as_json, connect(api_url, data_dir))


def reschedule(
    action: ActionOption = None,
    state: StateOption = None,
    label: LabelOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    from_id: FromOption = None,
    to_id: ToOption = None,
    tenant: TenantOption = None,
    everything: AllOption = False,
    run_at: RunAtOption = None,
    delay: DelayOption = None,
    spread: Annotated[
        float | None, duration_option(help="The time from then on over which they are spread evenly.")
    ] = None,
    priority: PriorityOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give tasks that wait another time, or another priority."""
    params = _filter(action, state, label, older_than, newer_than, from_id, to_id, everything, tenant)
    params |= given({"run_at": instant(run_at), "delay": delay, "spread": spread, "priority": priority})
    _do("reschedule", params, dry_run, yes, wait, as_json, connect(api_url, data_dir))


def print_tasks(tasks: list[dict[str, Any]]) -> None:
    """A table of tasks, as the api tells them."""
    whose = ["tenant"] if any(task.get("tenant") for task in tasks) else []
    columns = ("id", "action", *whose, "state", "attempts", "run_at", "updated_at", "error")
    rows = []
    for task in tasks:
        error = task.get("error")
        message = error.get("message") if isinstance(error, dict) else error
        attempts = f"{task.get('attempts')}/{task.get('max_attempts')}" if "attempts" in task else None
        rows.append(
            (task.get("id"), task.get("action"), *(task.get(name) for name in whose), task.get("state"), attempts,
             task.get("run_at"),
             task.get("updated_at"), None if message is None else short(str(message)))
        )  # fmt: skip
    print_table(columns, rows, right=("id", "attempts"))


def _filter(
    action: str | None,
    state: list[str] | None,
    label: list[str] | None,
    older_than: float | None,
    newer_than: float | None,
    from_id: int | None,
    to_id: int | None,
    everything: bool,
    tenant: str | None,
) -> dict[str, Any]:
    """The filter's parameters, as the api takes them."""
    found = given(
        {
            "action": action,
            "states": state or None,
            "labels": labels(label),
            "older_than": older_than,
            "newer_than": newer_than,
            "ids_from": from_id,
            "ids_to": to_id,
            "all": everything or None,
            "tenant": tenant,
        }
    )
    if not found:
        raise typer.BadParameter(
            "give at least one filter (--action, --state, --label, --older-than, --newer-than, --from-id, --to-id, "
            "--tenant), or --all"
        )
    return found


def _do(verb: str, params: dict[str, Any], dry_run: bool, yes: bool, wait: bool, as_json: bool, client: Client) -> None:
    """Count, ask, and have it done."""
    method = f"bulk.{verb}"
    if dry_run:
        _print_preview(client.call(method, params | {"dry_run": True}), as_json)
        return
    if not yes:
        question = f"{verb.capitalize()} {_number(client.call(method, params | {'dry_run': True}))}?"
        if not sys.stdin.isatty():
            raise typer.BadParameter(
                f"refusing to {verb} {question.partition(' ')[2][:-1]} without confirmation: stdin is not a terminal. "
                "Pass --yes."
            )
        typer.confirm(question, abort=True, err=True)
    started = client.call(method, params)
    if not wait:
        if as_json:
            print_json(started)
        else:
            typer.echo(f"job {started['job']}: see `penstock jobs show {started['job']}`")
        return
    job = _wait(client, started["job"], method)
    print_job(job, as_json)
    if job["state"] != "DONE" or job["refused"]:
        raise typer.Exit(1)


def _wait(client: Client, job_id: int, label: str) -> dict[str, Any]:
    """The job once it has ended, with a bar, whose length is known once a supervisor has counted."""
    done = 0
    with progress(None, label) as advance:

        def show(job: dict[str, Any]) -> None:
            nonlocal done
            now = job["changed"] + job["refused"]
            advance(now - done, job["total"])
            done = now

        return client.wait_job(job_id, progress=show)


def _print_preview(preview: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(preview)
        return
    typer.echo(_number(preview))
    if preview["sample"]:
        typer.echo(f"the first: {', '.join(map(str, preview['sample']))}")


def _number(preview: dict[str, Any]) -> str:
    if preview["exact"]:
        return f"{preview['count']} task{'' if preview['count'] == 1 else 's'}"
    return f"more than {preview['count']} tasks (about {preview['estimate']})"
