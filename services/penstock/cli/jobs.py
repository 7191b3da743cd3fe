"""`penstock jobs`: what changes many tasks at once, made by `penstock tasks cancel` and the like."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.common import (
    ApiUrlOption,
    DataDirOption,
    JsonOption,
    connect,
    print_fields,
    print_json,
    print_page,
    say,
)
from penstock.cli.groups import Commands, add_group
from penstock.protocol.errors import PenstockError

JobId = Annotated[int, typer.Argument(metavar="ID", help="The job's id.")]


def add_to(app: typer.Typer) -> None:
    commands: Commands = {"list": list_jobs, "show": show, "cancel": cancel}
    add_group(app, "jobs", commands, panel="Tasks", help="Jobs that change many tasks, as of `penstock tasks cancel`.")


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
    columns = ("id", "kind", "state", "total", "seen", "changed", "refused", "created", "finished")
    rows = [
        (job["id"], job["kind"], job["state"], _total(job), job["seen"], job["changed"], job["refused"],
         job["created_at"], job["finished_at"])
        for job in result["jobs"]
    ]  # fmt: skip
    print_page(columns, rows, result["cursor"], right=("id", "total", "seen", "changed", "refused"))


def show(
    job_id: JobId, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Show a job: how far it is, and what it could not do."""
    print_job(connect(api_url, data_dir).job(job_id), as_json)


def cancel(
    job_id: JobId, as_json: JsonOption = False, api_url: ApiUrlOption = None, data_dir: DataDirOption = None
) -> None:
    """Stop a job; what it has done stays done."""
    print_job(connect(api_url, data_dir).cancel_job(job_id), as_json)


def print_job(job: dict[str, Any], as_json: bool) -> None:
    """A job with what it could not do. Raises PenstockError for one that failed."""
    if as_json:
        print_json(job)
        return
    errors = job.pop("errors")
    exact = job.pop("total_is_exact")
    print_fields((name, f"about {value}" if name == "total" and value and not exact else value)
                 for name, value in job.items())  # fmt: skip
    for error in errors:
        say(f"{'job' if error['id'] is None else error['id']}: {error['reason']}", err=True)
    if job["state"] == "FAILED":
        raise PenstockError(f"job {job['id']} failed")


def _total(job: dict[str, Any]) -> str | None:
    if job["total"] is None:
        return None
    return str(job["total"]) if job["total_is_exact"] else f"about {job['total']}"
