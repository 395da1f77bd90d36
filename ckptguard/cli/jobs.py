"""`ckptguard jobs`: what the service works on; run one now, or cancel it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptguard.cli._output import emit_json, guarded, say
from ckptguard.cli.history import catalog_at
from ckptguard.cli.serve import absolute

Db = Annotated[str | None, typer.Option(metavar="URL", help="Catalog. [default: that of ckptguard serve]")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the exit status.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Jobs of the service: list, run, cancel.")
    group.command(name="list", epilog="Example:  ckptguard jobs list --run runs/a")(list_jobs)
    group.command(name="run", epilog="Example:  ckptguard jobs run audit-again --run runs/a")(run)
    group.command(name="cancel", epilog="Example:  ckptguard jobs cancel 17")(cancel)
    app.add_typer(group, name="jobs")


def list_jobs(
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only of this run.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 30,
    db: Db = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The newest jobs."""
    with guarded(json):
        from ckptguard.catalog import queries
        from ckptguard.web import present

        catalog = catalog_at(db)
        with catalog.read() as c:
            page = queries.jobs_page(c, run=_run_id(c, run), limit=limit)
        items = [present.job(row) for row in page.items]
        if json:
            emit_json({"schema": 1, "jobs": items})
        for item in [] if json or quiet else items:
            typer.echo(
                f"{item['id']:>6} {item['state']:<11} {item['name']:<12} {item['target'] or 'all'}  {item['result']}"
            )


def run(
    name: Annotated[str, typer.Argument(metavar="JOB", help="audit, audit-again, scrub, restore, ...")],
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run that it is for.")] = None,
    db: Db = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Queue a job; the service takes it within seconds."""
    with guarded(json):
        import time

        from ckptguard.catalog import jobs
        from ckptguard.errors import UsageError
        from ckptguard.jobs.kinds import KINDS
        from ckptguard.jobs.watch import URGENT

        kind = KINDS.get(name)
        if kind is None:
            raise UsageError(f"there is no job {name!r}", f"one of {', '.join(KINDS)}")
        if kind.for_run != (run is not None):
            raise UsageError(
                f"{name} is a job for {'one run: add --run RUN' if kind.for_run else 'all runs together'}"
            )
        catalog = catalog_at(db)
        with catalog.write() as c:
            number = jobs.enqueue(
                c,
                name,
                now=time.time(),
                run_id=_run_id(c, run),
                origin="person",
                priority=kind.priority + URGENT,
            )
        if json:
            emit_json({"schema": 1, "job": number})
        say(f"job {number} is queued", quiet=quiet or json)


def cancel(
    number: Annotated[int, typer.Argument(metavar="NUMBER", min=1)],
    db: Db = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask a job to stop."""
    with guarded(json):
        import time

        from ckptguard.catalog import jobs
        from ckptguard.errors import TargetNotFound

        catalog = catalog_at(db)
        with catalog.write() as c:
            before = jobs.cancel(c, number, time.time())
        if before is None:
            raise TargetNotFound(f"there is no job {number}", "ckptguard jobs list")
        if json:
            emit_json({"schema": 1, "job": number, "was": before})
        say(f"job {number} was {before}", quiet=quiet or json)


def _run_id(connection: Any, run: str | None) -> int | None:
    from ckptguard.catalog.runs import find_run
    from ckptguard.errors import TargetNotFound

    if run is None:
        return None
    found = find_run(connection, absolute(run)) or find_run(connection, run)
    if found is None:
        raise TargetNotFound(
            f"{run}: the catalog does not know this run", "is it watched by ckptguard serve?"
        )
    return int(found["id"])
