"""The wheel and the source distribution, built as `make build` does, and what is installed of them, far from here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import Parser
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import asyncpg
import pytest
from click.testing import Result
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import penstock
from penstock.cli.app import MODULES, app
from penstock.cli.start import EXTRAS, HELP
from penstock.db.migrate import head_revision
from penstock.local.service import HOST, is_free
from penstock.local.sqs import EMULATOR
from tests.acceptance import tutorial
from tests.acceptance.test_up_down import Place, alive
from tests.conftest import reachable_folder
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
# What a checkout has lying about and no distribution may carry along.
COMMANDS = [command for commands in MODULES.values() for command in commands]
_LEFT_OVER = ("__pycache__", ".mypy_cache", ".ruff_cache")


def build(source: Path, into: Path, *targets: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", into, *(f"--target={name}" for name in targets)],
        cwd=source, check=True, capture_output=True, timeout=120,
    )  # fmt: skip


@dataclass(frozen=True)
class Installation:
    """What the tutorial's first block leaves behind, done in a clone and a home of its own."""

    wheel: Path
    source: Path
    environment: Path


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """The block as it stands, in one shell; the dependencies are those of the environment that runs this."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(
        ROOT,
        clone,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(
            ".git", ".venv", ".bench-peers", ".penstock", "dist", "node_modules", *_LEFT_OVER
        ),
    )
    tools = Path(sys.executable).parent
    ready = clone / "ready"
    ready.touch()
    (step,) = (step for step in tutorial.STEPS if step.option == "install")
    with reachable_folder() as home:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {
            "HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}",
            "MAKEFLAGS": f"-- BIN={tools} INSTALLED={ready}",  # `make setup` was there before
            "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip
        done = subprocess.run(
            ["sh", "-euc", f"{step.text}\npwd; command -v penstock"], cwd=clone, env=environment,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        folder, command = done.stdout.splitlines()[-2:]
        assert Path(folder) == home / "shop"
        found = Path(command).parents[1]
        assert found == home / "shop" / ".venv"
        # A path in a .pth file is looked in last, and the .pth files that lie there, as that of an editable
        # installation, are not read.
        (packages,) = (found / "lib").glob("python*/site-packages")
        elsewhere = [path for path in sys.path if path.endswith("-packages")]
        (packages / "dependencies.pth").write_text("\n".join(elsewhere) + "\n")
        built = clone / "dist"
        yield Installation(next(built.glob("*.whl")), next(built.glob("*.tar.gz")), found)


@pytest.fixture(scope="module")
def distributions(installation: Installation) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    return installation.wheel, installation.source


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
def installed(installation: Installation) -> Path:
    """The virtual environment with the wheel in it."""
    return installation.environment


@pytest.fixture
def place(data_path: Path, lean: Lean) -> Iterator[Place]:
    """A folder far from the clone, with `penstock[local]` alone, and what an earlier `penstock up` has fetched."""
    place = Place(data_path / "place")
    place.command = (str(lean("local") / "bin" / "python"), "-m", "penstock")
    place.env |= {"PYTHONPATH": "", "XDG_CACHE_HOME": str(data_path / "cache")}
    fetched = data_path / "cache" / "penstock" / EMULATOR
    fetched.mkdir(parents=True)
    (fetched / "ministack").symlink_to(Path(str(metadata.distribution("ministack").locate_file("ministack"))))
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
    assert {"penstock/py.typed", "penstock/tasks/claim.sql", "penstock/migrations/env.py"} <= expected
    assert len(found) == len(set(found))


def test_the_wheel_says_what_it_is_and_what_it_needs(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[0]) as archive:
        info = f"penstock-{penstock.__version__}.dist-info"
        text = archive.read(f"{info}/METADATA").decode()
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()
    about = Parser().parsestr(text)
    assert about["Name"] == "penstock"
    assert about["Version"] == penstock.__version__
    assert about["License-Expression"] == "MIT"
    assert about.get_all("License-File") == ["LICENSE"]
    assert license_text == (ROOT / "LICENSE").read_text("utf-8")
    assert set(about.get_all("Project-URL", [])) == {
        f"{name}, {url}" for name, url in PYPROJECT["project"]["urls"].items()
    }
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
    assert {path.name for path in ROOT.glob("*.md")} | {"LICENSE"} <= found
    assert {"pyproject.toml", "Makefile", "docker-compose.yml"} <= found
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


IMAGE_EXTRAS = re.search(r"penstock\[([a-z,]+)\]", (ROOT / "Dockerfile").read_text("utf-8"))[1].split(",")  # type: ignore[index]


def needed(requirement: str) -> set[str]:
    """Names of the distributions that an installation of a requirement brings, all of which are installed here."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(requirement)]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for text in metadata.requires(name) or ():
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    left.append(inner)
    return {name for name, _ in found} - {"penstock"}


