"""`manage.py penstock_worker`"""

import os
import sys
import sysconfig
from typing import Any

import typer
from django.core.management.base import BaseCommand, CommandError, CommandParser

from penstock.cli.processes import worker
from penstock.cli.reload import run_reloading
from penstock.protocol.errors import PenstockError


class Command(BaseCommand):
    help = "Run tasks from Penstock's outbound queue. Settings are those of `penstock worker`."
    requires_system_checks = ()  # they import the views: a worker needs the modules of tasks alone

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--app", action="append", default=[], help="Another module with handlers. Repeatable.")
        parser.add_argument("--queue", help="Take tasks from this queue of a route; default PENSTOCK_OUTBOUND_QUEUE.")
        parser.add_argument("--concurrency", type=int, help="Number of tasks run at once.")
        parser.add_argument("--loops", type=int, help="Number of concurrent receive loops.")
        parser.add_argument("--log-level", help="debug, info, warning or error.")
        parser.add_argument("--reload", action="store_true", help="Start again when a Python file changes.")

    def handle(self, *, app: list[str], reload: bool, **options: Any) -> None:
        names = ("queue", "concurrency", "loops", "log_level")
        given = {name: options[name] for name in names if options[name] is not None}
        modules = ["penstock.contrib.django.worker_app", *app]
        known = {"", *sysconfig.get_paths().values()}  # which each interpreter has of its own
        # Children find what manage.py finds.
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path not in known)
        try:
            if reload:
                words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
                sys.exit(run_reloading(["worker", *(f"--app={name}" for name in modules), *words]))
            worker(app=modules, **given)
        except PenstockError as exc:
            raise CommandError(str(exc)) from exc
        except typer.Exit as exc:
            sys.exit(exc.exit_code)
