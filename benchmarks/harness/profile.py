"""Profiles of the processes during a run, by py-spy where it is installed."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import SettingsError
from penstock.runtime.logs import log

_PER_SECOND = 200


class Profiler:
    """Records each of our processes into ``FOLDER/PREFIX-NAME.raw``: collapsed stacks, one a line with its count.

    speedscope.app and flamegraph.pl open the files. Sampling takes some percent of the machine from the run, so its
    rates are not to be quoted. Raises SettingsError when py-spy is not installed.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        beside = Path(sys.executable).with_name("py-spy")
        found = str(beside) if beside.exists() else shutil.which("py-spy")
        if found is None:
            raise SettingsError("--profile needs py-spy: pip install py-spy")
        self._py_spy = found
        self._folder = folder
        self._prefix = re.sub("[^A-Za-z0-9-]+", "-", prefix)
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, processes: Sequence[Mapping[str, Any]]) -> None:
        """Begin to record every process that is one of ours, and the embedded SQS."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for entry in processes:
            if entry["name"] in ("postgres", "pgbouncer"):
                continue
            path = self._folder / f"{self._prefix}-{entry['name']}.raw"
            command = [self._py_spy, "record", "--pid", str(entry["pid"]), "--rate", str(_PER_SECOND)]
            command += ["--format", "raw", "--output", str(path)]
            self._running.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )

    def stop(self) -> None:
        """End recording and wait until the files are written."""
        running, self._running = self._running, []
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            try:
                _, said = process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                _, said = process.communicate()
            if process.returncode != 0:
                log.warning("profile_failed", code=process.returncode, said=said.decode("utf-8", "replace")[-500:])
