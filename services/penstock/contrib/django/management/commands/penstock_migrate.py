"""`manage.py penstock_migrate`"""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from penstock.contrib.django.backend import aliases
from penstock.contrib.django.databases import database_url
from penstock.db.migrate import upgrade
from penstock.protocol.errors import PenstockError
from penstock.settings.model import load_settings


class Command(BaseCommand):
    help = "Bring Penstock's schema up to date in the databases of its backends. Safe to repeat."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", help="Alias of one database; default: those of all Penstock backends.")

    def handle(self, *, database: str | None, **_: Any) -> None:
        try:
            for alias in [database] if database else aliases():
                upgrade(database_url(alias), schema=load_settings().database_schema)
                self.stdout.write(f"Penstock's schema in {alias!r} is up to date")
        except PenstockError as exc:
            raise CommandError(str(exc)) from exc
        except Exception as exc:  # as `penstock migrate`
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            raise CommandError(f"the migration did not finish, what it had changed by then stays: {reason}") from exc
