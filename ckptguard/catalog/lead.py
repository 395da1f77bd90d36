"""One service leads: a lock that the database, or the operating system, frees when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from ckptguard.catalog.engine import Catalog

LEAD_LOCK = 0x6C656164  # "lead"


class Lead:
    """Held by the service that schedules. `hold` is asked again and again: a database that restarts frees every lock."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._connection: Connection | None = None
        self._file: int | None = None

    def hold(self) -> bool:
        """Whether we lead, after trying to. False while another one does, or while the database is gone."""
        return self._hold_file() if self._catalog.sqlite else self._hold_session()

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._connection is not None:
            try:
                self._connection.close()
            except SQLAlchemyError:
                # The server is gone, and the lock with it.
                self._connection.invalidate()
            self._connection = None

    def _hold_file(self) -> bool:
        if self._file is not None:
            return True
        database = self._catalog.engine.url.database
        if not database or database == ":memory:":
            return True
        descriptor = os.open(Path(f"{database}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._file = descriptor
        return True

    def _hold_session(self) -> bool:
        try:
            if self._connection is not None:
                self._connection.execute(text("SELECT 1"))
                self._connection.commit()
                return True
        except SQLAlchemyError:
            self._connection.invalidate()  # type: ignore[union-attr]
            self._connection = None
        try:
            connection = self._catalog.engine.connect()
            taken = connection.execute(
                text("SELECT pg_try_advisory_lock(:lock)"), {"lock": LEAD_LOCK}
            ).scalar()
            connection.commit()
        except SQLAlchemyError:
            return False
        if not taken:
            connection.close()
            return False
        self._connection = connection
        return True
