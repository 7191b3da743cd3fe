"""`penstock jobs`: jobs that change many tasks, created by `penstock tasks cancel` and the like."""

from __future__ import annotations

from typing import Any

import typer

from penstock.cli.common import calling, listing, print_fields, say
from penstock.cli.groups import Commands, add_group
from penstock.cli.parameters import ParamsOf
from penstock.protocol.errors import PenstockError
from penstock.tasks.bulk_params import JobId, JobListParams


def add_to(app: typer.Typer) -> None:
    one = ParamsOf(JobId)
    commands: Commands = {
        "list": calling("job.list", ParamsOf(JobListParams), "List jobs, newest first.", _print_jobs),
        "show": calling("job.get", one, "Show a job: its progress, and the tasks it refused.", print_job),
        "cancel": calling("job.cancel", one, "Stop a job; changes already made stay.", print_job),
    }
    add_group(app, "jobs", commands, panel="Tasks", help="Jobs that change many tasks, as `penstock tasks cancel`.")


def print_job(job: dict[str, Any]) -> None:
    """A job with the tasks it refused. Raises PenstockError for a job that failed."""
    errors = job.pop("errors")
    job["total"] = _total(job)
    job.pop("total_is_exact")
    print_fields(job.items())
    for error in errors:
        say(f"{'job' if error['id'] is None else error['id']}: {error['reason']}", err=True)
    if job["state"] == "FAILED":
        raise PenstockError(f"job {job['id']} failed")


def _total(job: dict[str, Any]) -> Any:
    return f"about {job['total']}" if job["total"] and not job["total_is_exact"] else job["total"]


_print_jobs = listing(
    "jobs",
    ("id", "kind", "state", ("total", _total), "seen", "changed", "refused", ("created", "created_at"),
     ("finished", "finished_at")),
    right=("id", "total", "seen", "changed", "refused"),
)  # fmt: skip
