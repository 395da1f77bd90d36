"""`ckptguard history`: what the catalog knows of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptguard.cli._output import emit_json, guarded, say
from ckptguard.cli.serve import absolute

EPILOG = """Examples:\n
  ckptguard history runs/a\n
  ckptguard history runs/a --json --db postgresql+psycopg://user@host/ckptguard"""


def register(app: typer.Typer) -> None:
    app.command(name="history", epilog=EPILOG)(history)


def history(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's path, its name, or its number.")],
    db: Annotated[
        str | None, typer.Option(metavar="URL", help="Catalog. [default: that of ckptguard serve]")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="So many of each, newest first.")] = 50,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the exit status.")] = False,
) -> None:
    """Show the checkpoints, verdicts, restores and alerts of a run, those that are gone too."""
    with guarded(json):
        document = known_of(run, db, limit)
        if json:
            emit_json(document)
        elif not quiet:
            _table(document)


def known_of(run: str, db: str | None, limit: int) -> dict[str, Any]:
    """The document. Raises TargetNotFound when the catalog does not know the run."""
    from ckptguard.catalog import queries
    from ckptguard.catalog.runs import find_run
    from ckptguard.errors import TargetNotFound
    from ckptguard.units import timestamp
    from ckptguard.web import present

    catalog = catalog_at(db)
    try:
        with catalog.read() as c:
            found = find_run(c, absolute(run)) or find_run(c, run)
            if found is None:
                raise TargetNotFound(
                    f"{run}: the catalog does not know this run", "is it watched by ckptguard serve?"
                )
            row = queries.one_run(c, found["id"])
            assert row is not None
            number = found["id"]
            events = queries.events_of(c, run=number, limit=limit)
            return {
                "schema": 1,
                "run": present.run(row),
                "checkpoints": [
                    present.checkpoint(r)
                    for r in queries.checkpoints_page(c, run=number, gone=True, limit=limit).items
                ],
                "findings": [
                    present.finding(r)
                    for r in queries.findings_page(c, run=number, gone=True, limit=limit).items
                ],
                "restores": [
                    present.restore(r) for r in queries.restores_page(c, run=number, limit=limit).items
                ],
                "alerts": [
                    present.alert(r, None) for r in queries.alerts_page(c, run=number, limit=limit).items
                ],
                "events": [
                    {
                        "at": timestamp(e["at"]),
                        "what": e["what"],
                        "checkpoint": e["path"],
                        "detail": e["detail"],
                    }
                    for e in events
                ],
            }
    finally:
        catalog.close()


def catalog_at(db: str | None) -> Any:
    """The catalog of an option, or the one that `ckptguard serve` uses by default."""
    from pydantic import SecretStr

    from ckptguard.catalog import open_catalog
    from ckptguard.settings import Settings, database_url

    return open_catalog(database_url(Settings(db=SecretStr(db) if db else None)))


def _table(document: dict[str, Any]) -> None:
    run = document["run"]
    risk = run["work_at_risk"] or {}
    say(f"{run['target']}: {run['state']}; {run['state_reason']}")
    say(f"resume from: {run['resume_from'] or 'nothing is proven safe'}")
    say(f"work at risk: {risk.get('steps')} steps, {risk.get('seconds')} s")
    names = ("step", "resume", "evidence", "phase", "completed", "judged", "path")
    lines = [names, *(tuple(_word(one[name]) for name in names) for one in reversed(document["checkpoints"]))]
    widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
    for line in lines:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())


def _word(value: Any) -> str:
    """A value on one line of a terminal, whatever characters a path has."""
    return "-" if value is None else "".join(c if c.isprintable() else "?" for c in str(value))
