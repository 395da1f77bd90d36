"""Opens the catalog: makes or upgrades its tables, and says in plain words when it cannot."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from ckptguard.catalog.clean import to_json
from ckptguard.errors import ConfigError, MissingExtra, StoreError

BUSY_SECONDS = 15
MIGRATION_LOCK = 0x636B7074  # "ckpt": one migration at a time, whoever starts it


class Catalog:
    """A database with our tables. May be used from several threads; every use is one transaction."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writing = threading.RLock()

    @property
    def sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: all of it is kept, or nothing. Raises SQLAlchemyError when the database is gone."""
        if not self.sqlite:
            with self.engine.begin() as connection:
                yield connection
            return
        # SQLite has one writer. Queueing here is fair; its own busy handler sleeps and may starve a thread.
        with self._writing, self.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent view; nothing that is done here is kept."""
        with self.engine.connect() as connection:
            yield connection
            connection.rollback()

    def ping(self) -> None:
        """Return when the database answers. Raises SQLAlchemyError."""
        with self.read() as connection:
            connection.execute(text("SELECT 1"))

    def close(self) -> None:
        self.engine.dispose()


def open_catalog(url: str, *, migrate: bool = True) -> Catalog:
    """The catalog at a SQLAlchemy URL, its tables brought up to date. Raises ConfigError, MissingExtra, StoreError."""
    engine = _engine(url)
    try:
        if migrate:
            upgrade(engine)
    except SQLAlchemyError as error:
        engine.dispose()
        raise StoreError(
            f"{shown(url)}: {_plain(error)}",
            "is the database running, and may this user create tables in it?",
        ) from error
    return Catalog(engine)


def shown(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "the catalog's URL"


def check_url(url: str) -> URL:
    """The URL of a database that a catalog may be kept in; connects to nothing. Raises ConfigError."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(
            "the catalog's URL cannot be understood", "for example sqlite:////var/lib/ckptguard/catalog.db"
        ) from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigError(
            f"no catalog can be kept in {parsed.get_backend_name()}",
            "sqlite:///FILE or postgresql+psycopg://...",
        )
    return parsed


def _engine(url: str) -> Engine:
    parsed = check_url(url)
    options: dict[str, Any] = {
        "json_serializer": to_json,
        "pool_pre_ping": True,
    }
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database and parsed.database != ":memory:":
            try:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"{parsed.database}: {error.strerror}", "--db names another place"
                ) from error
        options["connect_args"] = {"timeout": BUSY_SECONDS}
    else:
        options |= {"pool_size": 10, "max_overflow": 20, "connect_args": {"connect_timeout": 10}}
    try:
        engine = create_engine(parsed, **options)
    except (ImportError, NoSuchModuleError) as error:
        raise MissingExtra("psycopg", "postgres", "a catalog in PostgreSQL") from error
    if backend == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    # The driver must not begin transactions by itself: BEGIN IMMEDIATE is ours.
    connection.isolation_level = None
    cursor = connection.cursor()
    # WAL: readers never wait for the writer. NORMAL: a killed process loses nothing; a power cut may lose the last
    # moments, which the watcher sees again.
    for pragma in (
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "foreign_keys=ON",
        f"busy_timeout={BUSY_SECONDS * 1000}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def upgrade(engine: Engine) -> None:
    """Bring the tables to the version of this program. Two programs that start at once wait for each other."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK})
        else:
            _begin_exclusive(connection)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()


def _begin_exclusive(connection: Connection) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            return
        except SQLAlchemyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _plain(error: SQLAlchemyError) -> str:
    """The database's own words, without the statement and its parameters."""
    origin = getattr(error, "orig", None)
    return " ".join(str(origin or error).split())[:300]
