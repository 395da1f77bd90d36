"""`ckptguard demo`: a training, its proof, and five damages that are caught."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptguard.cli._output import emit_json, guarded

EPILOG = """Examples:\n
  ckptguard demo                        the whole story, in ./ckptguard-demo\n
  ckptguard demo --into /tmp/demo       in another folder; an earlier demo in it is replaced\n
  ckptguard demo --serve                a training that goes on, watched live by the service and its page\n
Exit status: 0 the restore was proven and every damage was caught, 1 not so, 2 it could not be played."""


def register(app: typer.Typer) -> None:
    app.command(name="demo", epilog=EPILOG)(demo)


def demo(
    into: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Write into this folder, and nowhere else.")
    ] = Path("ckptguard-demo"),
    serve: Annotated[
        bool, typer.Option("--serve", help="Instead: train on and on, and watch it live on a page.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page, with --serve.")] = 8437,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only say where the page lies.")] = False,
) -> None:
    """Train a small model, audit and restore its checkpoints, then damage copies and see each caught. About a minute."""
    with guarded(json):
        from ckptguard.demo.story import prepare, tell

        prepare(into)
        if serve:
            from ckptguard.demo.live import watch_live

            watch_live(into, (lambda text: None) if quiet else typer.echo, port)
            raise typer.Exit(0)
        outcome = tell(into, (lambda text: None) if json or quiet else typer.echo)
        page = outcome.page.resolve()
        if json:
            emit_json(
                {
                    "schema": 1,
                    "result": outcome.result,
                    "bitwise": outcome.bitwise,
                    "caught": dict(outcome.caught),
                    "page": str(page),
                }
            )
        else:
            typer.echo(f"The proof, with its plots: {page.as_uri()}")
        raise typer.Exit(0 if outcome.kept else 1)
