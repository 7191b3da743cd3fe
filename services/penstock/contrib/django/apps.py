"""The app of `INSTALLED_APPS`: management commands, and checks of the database."""

from django.apps import AppConfig


class PenstockConfig(AppConfig):
    name = "penstock.contrib.django"
    label = "penstock"
    verbose_name = "Penstock"

    def ready(self) -> None:
        from django.core import checks

        from penstock.contrib.django.databases import check_databases

        checks.register(check_databases, checks.Tags.database)
