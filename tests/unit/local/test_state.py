"""A data folder has one stack at a time, and its state file belongs to that one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from penstock.cli.local import logs
from penstock.local.state import DataDir, end_leftovers, stop_detached
from penstock.protocol.errors import StackError
from tests.conftest import reachable_folder
from tests.waiting import wait_until

STATE = {"api": "http://127.0.0.1:1", "sqs_endpoint_url": "http://127.0.0.1:2", "processes": []}
HOLD = "import sys,time; from pathlib import Path; from penstock.local.state import *\n" + (
    "held = DataDir(Path(sys.argv[1])).held(); held.__enter__(); print('held', flush=True); time.sleep(600)"
)


@pytest.fixture
def folder(tmp_path: Path) -> DataDir:
    result = DataDir(tmp_path / "data")
    result.prepare()
    return result


@pytest.fixture
def holder(folder: DataDir) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_second_stack_on_a_folder_is_told_who_runs_and_where(folder: DataDir, holder: subprocess.Popen[str]) -> None:
    folder.write_state(STATE)
    assert folder.holder() == holder.pid
    with pytest.raises(StackError, match=rf"process {holder.pid}.*{STATE['api']}.*penstock down"), folder.held():
        pass
    assert folder.read_state() == STATE


def test_holder_that_was_killed_leaves_the_folder_free(folder: DataDir, holder: subprocess.Popen[str]) -> None:
    folder.write_state(STATE)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert folder.holder() is None
    assert folder.read_state() is None
    assert folder.read_any_state() == STATE
    with folder.held() as left_behind:
        assert folder.holder() == os.getpid()
        assert left_behind == STATE
        assert folder.read_state() is None  # or it would pass for the state of the new holder


def test_lock_is_given_back_at_the_end_of_the_block(folder: DataDir) -> None:
    for _ in range(2):
        with folder.held():
            assert folder.holder() == os.getpid()
        assert folder.holder() is None


def test_a_stop_waits_for_the_process_id_of_a_stack_that_has_just_taken_the_folder(folder: DataDir) -> None:
    with folder.lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        let_go = threading.Timer(0.3, fcntl.flock, (file, fcntl.LOCK_UN))
        let_go.start()
        assert stop_detached(folder) is None
        let_go.join()


def test_state_is_private_and_replaced_whole(folder: DataDir) -> None:
    folder.write_state(STATE | {"database_url": "secret"})
    folder.write_state(STATE)
    assert stat.S_IMODE(folder.state.stat().st_mode) == 0o600
    assert json.loads(folder.state.read_text()) == STATE
    assert [path.name for path in folder.path.glob("state*")] == ["state.json"]


def test_broken_state_file_counts_as_none(folder: DataDir) -> None:
    with folder.held():
        folder.state.write_text("{")
        assert folder.read_state() is None


def test_folder_below_a_file_is_refused_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StackError, match="choose --data-dir"):
        DataDir(tmp_path / "file" / "data").prepare()


@contextmanager
def another_user() -> Iterator[None]:
    """As root, this process is another user within the block."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("hidden", ["data", "data/lock", "data/state.json", "data/penstock.log"])
def test_a_folder_of_another_user_is_reported_as_such(hidden: str) -> None:
    refusal = pytest.raises(
        StackError, match=r"data cannot be used as data folder \(Permission denied\): choose --data"
    )
    with reachable_folder() as above:
        above.chmod(0o755)
        folder = DataDir(above / "data")
        folder.prepare()
        folder.log.touch()
        with folder.held():
            folder.write_state(STATE)
            folder.path.chmod(0o755)
            folder.state.chmod(0o644)
            (above / hidden).chmod(0)
            with another_user(), refusal:
                logs(folder.path) if folder.log.name in hidden else folder.running_state()
            if hidden in ("data", "data/lock"):
                with another_user(), refusal, folder.held():
                    pass
            (above / hidden).chmod(0o755)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match="Not a directory"):
        DataDir(tmp_path / "file").running_state()


def test_leftover_is_ended_and_a_stranger_with_its_pid_is_not() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours, stranger = subprocess.Popen(command), subprocess.Popen(command)
    try:
        end_leftovers(
            {
                "processes": [
                    {"name": "api", "pid": ours.pid, "started": psutil.Process(ours.pid).create_time()},
                    {"name": "api", "pid": stranger.pid, "started": 1.0},
                    {"name": "worker-1", "pid": None, "started": 0.0},
                    {"name": "old entry"},
                ]
            }
        )
        wait_until(lambda: ours.poll() is not None, "the leftover to end")
        assert stranger.poll() is None
    finally:
        for process in (ours, stranger):
            process.kill()
            process.wait()