Lean = Callable[..., Path]


@pytest.fixture(scope="module")
def lean(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    """Makes virtual environments with the wheel and what these extras require, by links to what is installed here."""

    @cache
    def make(*extras: str) -> Path:
        folder = tmp_path_factory.mktemp("lean")
        venv.create(folder, symlinks=True)
        (packages,) = (folder / "lib").glob("python*/site-packages")
        with zipfile.ZipFile(installation.wheel) as archive:
            archive.extractall(packages)
        for name in needed(f"penstock[{','.join(extras)}]"):
            distribution = metadata.distribution(name)
            for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
                target = packages / top
                if not target.exists():
                    target.symlink_to(Path(str(distribution.locate_file(top))))
        return folder

    return make


def run_commands(python: Path, lines: Sequence[str], folder: Path, **variables: str) -> list[tuple[int, str]]:
    """Exit code and output of each command, by the entry point of `penstock`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"COLUMNS": "200", "NO_COLOR": "1", **variables}
    done = subprocess.run(
        [python, "-c", INVOKE], cwd=folder, env=environment, input="".join(f"{line}\n" for line in lines),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(lines), done.stderr
    return answers


def test_a_plain_installation_is_small() -> None:
    distributions = [metadata.distribution(name) for name in needed("penstock")]
    assert len(distributions) + 1 < 15
    files = {distribution.locate_file(file) for distribution in distributions for file in distribution.files or ()}
    files |= {path for path in (ROOT / "services").rglob("*") if path.is_file()}
    assert sum(Path(str(file)).stat().st_size for file in files if Path(str(file)).exists()) < 40_000_000


PUBLIC = """
import penstock
for name in penstock.__all__:
    try:
        getattr(penstock, name)
    except penstock.SettingsError as exc:
        print(exc)
"""


def test_a_plain_installation_has_every_public_name_and_no_command(lean: Lean, tmp_path: Path) -> None:
    python = lean() / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run([python, "-c", PUBLIC], cwd=tmp_path, env=environment, capture_output=True, text=True)
    told = r"penstock\.lambda_handler needs \w+: pip install 'penstock\[lambda\]'\n"
    assert re.fullmatch(told, shown.stdout), shown.stdout + shown.stderr
    version, help_text, *others = run_commands(python, ["--version", "--help", "", *COMMANDS], tmp_path)
    assert version == [0, f"penstock {penstock.__version__}\n"]
    assert help_text == [0, HELP.read_text("utf-8")]
    for command, (code, told) in zip(["", *COMMANDS], others, strict=True):
        extra = next((extra for extra, names in EXTRAS.items() if command in names), "cli")
        assert (code, told.partition(" (")[0]) == (2, f"penstock {command} needs: pip install 'penstock[{extra}]'")


LACKING: dict[str, tuple[tuple[str, int, str], ...]] = {
    "cli": (
        ("task 1", 1, "cannot be reached"),
        ("schedules", 1, "cannot be reached"),
        ("config show", 0, "PENSTOCK_DATABASE_URL"),
        ("payload-key", 0, "key id"),
        ("ps", 1, "nothing runs in"),
        ("worker", 2, "penstock worker needs: pip install 'penstock[worker]'"),
        ("migrate", 2, "penstock migrate needs: pip install 'penstock[server]'"),
        ("up", 1, "pip install 'penstock[local]'"),
    ),
    "worker": (
        ("worker", 2, "this worker has no handlers"),
        ("create-queues", 1, "the queues could not be made"),
        ("scheduler", 2, "penstock scheduler needs: pip install 'penstock[server]'"),
        ("doctor", 2, "penstock doctor needs: pip install 'penstock[server]'"),
    ),
}


@pytest.mark.parametrize("extra", LACKING)
def test_an_extra_has_what_its_commands_need(extra: str, lean: Lean, tmp_path: Path) -> None:
    variables = {
        "PENSTOCK_API_URL": "http://127.0.0.1:1", "PENSTOCK_SQS_ENDPOINT_URL": "http://127.0.0.1:1",
        "PENSTOCK_DATABASE_URL": "postgresql://u:p@127.0.0.1:1/d", "PENSTOCK_AWS_REGION": "us-east-1",
        "PENSTOCK_SQS_ACCESS_KEY": "key:secret", "PENSTOCK_METRICS_PORT": "0",
    }  # fmt: skip
    lines = [line for line, _, _ in LACKING[extra]]
    answers = run_commands(lean(extra) / "bin" / "python", lines, tmp_path, **variables)
    for (line, code, words), (exit_code, told) in zip(LACKING[extra], answers, strict=True):
        assert exit_code == code, f"{line}\n{told}"
        assert words in told, f"{line}\n{told}"


WALK = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from penstock.cli.app import app

def walk(command, words):
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, [*words, name])

shown, root = 0, get_command(app)
for name in root.list_commands(None):
    root.get_command(None, name)  # which loads its module
for words in walk(root, []):
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0, (words, done.output, done.exception)
    shown += 1
print(shown)
"""
# In one process: the start of another costs most of a second.
INVOKE = """
import io
import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from penstock.cli.start import main

for line in sys.stdin.readlines():
    sys.argv = ["penstock", *line.split()]
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            main()
            code = 0
        except SystemExit as exc:
            code = exc.code or 0
        except BaseException:
            code = traceback.format_exc()
    print(json.dumps([code, printed.buffer.getvalue().decode()]))
"""
# One of each kind; a word that is a method's answer to an empty database.
CALLS: tuple[tuple[str, int, str], ...] = (
    ("enqueue greet {}", 0, "task 1 SCHEDULED"),
    ("stats", 0, "greet"),
    ("top --once", 0, "greet"),
    ("task 1", 0, "SCHEDULED"),
    ("task cancel 1", 0, "CANCELLED"),
    ("tasks", 0, "greet"),
    ("tasks cancel --action none --dry-run", 0, "0 tasks"),
    ("jobs", 0, ""),
    ("actions pause greet", 0, "greet"),
    ("routes", 0, ""),
    ("tenants", 0, ""),
    ("ordering", 0, ""),
    ("schedules", 0, ""),
    ("workflows", 0, ""),
    ("rejected", 0, ""),
    ("dlq", 1, "dead-letter queue"),  # the api has no SQS
    ("config show", 0, "PENSTOCK_DATABASE_URL"),
    ("keys create ci --permission read", 0, "pstk_"),
    ("keys list", 0, "ci"),
    ("doctor", 1, "inbound queue"),  # likewise
    ("create-queues", 1, "queues could not be made"),
    ("ps", 1, "nothing runs in"),
    ("env", 1, "nothing runs in"),
    ("down", 0, "nothing runs in"),
    ("logs", 1, "--detach"),
    ("up --port 0", 1, "pip install 'penstock[local]'"),
    ("up --port 0 --detach", 1, "pip install 'penstock[local]'"),
)


def test_every_command_works_without_what_penstock_up_needs(lean: Lean, tmp_path: Path, database_url: str) -> None:
    python = str(lean(*IMAGE_EXTRAS) / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "COLUMNS": "200", "NO_COLOR": "1", "PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_METRICS_PORT": "0",
        "PENSTOCK_SQS_ENDPOINT_URL": "http://127.0.0.1:1", "PENSTOCK_AWS_REGION": "us-east-1",
    }  # fmt: skip

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    found = run("-c", "import importlib.util as u; print([u.find_spec(n) for n in ('psutil', 'ministack')])")
    assert found.stdout == "[None, None]\n", found.stdout + found.stderr
    shown = run("-c", WALK)
    assert shown.returncode == 0, shown.stderr
    assert int(shown.stdout) > 80

    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    environment["PENSTOCK_HTTP_PORT"] = str(port)
    environment["PENSTOCK_API_URL"] = f"http://{HOST}:{port}"
    log = tmp_path / "api.log"
    with (
        subprocess.Popen(
            [python, "-m", "penstock", "api"], cwd=tmp_path, env=environment, stdout=log.open("w"),
            stderr=subprocess.STDOUT, text=True,
        ) as process,
        ended(process),
    ):  # fmt: skip
        wait_until(lambda: "api_listening" in log.read_text() or process.poll() is not None, "the api to listen")
        answers = run_commands(Path(python), [line for line, _, _ in CALLS], tmp_path, **environment)
        for (line, code, words), (exit_code, told) in zip(CALLS, answers, strict=True):
            assert exit_code == code, f"{line}\n{told}"
            assert words in told, f"{line}\n{told}"


# Repeating them changes nothing, so what they print may come later.
_LOOKS = re.compile(r"penstock (task show|task result|tasks|stats|top|doctor|schedules runs|workflows show) ?")


def follow(place: Place, step: tutorial.Step) -> None:
    """Do what a block of the tutorial says, and compare."""
    if step.kind == "python":
        source = step.text.replace("http://127.0.0.1:8080", place.state()["api"])
        exec(compile(source, "docs/tutorial.md", "exec"), {})
        return
    expected = int(step.option.removeprefix("exit-code=") or 0)
    for command, page in step.commands():
        if not command.startswith("penstock "):
            subprocess.run(command, shell=True, cwd=place.path, check=True, timeout=60)
            continue

        try:
            wait_until(partial(run, command, page, expected), command, seconds=90 if _LOOKS.match(command) else 0)
        except AssertionError as exc:
            raise AssertionError(f"{command} prints, instead of\n{page}\nthis:\n{invoke(command).output}") from exc


def invoke(command: str) -> Result:
    # In this process: the start of another costs most of a second, and there are two dozen.
    return CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "200", "NO_COLOR": "1"})


