"""The environments of the other task queues, of Python and of Node, made when they are first needed."""

from __future__ import annotations

import json
import shutil
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


NODE = VENV / "node"
NODE_REQUIREMENTS = ("node@22", "pg-boss@12.33.7", "graphile-worker@0.18.0")


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


def make_node() -> Path | str:
    """The Node of the peers written for it, which npm installs with them; or why it cannot be had."""
    node = NODE / "node_modules" / ".bin" / "node"
    marker = NODE / "installed.txt"
    wanted = "\n".join(NODE_REQUIREMENTS)
    if marker.exists() and marker.read_text("utf-8") == wanted:
        return node
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    print(f"installing the peers for Node into {NODE}", file=sys.stderr)
    NODE.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(NODE), *NODE_REQUIREMENTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"npm could not install {', '.join(NODE_REQUIREMENTS)}: {(done.stderr or done.stdout).strip()[-300:]}"
    marker.write_text(wanted, "utf-8")
    return node


def node_versions() -> dict[str, str]:
    """What npm installed, if anything."""
    names = [requirement.rpartition("@")[0] for requirement in NODE_REQUIREMENTS]
    manifests = {name: NODE / "node_modules" / name / "package.json" for name in names}
    return {name: json.loads(path.read_text("utf-8"))["version"] for name, path in manifests.items() if path.exists()}
