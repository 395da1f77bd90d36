"""`ckptguard serve`: the service that watches runs beside the training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptguard.cli._output import emit_json, guarded, say

if TYPE_CHECKING:
    from ckptguard.settings import Settings

EPILOG = """Examples:\n
  ckptguard serve runs/a                                  watch one run; pages at http://127.0.0.1:8437\n
  ckptguard serve runs/a s3://bucket/runs/b --alert file:alerts.jsonl\n
  ckptguard serve --config team.yaml                      everything else: PostgreSQL, schedules, sinks, tokens\n
Exit status: 0 stopped on request, 2 could not start."""


def register(app: typer.Typer) -> None:
    app.command(name="serve", epilog=EPILOG)(serve)


def serve(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN...]", help="Run directories or s3:// prefixes to watch."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML configuration.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on; any but loopback needs a token. [default: 127.0.0.1]"),
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="[default: 8437]")] = None,
    db: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Catalog. [default: SQLite in the user's state directory]"),
    ] = None,
    alert: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SINK",
            help="file:PATH, http(s)://..., alertmanager:URL, stderr, or any Apprise URL; may be repeated.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the address as JSON once it answers.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but alerts and errors.")] = False,
) -> None:
    """Watch runs, prove their checkpoints again and again, alert, and show it all on a page."""
    with guarded(json):
        settings = settings_of(config, runs or [], host=host, port=port, db=db, alerts=alert or [])
        from ckptguard.settings import token_file, token_is_given
        from ckptguard.web.serve import serve as start

        def ready(url: str) -> None:
            if json:
                emit_json({"schema": 1, "url": url})
            say(f"ckptguard: watching {len(settings.runs)} runs; pages at {url}", quiet=quiet)
            if not token_is_given(settings):
                say(f"ckptguard: the token for write calls is in {token_file()}", quiet=quiet)

        start(settings, ready)


def settings_of(
    config: Path | None, runs: list[str], *, host: str | None = None, port: int | None = None,
    db: str | None = None, alerts: list[str] | None = None,
) -> Settings:  # fmt: skip
    """The configuration with what the command line adds to it. Raises ConfigError, UsageError."""
    from pydantic import SecretStr

    from ckptguard.errors import UsageError
    from ckptguard.settings import AlertSettings, RunSettings, Settings, load

    settings = load(config) if config is not None else Settings()
    configured = [run.model_copy(update={"path": absolute(run.path)}) for run in settings.runs]
    known = {run.path for run in configured}
    added = [RunSettings(path=path) for path in dict.fromkeys(map(absolute, runs)) if path not in known]
    changes: dict[str, Any] = {
        "runs": (*configured, *added),
        "discover": tuple(absolute(pattern) for pattern in settings.discover),
    }
    if db is not None:
        changes["db"] = SecretStr(db)
    if alerts:
        own = settings.alerts if "alerts" in settings.model_fields_set else ()
        changes["alerts"] = (*own, *(AlertSettings(sink=SecretStr(sink)) for sink in alerts))
    server = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    changes["server"] = settings.server.model_copy(update=server)
    settings = settings.model_copy(update=changes)
    if not settings.runs and not settings.discover:
        raise UsageError("nothing to watch", "name a run directory, or runs in a --config FILE")
    return settings


def absolute(path: str) -> str:
    """A local path from the root: the catalog outlives the folder that the service was started in."""
    return path.rstrip("/") if "://" in path else os.path.abspath(path)  # noqa: PTH100 - without a look at links