def run(command: str, page: str, exit_code: int) -> bool:
    done = invoke(command)
    return done.exit_code == exit_code and tutorial.shows(page, done.output)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever becomes of the block, the process is asked to end, which its own ``with`` waits for."""
    try:
        yield
    finally:
        process.terminate()


def test_the_tutorial_holds_with_the_installed_wheel_up_to_the_end_of_penstock_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` in the foreground too: it takes the port asked for, prints the URLs and stops on SIGTERM."""
    (written,) = (step for step in tutorial.STEPS if step.option == "shop.py")
    (place.path / written.option).write_text(written.text)
    (start,) = (step for step in tutorial.STEPS if step.option == "up")
    ((command, page),) = start.commands()
    log = place.path / "log"
    with socket.socket() as other:
        other.bind((HOST, 0))
        port = other.getsockname()[1]
        other.listen()
        assert f"port {port} is taken" in place.run("up", "--detach", "--port", str(port), check=False).stderr
    assert is_free(port)
    with (
        subprocess.Popen(
            [*place.command, *command.split()[1:], "--port", str(port)],
            cwd=place.path,
            env=os.environ | place.env,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),  # an unread pipe would stop the whole stack once it is full
            text=True,
        ) as process,
        ended(process),
    ):
        assert process.stdout is not None
        printed = []
        while not printed or not printed[-1].startswith("stop "):
            printed.append(process.stdout.readline())
            assert printed[-1], log.read_text()
        assert tutorial.shows(page, "".join(printed))
        state = place.state()
        assert state["api"] == f"http://{HOST}:{port}"
        assert any(line.startswith("api") and state["api"] in line for line in printed)
        monkeypatch.chdir(place.path)
        wait_until(lambda: place.rpc("stats", {}), "the api to answer")
        for step in tutorial.STEPS:
            if step.kind in ("console", "python") and step.option not in ("shop.py", "up", "production"):
                follow(place, step)
        (step,) = (step for step in tutorial.STEPS if step.option == "production")
        (export, _), *others = step.commands()
        assert export.startswith("export PENSTOCK_DATABASE_URL=")
        monkeypatch.setenv("PENSTOCK_DATABASE_URL", state["database_url"])
        follow(place, tutorial.Step("console", "", "".join(f"$ {command}\n{page}" for command, page in others)))
        assert (place.path / "outbox" / "6.txt").read_text().startswith("To: b@example.org\n")
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stack_stopped" in log.read_text()
    assert not [entry for entry in state["processes"] if alive(entry["pid"])]
