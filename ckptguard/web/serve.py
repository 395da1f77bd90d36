"""`ckptguard serve`: the service and its pages in one process, until somebody asks it to stop."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError

from ckptguard.catalog import open_catalog
from ckptguard.errors import ConfigError, StoreError, UsageError
from ckptguard.jobs.kinds import configured
from ckptguard.jobs.service import Service
from ckptguard.settings import (
    AlertSettings,
    RunSettings,
    Settings,
    database_url,
    server_token,
    token_is_given,
)
from ckptguard.web.app import create_app
from ckptguard.web.security import Policy, is_loopback
from ckptguard.web.state import State

STOP_SECONDS = 5


def serve(settings: Settings, ready: Callable[[str], None] | None = None) -> None:
    """Watch, work, alert and answer until SIGTERM or SIGINT. `ready` gets the address once pages are answered.

    Raises ConfigError, UsageError, MissingExtra, StoreError when it cannot start.
    """
    server = settings.server
    if not is_loopback(server.host) and not token_is_given(settings):
        raise ConfigError(
            f"listening on {server.host} needs a token that callers know",
            "set CKPTGUARD_TOKEN, or server.token in the configuration",
        )
    listener = _listen(server.host, server.port)
    with listener:
        port = listener.getsockname()[1]
        host = f"[{server.host}]" if ":" in server.host else server.host
        url = (server.url or f"http://{host}:{port}").rstrip("/")
        catalog = open_catalog(database_url(settings))
        try:
            service = Service(settings, catalog, url)
            state = State(
                catalog=catalog,
                settings=settings,
                health=service.context.health,
                kinds=configured(settings),
                queue=service.queue,
                next_times=service.next_times,
                token=server_token(settings),
                url=url,
                clock=service.context.clock,
                monotonic=service.context.monotonic,
            )
            _run(
                service,
                state,
                _policy(settings, state.token),
                listener,
                (lambda: ready(url)) if ready else None,
            )
        except SQLAlchemyError as error:
            raise StoreError(f"the catalog does not answer: {type(error).__name__}") from error
        finally:
            catalog.close()


def serve_runs(
    runs: Sequence[str], *, db: str | None = None, alerts: Sequence[str] = (), port: int = 8437,
    ready: Callable[[str], None] | None = None,
) -> None:  # fmt: skip
    """`serve` with nothing but run directories, for whoever embeds it."""
    given: dict[str, Any] = {"runs": tuple(RunSettings(path=run) for run in runs)}
    if db is not None:
        given["db"] = SecretStr(db)
    if alerts:
        given["alerts"] = tuple(AlertSettings(sink=SecretStr(sink)) for sink in alerts)
    settings = Settings(**given)
    serve(settings.model_copy(update={"server": settings.server.model_copy(update={"port": port})}), ready)


def _policy(settings: Settings, token: str) -> Policy:
    local = is_loopback(settings.server.host)
    # On loopback only names of this machine are answered to; elsewhere the token protects whatever the name.
    return Policy(token, open_reading=local, hosts=("localhost",) if local else ())


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "--port names another"
        ) from error
    return listener


def _run(
    service: Service, state: State, policy: Policy, listener: socket.socket, ready: Callable[[], None] | None
) -> None:
    config = uvicorn.Config(
        create_app(state, policy), log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_SECONDS, timeout_keep_alive=60,
        server_header=False, limit_concurrency=200, h11_max_incomplete_event_size=32 << 10,
    )  # fmt: skip
    server = _Server(config, ready)
    # uvicorn raises the signal again when it has ended; we still have to stop then.
    before = {sign: signal.signal(sign, _nothing) for sign in (signal.SIGTERM, signal.SIGINT)}
    try:
        service.start()
        server.run(sockets=[listener])
    finally:
        service.stop()
        for sign, handler in before.items():
            signal.signal(sign, handler)
    if not server.started:
        raise UsageError("the web server did not start")
    print("ckptguard: stopped", file=sys.stderr)


def _nothing(_sign: int, _frame: object) -> None:
    """A stop that is under way already."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready()
