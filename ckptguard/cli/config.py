"""`ckptguard config check`: whether a configuration can be used, and what it would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptguard.cli._output import emit_json, guarded, say


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="The service's configuration.")
    group.command(name="check", epilog="Example:  ckptguard config check team.yaml")(check)
    app.add_typer(group, name="config")


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the exit status.")] = False,
) -> None:
    """Read a configuration as the service would; a mistake is named with its line. Exit status: 0 good, 2 not."""
    with guarded(json):
        from ckptguard.cli._doubts import doubts
        from ckptguard.errors import ConfigError
        from ckptguard.jobs.context import open_routes
        from ckptguard.jobs.kinds import configured
        from ckptguard.settings import load

        settings = load(file)
        routes = open_routes(settings)
        wrong = list(doubts(settings))
        if wrong:
            raise ConfigError("\n".join(f"{file}: {one}" for one in wrong), "see docs/service.md")
        document = {
            "schema": 1,
            "file": str(file),
            "runs": [run.path for run in settings.runs],
            "discover": list(settings.discover),
            "sinks": [route.name for route in routes],
            "jobs": {name: kind.every(settings) for name, kind in configured(settings).items()},
        }
        if json:
            emit_json(document)
        say(
            f"{file}: good; runs: {len(settings.runs)}, sinks: {len(routes)}, jobs: {', '.join(configured(settings))}",
            quiet=quiet or json,
        )
