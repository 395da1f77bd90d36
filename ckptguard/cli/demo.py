"""`ckptguard demo`: a training, its proof, and five damages that are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Train a small model, audit and restore its checkpoints, then damage copies and watch each being caught.

Takes about a minute on a CPU, needs no GPU and no network, and writes into one folder only.

Example:

    ckptguard demo --into ckptguard-demo
"""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command("demo", help=HELP)
    def demo(
        into: Annotated[
            Path, typer.Option(help="The folder to write into; an earlier demo in it is replaced.")
        ] = Path("ckptguard-demo"),
    ) -> None:
        from ckptguard.demo.story import prepare, tell

        prepare(into)
        outcome = tell(into, typer.echo)
        raise typer.Exit(0 if outcome.kept else 1)
