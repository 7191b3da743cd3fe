"""Every command there is: what it prints as help, which exit codes it has, and that docs/cli.md describes it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from docs import generate_cli, generated
from docs.generate_cli import Command, commands
from penstock import __version__
from penstock.cli.app import app, main
from penstock.cli.parameters import default_of
from penstock.cli.start import HELP

ROOT = Path(__file__).parents[3]
COMMANDS = list(commands())
NAMES = [" ".join(command.path) for command in COMMANDS]
DEFAULTS = [command.path[0] for command in COMMANDS if command.is_default]
LISTING = [group for group in DEFAULTS if group != "config"]
NOWHERE = "http://127.0.0.1:1"
OF_THE_API = [command for command in COMMANDS if command.has("--api-url")]
PROCESSES = (
    "submitter", "scheduler", "worker", "resulter", "supervisor", "api", "run", "kafka-source", "clockwork-source",
)  # fmt: skip
# They print no data of their own: they start, stop or change something and say so, or pass on lines unchanged.
# `task result` prints JSON anyhow.
WITHOUT_JSON = {*PROCESSES, "up", "down", "logs", "migrate", "partition-tasks", "grants", "task result"}
# What a command needs beyond a value for each argument.
MORE = {
    "actions set": ["--rate", "1"], "tenants set": ["--rate", "1"],
    "rejected retry": ["7"], "rejected purge": ["7"], "dlq replay": ["x"],
    "dlq purge": ["x", "--yes"], "task reschedule": ["--delay", "1"], "schedules update": ["--action", "b"],
    "routes set": ["--queue", "q", "--action", "a"], "top": ["--once"],
    **{f"tasks {verb}": ["--all", "--yes"] for verb in ("cancel", "retry", "delete")},
    "tasks reschedule": ["--all", "--yes", "--delay", "1"],
}  # fmt: skip
VALUES = {"definition": '{"steps": [{"name": "a", "action": "a"}]}', "expression": "@daily", "queue": "inbound",
          "payload": "{}", "result": "{}"}  # fmt: skip


@pytest.fixture(scope="module")
def built() -> Callable[..., Any]:
    """The command, built once: each call of the app would build the whole tree again."""
    return typer.main.get_command(app)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, built: Callable[..., Any]) -> None:
    monkeypatch.setattr("penstock.cli.app.app", built)


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command, run as `penstock` is."""
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
        sys.exit(0)
    code = caught.value.code
    out, err = capsys.readouterr()
    return (code if isinstance(code, int) else int(code is not None)), out, err


def arguments_of(command: Command, folder: Path) -> list[str]:
    """Words that call a command so that it gets as far as the api."""
    name = " ".join(command.path)
    words = [*command.path]
    for argument in command.parameters:
        if argument.is_argument and argument.is_required:
            if argument.name == "path":
                file = folder / "given.json"
                file.write_text('[{"name": "a", "expression": "@daily", "action": "a"}]')
                words.append(str(file))
            else:
                words.append(VALUES.get(argument.name, "1"))
    return [*words, *MORE.get(name, ()), "--api-url", NOWHERE]


def test_the_walk_finds_the_commands_that_help_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(COMMANDS) > 60
    assert len(set(NAMES)) == len(NAMES)
    code, out, _ = call(capsys, monkeypatch, "--help")
    assert code == 0
    assert {path[0] for path in (command.path for command in COMMANDS)} <= set(re.findall(r"[\w-]+", out))


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_a_command_explains_itself_and_refuses_what_it_does_not_know_with_2(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(capsys, monkeypatch, *command.path, "--help")
    assert (code, command.path[-1] in out) == (0, True)
    assert command.help
    code, out, err = call(capsys, monkeypatch, *command.path, "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err


@pytest.mark.parametrize("command", OF_THE_API, ids=[" ".join(command.path) for command in OF_THE_API])
def test_a_command_whose_api_is_away_exits_with_1_and_says_so(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, monkeypatch, *arguments_of(command, tmp_path))
    assert (code, out) == (1, ""), err
    assert NOWHERE in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "command", [*OF_THE_API, *(one for one in COMMANDS if one.path[0] in (*PROCESSES, "config"))],
    ids=lambda command: " ".join(command.path),
)  # fmt: skip
def test_wrong_settings_end_a_command_with_2_before_it_does_anything(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_MAX_ATTEMPTS", "many")
    words = arguments_of(command, tmp_path) if command.has("--api-url") else [*command.path]
    code, out, err = call(capsys, monkeypatch, *words)
    assert (code, out) == (2, "")
    assert "PENSTOCK_MAX_ATTEMPTS" in err


def test_every_command_that_prints_data_does_so_as_json_too() -> None:
    without = {" ".join(command.path) for command in COMMANDS if not command.has("--json")}
    assert without == WITHOUT_JSON


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(capsys, monkeypatch, "--version") == (0, f"penstock {__version__}\n", "")


def test_ctrl_c_ends_a_command_with_130() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "penstock", "top", "--json", "--api-url", NOWHERE],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    )  # fmt: skip
    try:
        assert run.stdout is not None
        first = json.loads(run.stdout.readline())
        assert NOWHERE in first["problem"]
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
        assert run.returncode == 130
    finally:
        run.kill()


