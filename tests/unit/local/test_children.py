"""Children are restarted when they die, heard in whole lines, stopped together, and never outlive their parent."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from penstock.local.children import LINE_LIMIT_BYTES, Child, Children, Output, restart_pause
from penstock.local.service import python_path
from penstock.runtime.periodic import Pauses
from tests.waiting import wait_until

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


class Heard:
    """An Output and what was written to it."""

    def __init__(self, *, colour: bool = False) -> None:
        self.stream = io.BytesIO()
        self.output = Output(self.stream, colour=colour, width=4)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().decode().splitlines()


def child(name: str, code: str, *arguments: str) -> Child:
    return Child(name, [sys.executable, "-c", code, *arguments], dict(os.environ), 0)


async def until(condition: object, what: str) -> None:
    assert callable(condition)
    await asyncio.to_thread(wait_until, condition, what)


def test_restart_pauses_grow_and_are_short_again_after_a_healthy_life() -> None:
    pauses = Pauses(0.5)
    for expected in (0.5, 1, 2, 4, 8, 10, 10):
        assert expected / 2 - 0.1 <= restart_pause(0, pauses) <= expected
    assert restart_pause(31, pauses) <= 0.5
    assert 0.5 <= restart_pause(0, pauses) <= 1


async def test_killed_child_is_started_again_with_another_pid_and_published() -> None:
    heard, published = Heard(), []
    one = child("one", SLEEP)
    children = Children(heard.output, lambda: published.append(one.pid))
    children.keep(one)
    await until(lambda: heard.lines == ["one | up"], "the first start")
    assert one.pid is not None
    os.kill(one.pid, signal.SIGKILL)
    await until(lambda: heard.lines == ["one | up", "one | up"], "the second start")
    assert one.restarts == 1
    assert one.exit_codes == [-signal.SIGKILL]
    assert len(set(published)) == 2
    assert published[-1] == one.pid
    await children.stop(5)
    assert one.pid is None


async def test_child_gets_a_metrics_port_that_is_free() -> None:
    heard = Heard()
    one = child("one", "import os, time; print(os.environ['PENSTOCK_METRICS_PORT'], flush=True); time.sleep(600)")
    children = Children(heard.output, lambda: None)
    children.keep(one)
    await until(lambda: heard.lines, "a line")
    assert heard.lines == [f"one | {one.metrics_port}"]
    assert one.url == f"http://127.0.0.1:{one.metrics_port}"
    await children.stop(5)


async def test_stop_lets_the_willing_finish_and_kills_the_deaf_after_the_grace() -> None:
    willing = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('drained')))\n" + SLEEP
    heard = Heard()
    children = Children(heard.output, lambda: None)
    good, deaf = child("good", willing), child("deaf", DEAF)
    children.keep(good)
    children.keep(deaf)
    await until(lambda: len(heard.lines) == 2, "both to run")
    await children.stop(0.3)
    assert "good| drained" in heard.lines
    assert good.exit_codes == [0]
    assert deaf.exit_codes == [-signal.SIGKILL]


async def test_command_that_cannot_be_run_is_tried_again_and_breaks_nothing() -> None:
    one = Child("one", ["/nonexistent/program"], {}, 0)
    children = Children(Heard().output, lambda: None)
    children.keep(one)
    await until(lambda: one.restarts == 1, "the failed start to be noticed")
    children.check()
    await children.stop(1)


SPAWN = """
import subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(command, start_new_session=bool(sys.argv[1:])).pid)
"""


async def test_grandchild_is_ended_with_the_child_that_made_it() -> None:
    heard = Heard()
    async with asyncio.timeout(60):
        assert await child("one", SPAWN).run_once(heard.output, lambda: None) == 0
    pid = int(heard.lines[0].removeprefix("one | "))
    await until(lambda: not alive(pid), "the grandchild to be ended with its group")


async def test_grandchild_that_left_the_group_and_holds_the_pipe_does_not_hold_up_the_end() -> None:
    heard = Heard()
    async with asyncio.timeout(60):
        assert await child("one", SPAWN, "own session").run_once(heard.output, lambda: None) == 0
    pid = int(heard.lines[0].removeprefix("one | "))
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


async def test_output_keeps_lines_whole_and_breaks_only_endless_ones() -> None:
    heard = Heard()
    one = child("one", f"import sys; sys.stdout.write('a\\n' + 'b' * {LINE_LIMIT_BYTES + 70000} + '\\nc')")
    await one.run_once(heard.output, lambda: None)
    assert heard.lines[0] == "one | a"
    assert heard.lines[-1] == "one | c"
    assert sum(line.count("b") for line in heard.lines) == LINE_LIMIT_BYTES + 70000


def test_names_are_coloured_on_a_terminal_only() -> None:
    plain, coloured = Heard(), Heard(colour=True)
    for heard in (plain, coloured):
        heard.output.line("one", b"text")
    assert plain.lines == ["one | text"]
    assert coloured.lines == ["\x1b[36mone | \x1b[0mtext"]


def test_reader_that_went_away_does_not_break_the_writer() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb", buffering=0) as stream:
        Output(stream, colour=False).line("one", b"text")


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


PARENT = """
import asyncio, sys
from penstock.local.children import Child, Children, Output
async def main():
    children = Children(Output(sys.stdout.buffer, colour=False), lambda: None)
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    children.keep(Child("c", [sys.executable, "-c", code], {}, 0))
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_child_does_not_outlive_a_parent_killed_with_9(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": python_path()}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().partition("| ")[2])
        assert alive(pid)
        parent.kill()
        wait_until(lambda: not alive(pid), "the child to die with its parent")
