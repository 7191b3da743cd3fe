"""Bring the schema up to date, or back: Alembic's commands with the migrations that ship with the package."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

import penstock

_PACKAGE = Path(penstock.__file__).parent


def migrations_path() -> Path:
    """Where the migrations are: inside an installed wheel, or at the top of a checkout."""
    shipped = _PACKAGE / "migrations"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1] / "migrations"


def _config(database_url: str | None = None, output: StringIO | None = None) -> Config:
    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    # Not by set_main_option: a password may hold %, and the URL must not appear in a config dump.
    config.attributes["url"] = database_url
    return config


def upgrade(database_url: str, revision: str = "head") -> None:
    """Run the migrations up to ``revision``; doing so again changes nothing. Must not run inside an event loop."""
    command.upgrade(_config(database_url), revision)


def downgrade(database_url: str, revision: str) -> None:
    """Undo the migrations down to ``revision`` (``base`` for all); the tables they made are dropped."""
    command.downgrade(_config(database_url), revision)


def upgrade_sql(revision: str = "head") -> str:
    """The SQL of an upgrade from nothing, for those who run it by hand."""
    output = StringIO()
    command.upgrade(_config(output=output), revision, sql=True)
    return output.getvalue()


def head_revision() -> str:
    """The newest revision that this package knows."""
    return ScriptDirectory.from_config(_config()).get_current_head() or "base"


def revisions() -> set[str]:
    """Every revision that this package knows."""
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
