"""`ckptguard alert test`: sends a test alert, so that nobody learns in the night that a sink does not work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ckptguard.cli._output import emit_json, guarded, say


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Alert sinks.")
    group.command(
        name="test",
        epilog="Examples:  ckptguard alert test file:alerts.jsonl   or:  ckptguard alert test --config team.yaml",
    )(test)
    app.add_typer(group, name="alert")


def test(
    sinks: Annotated[
        list[str] | None, typer.Argument(metavar="[SINK...]", help="Sinks as for serve --alert.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Test the sinks of a configuration.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the exit status.")] = False,
) -> None:
    """Send one firing and one resolved test alert to each sink. Exit status: 0 all took them, 1 one did not."""
    with guarded(json):
        from pydantic import SecretStr

        from ckptguard.errors import CkptguardError, UsageError
        from ckptguard.jobs.context import open_routes
        from ckptguard.settings import AlertSettings, Settings, load

        settings = load(config) if config is not None else Settings(alerts=())
        given = tuple(AlertSettings(sink=SecretStr(sink)) for sink in sinks or ())
        routes = open_routes(settings.model_copy(update={"alerts": (*settings.alerts, *given)}))
        if not routes:
            raise UsageError("no sink to test", "name one, or a --config FILE")
        results: list[dict[str, Any]] = []
        for route in routes:
            error = None
            try:
                for alert in examples():
                    route.sink.send(alert)
            except CkptguardError as failure:
                error = failure.message
            results.append({"sink": route.name, "ok": error is None, "error": error})
            say(f"{route.name}: {error or 'took it'}", quiet=quiet or json)
        if json:
            emit_json({"schema": 1, "sinks": results})
        raise typer.Exit(0 if all(r["ok"] for r in results) else 1)


def examples() -> list[dict[str, Any]]:
    """A test alert, and its end."""
    import time

    from ckptguard.units import timestamp

    alert: dict[str, Any] = {
        "schema": 1,
        "key": "ckptguard:test",
        "state": "firing",
        "severity": "warning",
        "run": "test",
        "checkpoint": None,
        "code": "test",
        "title": "test: this is a test of ckptguard's alerts",
        "message": "nothing is wrong; somebody ran ckptguard alert test",
        "hint": "nothing to do",
        "first_seen": timestamp(time.time()),
        "work_at_risk": None,
        "url": None,
    }
    return [alert, {**alert, "state": "resolved"}]
