"""The wheel and the source distribution, built as `make build` does, and what is installed of them, far from here."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import asyncpg
import pytest

import penstock
from penstock.local.service import HOST, is_free
from penstock.migrate import head_revision
from tests.acceptance.test_up_down import Place, alive
from tests.conftest import reachable_folder
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# What a checkout has lying about and no distribution may carry along.
_LEFT_OVER = ("__pycache__", ".mypy_cache", ".ruff_cache")


def build(source: Path, into: Path, *targets: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", into, *(f"--target={name}" for name in targets)],
        cwd=source, check=True, capture_output=True, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def files_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not set(path.parts) & set(_LEFT_OVER)
    }


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path]) -> Iterator[Path]:
    """A virtual environment with the wheel in it; its dependencies are those of the environment that runs this."""
    with reachable_folder() as folder:
        python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps", "--no-index",
             "--disable-pip-version-check", distributions[0]],
            check=True, timeout=120,
        )  # fmt: skip
        # A path in a .pth file is looked in last, and the .pth files that lie there, as that of an editable
        # installation, are not read.
        (packages,) = (folder / "lib").glob("python*/site-packages")
        elsewhere = [path for path in sys.path if path.endswith("-packages")]
        (packages / "dependencies.pth").write_text("\n".join(elsewhere) + "\n")
        yield folder


@pytest.fixture
def place(data_path: Path, installed: Path) -> Iterator[Place]:
    """A folder far from the clone, in which `penstock` is the command that was installed."""
    place = Place(data_path / "place")
    place.command = (str(installed / "bin" / "penstock"),)
    place.env["PYTHONPATH"] = ""
    yield place
    if (place.path / ".penstock").exists():
        place.run("down")


def test_the_wheel_has_every_file_of_the_package_and_the_migrations_and_nothing_else(
    distributions: tuple[Path, Path],
) -> None:
    info = f"penstock-{penstock.__version__}.dist-info/"
    found = files_of(distributions[0])
    expected = {f"penstock/{name}" for name in files_below(ROOT / "services" / "penstock")}
    expected |= {f"penstock/migrations/{name}" for name in files_below(ROOT / "migrations")}
    assert {name for name in found if not name.startswith(info)} == expected
    assert {"penstock/py.typed", "penstock/sql/claim.sql", "penstock/migrations/env.py"} <= expected
    assert len(found) == len(set(found))


def test_the_wheel_says_what_it_is_and_what_it_needs(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[0]) as archive:
        text = archive.read(f"penstock-{penstock.__version__}.dist-info/METADATA").decode()
    about = Parser().parsestr(text)
    assert about["Name"] == "penstock"
    assert about["Version"] == penstock.__version__
    assert about["License-Expression"] == "MIT"
    assert about["Requires-Python"] == ">=3.11"
    assert set(about.get_all("Provides-Extra", [])) == set(PYPROJECT["project"]["optional-dependencies"])
    plain = [text for text in about.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert len(plain) == len(PYPROJECT["project"]["dependencies"])


def test_the_source_distribution_is_built_into_the_same_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, source = distributions
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    build(unpacked, tmp_path / "dist", "wheel")
    again = tmp_path / "dist" / wheel.name
    assert files_of(again) == files_of(wheel)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert all(one.read(name) == other.read(name) for name in one.namelist())


def test_the_source_distribution_has_all_that_the_tests_and_the_documentation_need(
    distributions: tuple[Path, Path],
) -> None:
    top = f"penstock-{penstock.__version__}/"
    with tarfile.open(distributions[1]) as archive:
        found = {name.removeprefix(top) for name in archive.getnames()}
    assert not [name for name in found if any(f"/{left}/" in f"/{name}/" for left in _LEFT_OVER)]
    assert {"README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "Makefile", "docker-compose.yml"} <= found
    for folder in ("docs", "examples", "migrations", "services", "tests"):
        assert {f"{folder}/{name}" for name in files_below(ROOT / folder)} <= found


def test_the_installed_command_knows_its_version_its_help_and_its_migrations(
    installed: Path, tmp_path: Path, empty_database_url: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PENSTOCK_DATABASE_URL"] = empty_database_url

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = str(installed / "bin" / "penstock")
    assert run(command, "--version") == f"penstock {penstock.__version__}\n"
    assert "migrate" in run(command, "--help")
    run(command, "migrate")

    async def revision() -> str:
        connection = await asyncpg.connect(empty_database_url)
        try:
            return str(await connection.fetchval("select version_num from penstock.alembic_version"))
        finally:
            await connection.close()

    assert asyncio.run(revision()) == head_revision()
    source = "import penstock, importlib.metadata as m; print(penstock.__file__, m.version('penstock'))"
    where, version = run(str(installed / "bin" / "python"), "-c", source).split()
    assert Path(where).is_relative_to(installed)
    assert version == penstock.__version__


def test_up_of_the_installed_wheel_takes_the_port_asked_for_prints_the_urls_runs_tasks_and_stops_on_sigterm(
    place: Place,
) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        port = other.getsockname()[1]
        other.listen()
        assert f"port {port} is taken" in place.run("up", "--detach", "--port", str(port), check=False).stderr
    assert is_free(port)
    with subprocess.Popen(
        [*place.command, "up", "--app", "greeting", "--port", str(port)],
        cwd=place.path,
        env=os.environ | place.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        shown = next(line for line in lines if line.startswith("api"))
        state = place.state()
        assert state["api"] == f"http://{HOST}:{port}"
        assert state["api"] in shown
        wait_until(lambda: place.rpc("stats", {}), "the api to answer")
        place.wait_success(place.greet("wheel"), "wheel")
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stack_stopped" in errors
    assert not [entry for entry in state["processes"] if alive(entry["pid"])]
