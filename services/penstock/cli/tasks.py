"""`penstock tasks`: many tasks, listed or changed by a filter; `penstock jobs`: the jobs that change them."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
import typer

from penstock.cli import common
from penstock.cli.parameters import Commands, Given, ParamsOf
from penstock.cli.values import STATES_HELP, state_label
from penstock.cli.values import state as parse_state
from penstock.protocol.task import SHOWN_STATES, State
from penstock.tasks.params import BulkParams, BulkRescheduleParams, JobId, JobListParams, ListParams

_state_option = partial(
    typer.Option, parser=parse_state, metavar="STATE", autocompletion=lambda: [*State, *SHOWN_STATES.values()]
)
_STATE_HELP = f"Only tasks in this state: {STATES_HELP}."
_STATES = _state_option("--state", help=f"{_STATE_HELP} Repeatable.")


def _changing(verb: str, params: type[msgspec.Struct] = BulkParams) -> Callable[..., None]:
    """A command that counts the tasks of a filter, asks, and changes them."""
    method = f"bulk.{verb}"

    def command(
        *,
        tasks: Given,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Print how many tasks match, and change nothing.")
        ] = False,
        yes: common.YesOption = False,
        wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end, showing progress.")] = True,
        api: common.Api,
    ) -> None:
        if not tasks.keys() & {*BulkParams.__struct_fields__}:
            raise typer.BadParameter(
                "give at least one filter (--action, --state, --label, --older-than, --newer-than, --from-id, --to-id, "
                "--tenant), or --all"
            )
        if dry_run:
            api.show(api.call(method, **tasks, dry_run=True), _print_preview)
            return
        if not yes:
            common.confirm(verb, _number(api.call(method, **tasks, dry_run=True)))
        started = api.call(method, **tasks)
        if not wait:
            api.show(started, lambda _: typer.echo(f"job {started['job']}: see `penstock jobs show {started['job']}`"))
            return
        with common.progress(method) as show:  # its length is known once a supervisor has counted the tasks
            job = common.outlasting(
                lambda: api.client.wait_job(
                    started["job"], progress=lambda job: show(job["changed"] + job["refused"], job["total"])
                )
            )
        api.show(job, _print_job)
        if job["state"] != "DONE" or job["refused"]:
            raise typer.Exit(1)

    command.__doc__ = common.SUMMARIES[method]
    command.__annotations__ |= {"tasks": Annotated[Given, ParamsOf(params, without=["dry_run"], states=_STATES)]}
    return command


def print_tasks(page: dict[str, Any]) -> None:
    """A table of tasks, as the api returns them."""
    has_tenants = any(task.get("tenant") for task in page["tasks"])
    tenant: list[common.Column] = [("tenant", lambda task: task.get("tenant"))] if has_tenants else []
    state: common.Column = "state", lambda task: state_label(task["state"])
    attempts: common.Column = "attempts", lambda task: f"{task['attempts']}/{task['max_attempts']}"
    columns = ("id", "action", *tenant, state, attempts, "run_at", "updated_at", ("error", _message))
    what = "tasks among those searched" if page.get("cursor") else "tasks"
    common.listing(what, columns, member="tasks", right=("id", "attempts"))(page)


def _message(task: dict[str, Any]) -> str | None:
    error = task["error"]
    message = error.get("message") if isinstance(error, dict) else error
    return None if message is None else common.short(str(message))


def _print_preview(preview: dict[str, Any]) -> None:
    typer.echo(_number(preview))
    if preview["sample"]:
        typer.echo(f"the first: {', '.join(map(str, preview['sample']))}")


def _number(preview: dict[str, Any]) -> str:
    if preview["exact"]:
        return f"{preview['count']} task{'' if preview['count'] == 1 else 's'}"
    return f"more than {preview['count']} tasks (about {preview['estimate']})"


def _print_job(job: dict[str, Any]) -> None:
    """A job with the tasks it refused."""
    errors = job.pop("errors")
    job["total"] = _total(job)
    job.pop("total_is_exact")
    common.print_fields(job.items())
    for error in errors:
        common.say(f"{'job' if error['id'] is None else error['id']}: {error['reason']}", err=True)


def _total(job: dict[str, Any]) -> Any:
    return f"about {job['total']}" if job["total"] and not job["total_is_exact"] else job["total"]


_print_jobs = common.listing(
    "jobs",
    ("id", "kind", "state", ("total", _total), "seen", "changed", "refused", ("created", "created_at"),
     ("finished", "finished_at")),
    right=("id", "total", "seen", "changed", "refused"),
)  # fmt: skip
tasks = Commands(
    "Many tasks: list them, or change all that match a filter.",
    list=common.calling("list", ParamsOf(ListParams, state=_state_option(help=_STATE_HELP)), print_tasks),
    cancel=_changing("cancel"),
    retry=_changing("retry"),
    delete=_changing("delete"),
    reschedule=_changing("reschedule", BulkRescheduleParams),
)
jobs = Commands(
    "Jobs that change many tasks, as `penstock tasks cancel`.",
    list=common.calling("job.list", JobListParams, _print_jobs),
    show=common.calling("job.get", JobId, _print_job),
    cancel=common.calling("job.cancel", JobId, _print_job),
)
