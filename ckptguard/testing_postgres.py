"""A real PostgreSQL server for tests: in a temporary folder, on a Unix socket, as a user that is not root.

Needs Debian's package `postgresql`. What starts it stops it: use it as a context manager.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

_COUNT = itertools.count()


def _program(name: str) -> str | None:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


class PostgresServer:
    """One server. `stop` and `start` again keep what was stored."""

    def __init__(self) -> None:
        # A socket's path may have 107 bytes at most, so not below pytest's long folders.
        self.folder = Path(tempfile.mkdtemp(prefix="ckpg-"))
        self.data = self.folder / "data"
        self.as_user: list[str] = []
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root.
            self.as_user = ["runuser", "-u", "postgres", "--"]
            shutil.chown(self.folder, "postgres")

    @staticmethod
    def available() -> bool:
        return _program("initdb") is not None and _program("pg_ctl") is not None

    def __enter__(self) -> PostgresServer:
        self._run("initdb", "-D", str(self.data), "-A", "trust", "-U", "tester", "--no-sync", "-E", "UTF8")
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off -c max_connections=60"
        self._run(
            "pg_ctl", "-D", str(self.data), "-w", "-l", str(self.folder / "log"), "-o", options, "start"
        )

    def stop(self) -> None:
        """End the server at once, as a crash of its machine would, and every connection with it."""
        self._run("pg_ctl", "-D", str(self.data), "-w", "-m", "immediate", "stop", check=False)

    def database(self) -> str:
        """The URL of a fresh, empty database."""
        name = f"test_{os.getpid()}_{next(_COUNT)}"
        self._run(
            "psql", "-h", str(self.folder), "-U", "tester", "-d", "postgres", "-qc", f"CREATE DATABASE {name}"
        )
        return f"postgresql+psycopg://tester@/{name}?host={self.folder}"

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        path = _program(program)
        if path is None:
            raise FileNotFoundError(f"{program}: install Debian's package postgresql")
        done = subprocess.run(
            [*self.as_user, path, *arguments],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check and done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr or done.stdout}")
