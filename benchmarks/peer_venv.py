"""The virtual environment of the other task queues, made when it is first needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "peer_scripts"
VENV = ROOT / ".bench-peers"
REQUIREMENTS = (
    "asyncpg>=0.30", "uvloop>=0.20", "pgqueuer==1.6.*", "awa-pg==0.6.*", "celery[sqs]==5.7.*", "psycopg2-binary>=2.9",
    "sqlalchemy>=2.0", "boto3>=1.35",
)  # fmt: skip


def make_venv() -> Path:
    """The peers' own environment, made or brought up to date; returns its Python."""
    python = VENV / "bin" / "python"
    marker = VENV / "installed.txt"
    wanted = "\n".join(REQUIREMENTS)
    if not marker.exists() or marker.read_text("utf-8") != wanted:
        print(f"installing the peers into {VENV} (a minute or so)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, *REQUIREMENTS], check=True)
        marker.write_text(wanted, "utf-8")
    return python
