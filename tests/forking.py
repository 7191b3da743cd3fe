"""Commands of ours forked from a process that has loaded their modules: a start from nothing takes most of a second.

    with forked_commands():
        subprocess.run([sys.executable, "-m", "penstock", "up", "--detach"])

They are children of the caller as ever, with their own process id, environment, folder and output, and so are the
processes that `penstock up` starts in turn. What differs: all of Penstock is loaded, the interpreter is not taken apart
at the end, /proc shows the command line and the environment of the process that they were forked from, and a stack's
cluster is a copy of one that was made and migrated once. Tests of starts and imports run Python itself.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

_ROOT = Path(__file__).resolve().parents[1]
_STARTING = {"benchmarks", "examples.export.demo", "tests.chaos"}  # whose processes start others, as `penstock up` does
_FORKED = {"penstock", "penstock.local.suggestion", *_STARTING}
_MET_LATER = (  # modules that others import when they are used
    "anyio._backends._asyncio", "greenlet", "psutil", "sqlalchemy.ext.asyncio", "structlog", "uvicorn.lifespan.off",
)  # fmt: skip
_MESSAGE_BYTES = 128 * 1024
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_exec = subprocess._fork_exec  # type: ignore[attr-defined]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class Forks:
    """Instead of the function that makes a process for subprocess and asyncio: asks the process that forks."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def __call__(self, command: Any, executables: Any, *more: Any) -> int:
        words = [os.fsdecode(word) for word in command]
        if words[:2] != [sys.executable, "-m"] or words[2] not in _FORKED:
            return int(_exec(command, executables, *more))
        folder, env, stdin, stdout, stderr, new_session, before = (more[n] for n in (2, 3, 4, 7, 9, 13, 19))
        variables = dict(os.environ) if env is None else dict(os.fsdecode(entry).split("=", 1) for entry in env)
        request = {
            "words": words[2:], "env": variables, "folder": os.fsdecode(folder or os.getcwd()), "parent": os.getpid(),
            "new_session": bool(new_session), "dies_with_parent": before is not None,
        }  # fmt: skip
        files = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that it becomes a child of this process
        # An interrupt in between would leave the answer to the next that asks.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            return int(self._channel.recv(32))
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _serve(channel: socket.socket) -> None:
    """Fork a process for each request; returns in those only, in their place and with their argv."""
    while True:
        message, files, *_ = socket.recv_fds(channel, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork() != 0:
                os._exit(0)  # the process that asked is now the parent of that one
            request = json.loads(message)
            while os.getppid() != request["parent"]:
                if not Path(f"/proc/{request['parent']}").exists():
                    os._exit(1)  # it was killed meanwhile
                time.sleep(0.0005)
            _take_place(request, files)
            channel.send(str(os.getpid()).encode())
            channel.close()
            return
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def _take_place(request: dict[str, Any], files: list[int]) -> None:
    if request["new_session"]:
        os.setsid()
    if request["dies_with_parent"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [request["folder"], *(path for path in paths if path and path not in sys.path)]
    sys.argv[:] = request["words"]


def _run() -> None:
    """What `python -m` does with argv, in a process that was forked."""
    from penstock.local import service

    module, *arguments = sys.argv
    if module in _STARTING or arguments[:1] == ["up"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:  # a process that forks for this one, before anything has happened in it
            ours.close()
            _serve(theirs)
            _run()
            return
        theirs.close()
        subprocess._fork_exec = Forks(ours)  # type: ignore[attr-defined]
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # it starts processes without that function
        for _ in range(random.randrange(len(service._PORTS))):
            next(service._ports)  # each stack begins at another place
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        if not isinstance(exc.code, int | None):
            raise
        _end(exc.code or 0)
    _end(0)


def _end(code: int) -> None:
    """What Python does at its end, but for taking all modules apart: that costs as much as most of these commands."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _copy_clusters(folder: Path) -> None:
    """Copy a new cluster of the usual version from one in the folder, which the first that wants one makes for all."""
    from penstock.db.migrate import upgrade
    from penstock.local.postgres import EmbeddedPostgres
    from penstock.local.stack import DATABASE, Stack
    from tests.postgres_versions import quicken_logins

    initdb, made = EmbeddedPostgres._initdb, folder / "made"

    def copy(self: EmbeddedPostgres) -> None:
        if self.version != EmbeddedPostgres.version:
            initdb(self)
            return
        with (folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder / "postgres", ignore_errors=True)  # half made by one that was killed
                with mock.patch.object(EmbeddedPostgres, "_initdb", initdb):
                    server = EmbeddedPostgres(folder / "postgres")
                    server.start()
                    quicken_logins(server)
                    Stack._prepare_databases(SimpleNamespace(apps=()), server)  # type: ignore[arg-type]
                    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
                        thread.submit(upgrade, server.dsn(DATABASE)).result()
                    server.stop()
                made.touch()
        new = self.pgdata.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        subprocess.run(["cp", "--archive", folder / "postgres/pgdata", new], check=True)
        shutil.copy(folder / "postgres/password", self._password_path)
        new.rename(self.pgdata)

    EmbeddedPostgres._initdb = copy  # type: ignore[method-assign]


def _warm_up() -> None:
    """Do once what each process does first whatever its work is, which is half of the price of its start."""
    import botocore.session
    import httpx._transports.default

    from penstock.api.dashboard import routes

    for name in _MET_LATER:
        importlib.import_module(name)
    # The SDK's descriptions and all certificates, which each process would parse.
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    transports: Any = httpx._transports.default
    transports.create_ssl_context = functools.cache(transports.create_ssl_context)
    key = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    botocore.session.get_session().create_client("sqs", region_name="us-east-1", **key).close()
    httpx.Client().close()
    routes._templates()


def main() -> None:
    import penstock

    # Modules that do something when they are imported, and those for frameworks, which no process here has set up.
    left_out = ("penstock.__main__", "penstock.local.sqs_server", "penstock.local.suggestion", "penstock.contrib.")
    for found in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not found.name.startswith(left_out):
            with suppress(ImportError):  # of an extra that is not installed
                importlib.import_module(found.name)
    _warm_up()
    if "TEST_CLUSTER" in os.environ:
        _copy_clusters(Path(os.environ["TEST_CLUSTER"]))
    gc.collect()
    gc.freeze()
    channel = socket.socket(fileno=int(sys.argv[1]))
    _serve(channel)
    _run()


_channels: list[socket.socket] = []  # to the process that forks, once it was asked for


@contextmanager
def forked_commands() -> Iterator[None]:
    """Commands that are started in the block are forked; on Linux, elsewhere they are started as ever."""
    if sys.platform != "linux":
        yield
        return
    if not _channels:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            env = os.environ | {"PYTHONPATH": f"{_ROOT / 'services'}{os.pathsep}{_ROOT}", "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, "-m", "tests.forking", str(theirs.fileno())]
            subprocess.Popen(command, cwd=_ROOT, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        _channels.append(ours)
    with mock.patch.object(subprocess, "_fork_exec", Forks(_channels[0])):
        yield


if __name__ == "__main__":
    main()
