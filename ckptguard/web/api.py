"""`/api/v1`: runs, checkpoints, findings, restores, jobs, alerts; and the two write calls."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query

from ckptguard.catalog import jobs, queries
from ckptguard.catalog.queries import Page
from ckptguard.web import models, present
from ckptguard.web.models import Cursor, Id, Limit, Ref, Word
from ckptguard.web.state import State

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": models.ErrorAnswer} for status in (400, 401, 403, 404, 409, 413, 421, 422, 503)
}


def router(state: State) -> APIRouter:
    """The routes of the API over one catalog."""
    api = APIRouter(prefix="/api/v1", responses=ERRORS, tags=["api"])
    _reading(api, state)
    _details(api, state)
    _writing(api, state)
    return api


def _paged(page: Page, make: Any) -> dict[str, Any]:
    return {"items": [make(row) for row in page.items], "next": page.next}


def _missing(what: str) -> HTTPException:
    return HTTPException(404, f"there is no such {what}")


def _reading(api: APIRouter, state: State) -> None:
    catalog = state.catalog

    @api.get("/runs")
    def runs(cursor: Cursor = None, limit: Limit = 100) -> models.Paged[models.RunItem]:
        """The runs that are watched."""
        with catalog.read() as c:
            return _paged(queries.runs_page(c, cursor=cursor, limit=limit), present.run)  # type: ignore[return-value]

    @api.get("/checkpoints")
    def checkpoints(
        run: Ref = None,
        resume: models.ResumeWord | None = None,
        since: Annotated[datetime | None, Query(description="first seen at or after")] = None,
        gone: bool = False,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> models.Paged[models.CheckpointItem]:
        """Checkpoints, newest first."""
        with catalog.read() as c:
            page = queries.checkpoints_page(
                c, run=run, resume=resume, since=_epoch(since), gone=gone, cursor=cursor, limit=limit
            )
        return _paged(page, present.checkpoint)  # type: ignore[return-value]

    @api.get("/findings")
    def findings(
        run: Ref = None, checkpoint: Ref = None, code: Word = None,
        severity: Literal["info", "warning", "error"] | None = None, gone: bool = False,
        cursor: Cursor = None, limit: Limit = 100,
    ) -> models.Paged[models.FindingItem]:  # fmt: skip
        """Findings, newest first; those that hold no more only with `gone`."""
        with catalog.read() as c:
            page = queries.findings_page(
                c,
                run=run,
                checkpoint=checkpoint,
                code=code,
                severity=severity,
                gone=gone,
                cursor=cursor,
                limit=limit,
            )
        return _paged(page, present.finding)  # type: ignore[return-value]

    @api.get("/restores")
    def restores(
        run: Ref = None, checkpoint: Ref = None,
        result: Literal["continuous", "diverged", "failed", "unproven"] | None = None,
        cursor: Cursor = None, limit: Limit = 100,
    ) -> models.Paged[models.RestoreItem]:  # fmt: skip
        """Restore validations, newest first."""
        with catalog.read() as c:
            page = queries.restores_page(
                c, run=run, checkpoint=checkpoint, result=result, cursor=cursor, limit=limit
            )
        return _paged(page, present.restore)  # type: ignore[return-value]

    @api.get("/jobs")
    def job_list(
        run: Ref = None, name: Word = None, state_: Annotated[Word, Query(alias="state")] = None,
        cursor: Cursor = None, limit: Limit = 100,
    ) -> models.Paged[models.JobItem]:  # fmt: skip
        """Runs of jobs, newest first."""
        with catalog.read() as c:
            page = queries.jobs_page(c, run=run, name=name, state=state_, cursor=cursor, limit=limit)
        return _paged(page, present.job)  # type: ignore[return-value]

    @api.get("/alerts")
    def alerts(
        run: Ref = None, state_: Annotated[Literal["firing", "resolved"] | None, Query(alias="state")] = None,
        severity: Literal["info", "warning", "error"] | None = None, cursor: Cursor = None, limit: Limit = 100,
    ) -> models.Paged[models.AlertItem]:  # fmt: skip
        """Alerts, newest first."""
        with catalog.read() as c:
            page = queries.alerts_page(
                c, run=run, state=state_, severity=severity, cursor=cursor, limit=limit
            )
        return _paged(page, lambda row: present.alert(row, page_of(state, row)))  # type: ignore[return-value]


def page_of(state: State, row: Any) -> str | None:
    """The address of the page about an alert."""
    if state.url is None:
        return None
    if row["checkpoint_id"] is not None:
        return f"{state.url}/checkpoints/{row['checkpoint_id']}"
    return f"{state.url}/runs/{row['run_id']}"


def _epoch(when: datetime | None) -> float | None:
    if when is None:
        return None
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()


def _details(api: APIRouter, state: State) -> None:
    catalog = state.catalog

    @api.get("/runs/{id}")
    def run(id: Id) -> models.RunItem:
        """One run."""
        with catalog.read() as c:
            row = queries.one_run(c, id)
        if row is None:
            raise _missing("run")
        return present.run(row)  # type: ignore[return-value]

    @api.get("/checkpoints/{id}")
    def checkpoint(id: Id) -> models.CheckpointDetail:
        """One checkpoint with its findings."""
        with catalog.read() as c:
            row = queries.one_checkpoint(c, id)
            found = queries.findings_page(c, checkpoint=id, limit=queries.MOST)
        if row is None:
            raise _missing("checkpoint")
        body = {**present.checkpoint(row), "findings": [present.finding(f) for f in found.items]}
        return body  # type: ignore[return-value]

    @api.get("/jobs/{id}")
    def job(id: Id) -> models.JobDetail:
        """One run of a job, with its log."""
        with catalog.read() as c:
            row = queries.one_job(c, id)
        if row is None:
            raise _missing("job")
        return present.job(row, log=True)  # type: ignore[return-value]


def _writing(api: APIRouter, state: State) -> None:
    catalog = state.catalog

    @api.post("/jobs", status_code=202)
    def run_now(request: models.JobRequest) -> models.JobDetail:
        """Run a configured job now. One that waits already is not queued twice."""
        job_id = ask_for(state, request.name, request.run)
        with catalog.read() as c:
            row = queries.one_job(c, job_id)
        assert row is not None
        return present.job(row, log=True)  # type: ignore[return-value]

    @api.post("/jobs/{id}/cancel", status_code=202)
    def cancel(id: Id) -> models.JobDetail:
        """Ask a job to stop. One that has ended already is a conflict."""
        with catalog.write() as c:
            before = jobs.cancel(c, id, state.clock())
            row = queries.one_job(c, id)
        if before is None or row is None:
            raise _missing("job")
        if before not in jobs.OPEN:
            raise HTTPException(409, f"the job has ended already: {before}")
        return present.job(row, log=True)  # type: ignore[return-value]


def ask_for(state: State, name: str, run_id: int | None) -> int:
    """Queue a configured job for a person. Raises HTTPException when there is no such job or run."""
    kind = state.kinds.get(name)
    if kind is None:
        raise HTTPException(
            404, f"no job of that name is configured; there are {', '.join(sorted(state.kinds))}"
        )
    if kind.for_run and run_id is None:
        raise HTTPException(422, f"{name} is a job for one run: name it with `run`")
    if not kind.for_run and run_id is not None:
        raise HTTPException(422, f"{name} is a job for all runs together")
    if run_id is not None:
        with state.catalog.read() as c:
            if queries.one_run(c, run_id) is None:
                raise _missing("run")
    return state.queue(name, run_id)
