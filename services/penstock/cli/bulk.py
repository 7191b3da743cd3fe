"""`penstock bulk` and `penstock job`: many tasks at once, by a filter, and the jobs that do it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.common import (
    EPILOG,
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    given,
    print_cursor,
    print_fields,
    print_json,
    print_table,
    progress,
)
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.client import Client

_PANEL = "Tasks"

ActionOption = Annotated[
    str | None, typer.Option("--action", show_default=False, help="Of this action; * stands for any characters.")
]
StateOption = Annotated[
    list[str] | None, typer.Option("--state", show_default=False, help="In this state; may be given several times.")
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=VALUE", show_default=False, help="With this label; given twice, with both."),
]
OlderOption = Annotated[
    float | None, typer.Option("--older-than", show_default=False, help="Added at least so many seconds ago.")
]
NewerOption = Annotated[
    float | None, typer.Option("--newer-than", show_default=False, help="Added less than so many seconds ago.")
]
FromOption = Annotated[int | None, typer.Option("--from-id", show_default=False, help="With this id or a higher one.")]
TenantOption = Annotated[str | None, typer.Option("--tenant", show_default=False, help="For this tenant.")]
ToOption = Annotated[int | None, typer.Option("--to-id", show_default=False, help="With this id or a lower one.")]
AllOption = Annotated[bool, typer.Option("--all", help="In place of a filter: every task there is now.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Tell how many tasks it would be, and change nothing.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done, with its progress.")]
JobId = Annotated[int, typer.Argument(metavar="ID", help="The job's id.")]


def add_to(app: typer.Typer) -> None:
    bulk = typer.Typer(no_args_is_help=True, epilog=EPILOG, help="Many tasks at once, by a filter.")
    for command in (cancel, retry, delete, reschedule):
        bulk.command()(command)
    app.add_typer(bulk, name="bulk", rich_help_panel=_PANEL)
    job = typer.Typer(no_args_is_help=True, epilog=EPILOG, help="Jobs that bulk operations have made.")
    job.command("list")(list_jobs)
    job.command("show")(show_job)
    job.command("cancel")(cancel_job)
    app.add_typer(job, name="job", rich_help_panel=_PANEL)


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
    run_at: Annotated[
        str | None, typer.Option(show_default=False, help="Not before: RFC 3339 with a zone, or epoch milliseconds.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option(show_default=False, help="Not before so many seconds from now.")
    ] = None,
    spread: Annotated[
        float | None, typer.Option(show_default=False, help="Seconds from then on over which they are spread evenly.")
    ] = None,
    priority: Annotated[int | None, typer.Option(show_default=False, help="-32768 to 32767, higher first.")] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    wait: WaitOption = True,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Give tasks that wait another time, or another priority."""
    instant = int(run_at) if run_at is not None and run_at.lstrip("-").isdecimal() else run_at
    params = _filter(action, state, label, older_than, newer_than, from_id, to_id, everything, tenant)
    params |= given({"run_at": instant, "delay": delay, "spread": spread, "priority": priority})
    _do("reschedule", params, dry_run, yes, wait, as_json, connect(api_url, data_dir))


def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Jobs at the most.")] = 50,
    cursor: Annotated[str | None, typer.Option(show_default=False, help="Go on where the last list ended.")] = None,
    as_json: JsonOption = False,
    api_url: ApiUrlOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """List jobs, newest first."""
    result = connect(api_url, data_dir).jobs(limit=limit, cursor=cursor)
    if as_json:
        print_json(result)
        return
    if not result["jobs"]:
        typer.echo("there is none")
        return
    numbers = ("id", "total", "seen", "changed", "refused")
    rows = (
        (job["id"], job["kind"], job["state"], _total(job), job["seen"], job["changed"], job["refused"],
         job["created_at"], job["finished_at"])
        for job in result["jobs"]
    )  # fmt: skip
    print_table(
        ("id", "kind", "state", "total", "seen", "changed", "refused", "created", "finished"), rows, right=numbers
    )
    print_cursor(result["cursor"])


def show_job(
    job_id: JobId, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Show a job: how far it is, and what it could not do."""
    _print_job(connect(api_url, data_dir).job(job_id), as_json)


def cancel_job(
    job_id: JobId, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Stop a job; what it has done stays done."""
    _print_job(connect(api_url, data_dir).cancel_job(job_id), as_json)


def _filter(
    action: str | None,
    states: list[str] | None,
    labels: list[str] | None,
    older_than: float | None,
    newer_than: float | None,
    from_id: int | None,
    to_id: int | None,
    everything: bool,
    tenant: str | None,
) -> dict[str, Any]:
    """The filter's parameters, as the api takes them."""
    pairs = [label.partition("=") for label in labels or ()]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise typer.BadParameter(f"--label is NAME=VALUE, not {name!r}")
    return given(
        {
            "action": action,
            "states": [state.upper() for state in states] if states else None,
            "labels": {name: value for name, _, value in pairs} or None,
            "older_than": older_than,
            "newer_than": newer_than,
            "ids_from": from_id,
            "ids_to": to_id,
            "all": everything or None,
            "tenant": tenant,
        }
    )


def _do(verb: str, params: dict[str, Any], dry_run: bool, yes: bool, wait: bool, as_json: bool, client: Client) -> None:
    """Count, ask, and have it done."""
    method = f"bulk.{verb}"
    if dry_run:
        _print_preview(client.call(method, params | {"dry_run": True}), as_json)
        return
    if not yes:
        question = f"{verb.capitalize()} {_number(client.call(method, params | {'dry_run': True}))}?"
        if not sys.stdin.isatty():
            raise typer.BadParameter(f"{question} Nobody is there to ask: say --yes")
        typer.confirm(question, abort=True, err=True)
    started = client.call(method, params)
    if not wait:
        if as_json:
            print_json(started)
        else:
            typer.echo(f"job {started['job']}: see `penstock job show {started['job']}`")
        return
    job = _wait(client, started["job"], method)
    _print_job(job, as_json)
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


def _print_job(job: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    errors = job.pop("errors")
    exact = job.pop("total_is_exact")
    print_fields((name, f"about {value}" if name == "total" and value and not exact else value)
                 for name, value in job.items())  # fmt: skip
    for error in errors:
        typer.echo(f"{'job' if error['id'] is None else error['id']}: {error['reason']}", err=True)
    if job["state"] == "FAILED":
        raise PenstockError(f"job {job['id']} failed")


def _number(preview: dict[str, Any]) -> str:
    if preview["exact"]:
        return f"{preview['count']} task{'' if preview['count'] == 1 else 's'}"
    return f"more than {preview['count']} tasks (about {preview['estimate']})"


def _total(job: dict[str, Any]) -> str | None:
    if job["total"] is None:
        return None
    return str(job["total"]) if job["total_is_exact"] else f"about {job['total']}"
