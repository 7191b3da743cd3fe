"""A stack in the background: start it and wait until it is ready, stop it and wait until it is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.local.service import open_log, python_path, tail
from penstock.local.state import DataDir, processes
from penstock.protocol.errors import StackError

STOP_WITHIN_SECONDS = 120.0


def start_detached(data_dir: DataDir, arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run `penstock up` with ``arguments`` in a session of its own, output to `penstock.log`; returns its state.

    variables: for its environment. Raises StackError with the end of the log when it exits, or when one runs already.
    """
    data_dir.prepare()
    if data_dir.holder() is not None:
        raise StackError(data_dir.describe_holder())
    with open_log(data_dir.log) as output:
        began_at = output.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "penstock", "up", *arguments],
            env=os.environ | variables | {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            code = child.poll()
            if code is not None:
                words = tail(data_dir.log, 25, since=began_at)
                raise StackError(f"the stack did not start (exit code {code}); {data_dir.log} ends:\n{words}")
            if data_dir.holder() == child.pid and (state := data_dir.read_state()) is not None:
                return state
            time.sleep(0.05)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise


def stop(data_dir: DataDir) -> int | None:
    """Stop the stack of a folder and wait until it is gone; returns its process id, None when there was none."""
    pid = data_dir.holder()
    if pid is None:
        return None
    psutil = processes()
    try:
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return pid
    except PermissionError as exc:
        raise StackError(f"process {pid} belongs to another user: stop it as that user") from exc
    deadline = time.monotonic() + STOP_WITHIN_SECONDS
    while data_dir.holder() == pid:
        if time.monotonic() > deadline:
            raise StackError(f"process {pid} still stops after {STOP_WITHIN_SECONDS:g} s; see {data_dir.log}")
        time.sleep(0.05)
    with contextlib.suppress(psutil.Error):
        # It holds nothing any more; a zombie waits only for init, which in a container may take its time.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)
    return pid