# Groups


def test_a_group_with_a_list_lists_when_no_command_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With options of `list`, with none, and with options before its help."""
    monkeypatch.chdir(tmp_path)
    for group in LISTING:
        of_the_api = group not in ("keys", "credential")
        nowhere = ["--api-url", NOWHERE] if of_the_api else ["--database-url", "postgresql://x@127.0.0.1:1/x"]
        code, out, err = call(capsys, monkeypatch, group, *nowhere)
        assert (code, out) == (1, ""), err
        assert (group, code, out, err) == (group, *call(capsys, monkeypatch, group, "list", *nowhere))
        code, out, _ = call(capsys, monkeypatch, group, "--json", "--help")
        assert (code, out) == (0, call(capsys, monkeypatch, group, "list", "--help")[1])
    monkeypatch.setenv("PENSTOCK_API_URL", NOWHERE)
    assert NOWHERE in call(capsys, monkeypatch, "tasks")[2]


def test_a_group_without_a_list_shows_its_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {path[0] for path in (command.path for command in COMMANDS) if len(path) > 1} - set(LISTING) == {
        "task", "config",
    }  # fmt: skip
    assert call(capsys, monkeypatch, "config", "--json") == call(capsys, monkeypatch, "config", "show", "--json")
    code, out, err = call(capsys, monkeypatch, "task")
    assert (code, "reschedule" in out + err) == (2, True)


@pytest.mark.parametrize("group", ["task", "jobs", "workflows", "rejected", "schedules"])
def test_a_number_behind_a_group_is_the_id_of_what_to_show(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_URL", NOWHERE)
    shown = call(capsys, monkeypatch, group, "7", "--json")
    assert (shown[0], NOWHERE in shown[2]) == (1, True)
    assert shown == call(capsys, monkeypatch, group, "show", "7", "--json")


@pytest.mark.parametrize(("group", "word", "meant"), [("tasks", "lst", "list"), ("schedules", "resum", "resume")])
def test_a_misspelt_command_of_a_group_is_told_as_such(
    group: str, word: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, monkeypatch, group, word, "--json")
    assert (code, out) == (2, "")
    assert f"No such command '{word}'. Did you mean '{meant}'?" in err


def test_an_option_that_list_does_not_have_is_told_as_one_of_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capsys, monkeypatch, "tasks", "--stat", "ERROR")
    assert (code, out) == (2, "")
    assert "penstock tasks list" in err
    assert "--stat" in err


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_output_that_nobody_reads_leaves_no_traceback(option: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-m", "penstock", option], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("group", DEFAULTS)
def test_the_help_of_a_group_shows_its_commands_and_what_it_does_by_itself(
    group: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(capsys, monkeypatch, group, option)
    assert code == 0
    assert f"penstock {group} alone is penstock {group} {default_of(group)}" in " ".join(out.split())
    assert {command.path[1] for command in COMMANDS if command.path[0] == group} <= set(re.findall(r"[\w-]+", out))


# Completion


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "services"), "HOME": "/nonexistent", **more}


def complete(**variables: str) -> str:
    # As installed: the name of the program decides the name of the variable.
    script = "import sys; sys.argv[0] = 'penstock'; from penstock.cli.app import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment(**variables)
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(shell: str) -> None:
    assert "_PENSTOCK_COMPLETE" in complete(_PENSTOCK_COMPLETE=f"source_{shell}")


def test_commands_groups_and_options_are_completed() -> None:
    def words(line: str, number: int) -> list[str]:
        return complete(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(number)).split()

    assert set(words("penstock sched", 1)) == {"scheduler", "schedules"}
    assert "run-now" in words("penstock schedules r", 2)
    assert "--ordering-key" in words("penstock enqueue --ord", 2)
    assert "CRITICAL_ERROR" in words("penstock tasks list --state ", 4)


def test_a_group_completes_its_commands_and_the_options_of_list() -> None:
    def words(line: str, number: int) -> list[str]:
        return complete(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(number)).split()

    assert words("penstock tasks ", 2) == ["list", "cancel", "retry", "delete", "reschedule"]
    options = words("penstock tasks --", 2)
    assert {"--state", "--json", "--help"} <= set(options)
    assert len(set(options)) == len(options)
    assert "CRITICAL_ERROR" in words("penstock tasks --state ", 3)
    assert words("penstock tasks --json --ten", 3) == ["--tenant"]


# docs/cli.md


def test_the_page_has_the_reference_of_these_commands() -> None:
    page = generated.page(generate_cli.PAGE, generate_cli.reference)
    assert page == generate_cli.PAGE.read_text("utf-8"), "run `make reference`"


def test_the_help_that_is_printed_without_loading_the_commands_is_theirs() -> None:
    assert HELP.read_text("utf-8") == generate_cli.help_text(), "run `make reference`"


def test_the_page_tells_every_command_with_every_option() -> None:
    text = generate_cli.PAGE.read_text("utf-8")
    assert sorted(re.findall(r"^### penstock (.+)$", text, re.MULTILINE)) == sorted(NAMES)
    for command in COMMANDS:
        section = text.split(f"### penstock {' '.join(command.path)}\n", 1)[1].split("\n### ", 1)[0]
        assert [
            name for parameter in command.parameters for name in parameter.names if f"`{name}`" not in section
        ] == []


def test_a_command_that_a_page_shows_is_one() -> None:
    """In the examples of all pages: the words behind `penstock` are a command, and its options are its own."""
    known = {command.path: command for command in COMMANDS}
    wrong = []
    for path in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "SECURITY.md"]:
        for line in re.findall(r"^(?:\$ )?penstock ([^\n`]+)$", path.read_text("utf-8"), re.MULTILINE):
            words = line.split("#")[0].split()
            named = (tuple(words[:2]), tuple(words[:1]), (words[0], default_of(words[0])))
            found = next((known[path] for path in named if path in known), None)
            options = {word.split("=")[0] for word in words if re.fullmatch(r"--[a-z-]+(=.*)?", word)}
            if found is None:
                if not options & {"--version", "--install-completion", "--show-completion"}:
                    wrong.append((path.name, line))
            elif not options <= {name for parameter in found.parameters for name in parameter.names}:
                wrong.append((path.name, line))
    assert wrong == []


def test_commands_that_fixes_name_are_there() -> None:
    names = {" ".join(command.path) for command in COMMANDS} | {command.path[0] for command in COMMANDS}
    files = [*(ROOT / "services" / "penstock" / "cli" / "doctor").iterdir()]
    text = "".join(path.read_text("utf-8") for path in files if path.suffix in (".py", ".sql"))
    named = set(re.findall(r"`penstock ([a-z][a-z -]*?)(?: [-A-Z{].*?)?`", text))
    assert len(named) > 5
    assert named <= names


@pytest.mark.parametrize(
    ("words", "stdout"),
    [
        (["--help"], "? --version  "),
        (["config", "show", "kafka_brokers"], "é?"),
        (["config", "show", "kafka_brokers", "--json"], '"\\u00e9\\ud83d\\ude00"'),
    ],
)
def test_an_encoding_without_a_character_ends_no_command(words: list[str], stdout: str) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PENSTOCK_KAFKA_BROKERS": "é😀"}
    command = [sys.executable, "-m", "penstock", *words]
    done = subprocess.run(
        command, env=env | {"PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True, timeout=60
    )  # fmt: skip
    assert stdout in done.stdout.decode("latin-1")


@pytest.mark.parametrize(
    ("words", "reason"),
    [("enqueue a -", "the payload is not JSON"), ("dlq purge inbound x", "stdin is not a terminal")],
)
def test_a_closed_standard_input_is_an_empty_one(words: str, reason: str) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "200"}
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m penstock {words} <&-', sys.executable],
        env=env, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert reason in done.stderr
