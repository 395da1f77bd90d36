"""The pages, rendered on the server from the catalog. Everything that comes from elsewhere is escaped by the templates."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Request
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ckptguard.catalog import jobs as job_rows
from ckptguard.catalog import queries
from ckptguard.catalog.verdicts import history
from ckptguard.units import duration, size, timestamp
from ckptguard.web import charts, views
from ckptguard.web.api import ask_for
from ckptguard.web.models import MOST_ID, Cursor
from ckptguard.web.present import full_path
from ckptguard.web.security import COOKIE, Policy, session_of
from ckptguard.web.state import State

FOLDER = Path(__file__).parent
PAGE = 50
Id = Annotated[int, InPath(ge=1, le=MOST_ID)]
Show = Callable[..., HTMLResponse]


def environment(clock: Callable[[], float]) -> Environment:
    """The templates, with autoescape on for all of them, and an error for every name that does not exist."""
    env = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def ago(then: float) -> str:
        return _ago(clock(), then)

    env.filters |= {
        "iso": timestamp,
        "duration": duration,
        "size": size,
        "ago": ago,
        "number": lambda value: "" if value is None else f"{value:.4g}",
    }
    return env


def _ago(now: float, then: float) -> str:
    seconds = now - then
    if -2 < seconds < 2:
        return "now"
    return f"{duration(round(seconds))} ago" if seconds > 0 else f"in {duration(round(-seconds))}"


def router(state: State, policy: Policy) -> APIRouter:
    """All pages."""
    pages = APIRouter(include_in_schema=False)
    env = environment(state.clock)

    def show(request: Request, name: str, status: int = 200, **values: Any) -> HTMLResponse:
        text = env.get_template(name).render(
            signed_in=policy.proves(request.headers) is not None,
            health=state.health_document(),
            now=time.strftime("%H:%M:%S UTC", time.gmtime(state.clock())),
            path=request.url.path,
            **{"here": "", **values},
        )
        return HTMLResponse(text, status)

    _overview(pages, state, show)
    _run(pages, state, show)
    _checkpoint(pages, state, show)
    _jobs(pages, state, show)
    _session(pages, policy, show)
    return pages


def message(state: State, title: str, text: str, status: int, path: str) -> HTMLResponse:
    """A page that only says something: not found, not working."""
    body = environment(state.clock).get_template("message.html").render(
        title=title, message=text, signed_in=False, health=state.health_document(), path=path, here="",
        now=time.strftime("%H:%M:%S UTC", time.gmtime(state.clock())),
    )  # fmt: skip
    return HTMLResponse(body, status)


def _overview(pages: APIRouter, state: State, show: Show) -> None:
    @pages.get("/")
    def runs(request: Request, cursor: Cursor = None) -> HTMLResponse:
        with state.catalog.read() as c:
            page = queries.runs_page(c, cursor=cursor, limit=100)
        order = {"bad": 0, "unsure": 1, "good": 2}
        summaries = sorted((views.run_summary(run) for run in page.items), key=lambda r: order[r["tone"]])
        return show(request, "runs.html", runs=summaries, next=page.next, here="runs")

    @pages.get("/alerts")
    def alerts(request: Request, cursor: Cursor = None) -> HTMLResponse:
        with state.catalog.read() as c:
            firing = queries.alerts_page(c, state="firing", limit=queries.MOST).items
            healed = queries.alerts_page(c, state="resolved", cursor=cursor, limit=PAGE)
        return show(
            request, "alerts.html", firing=firing, resolved=healed.items, next=healed.next, here="alerts"
        )


def _run(pages: APIRouter, state: State, show: Show) -> None:
    @pages.get("/runs/{id}")
    def run(request: Request, id: Id, cursor: Cursor = None) -> HTMLResponse:
        within = state.settings.scrub.within if state.settings.scrub is not None else 0.0
        with state.catalog.read() as c:
            row = queries.one_run(c, id)
            if row is None:
                raise HTTPException(404, "there is no such run")
            line = [views.with_shown(r) for r in queries.timeline(c, id)]
            page = queries.checkpoints_page(c, run=id, gone=True, cursor=cursor, limit=PAGE)
            saves = queries.saves_of(c, id)
            curve = queries.curve_of(c, id)
            attempts = queries.attempts_of(c, id)
            anomalies = queries.anomalies_of(c, id, 20)
            rest: dict[str, Any] = {
                "alerts": queries.alerts_page(c, run=id, state="firing", limit=PAGE).items,
                "findings": queries.findings_page(c, run=id, of_run=True, limit=PAGE).items,
                "jobs": queries.jobs_page(c, run=id, limit=12).items,
                "events": queries.events_of(c, run=id, limit=24),
                "scrub": queries.scrub_state(c, id, state.clock() - within),
                "copies": queries.copies_of_run(c, id, 20),
            }
        rest["findings"] = views.with_hints(rest["findings"])
        times, sizes = views.save_charts(saves, row["usual"])
        safe = next((r["step"] for r in line if r["path"] == row["resume_from"]), None)
        summary = views.run_summary(row)
        summary["resume_full"] = full_path(row["target"], row["resume_from"])
        return show(
            request,
            "run.html",
            run=summary,
            timeline=charts.timeline(line, safe, row["step"]),
            checkpoints=views.by_step(page.items),
            next=page.next,
            loss=views.loss_chart(curve, line, attempts, anomalies),
            anomalies=anomalies,
            save_time=times,
            save_size=sizes,
            kinds=[k for k in state.kinds.values() if k.for_run],
            here="runs",
            **rest,
        )


def _checkpoint(pages: APIRouter, state: State, show: Show) -> None:
    @pages.get("/checkpoints/{id}")
    def checkpoint(request: Request, id: Id) -> HTMLResponse:
        with state.catalog.read() as c:
            found = queries.one_checkpoint(c, id)
            if found is None:
                raise HTTPException(404, "there is no such checkpoint")
            tensors, count = queries.tensors_of(c, id)
            verdicts = history(c, id, 20)
            restores = queries.restores_page(c, checkpoint=id, limit=5).items
            rest: dict[str, Any] = {
                "findings": [
                    # Of one that is gone: what held until it went.
                    f
                    for f in queries.findings_page(
                        c, checkpoint=id, gone=found["gone_at"] is not None, limit=100
                    ).items
                    if f["gone_at"] is None or f["gone_at"] >= found["gone_at"]
                ],
                "files": queries.files_of(c, id),
                "copies": queries.copies_of(c, id),
                "events": queries.events_of(c, checkpoint=id, limit=40),
            }
        row = views.with_shown(found)
        for verdict in verdicts:
            verdict["codes"] = sorted(
                {f["code"] for f in verdict["document"]["findings"] if f["severity"] != "info"}
            )
        tones = {"exact": "good", "lossy": "unsure", "unsafe": "bad"}
        rest["findings"] = views.with_hints(rest["findings"])
        return show(
            request,
            "checkpoint.html",
            row=row,
            pasted=quote(full_path(row["target"], row["path"]) or row["target"]),
            tone=tones.get(row["shown_resume"], ""),
            verdict=views.VERDICTS[row["shown_resume"]],
            proof=views.PROOFS[row["shown_evidence"]],
            components=views.components(row),
            tensors=tensors,
            tensor_count=count,
            history=verdicts,
            restores=[{**r, "charts": views.replay_charts(r["document"])} for r in restores],
            here="runs",
            **rest,
        )


def _jobs(pages: APIRouter, state: State, show: Show) -> None:
    @pages.get("/jobs")
    def jobs(request: Request, cursor: Cursor = None) -> HTMLResponse:
        with state.catalog.read() as c:
            page = queries.jobs_page(c, cursor=cursor, limit=PAGE)
        due = state.next_times()
        schedule = []
        for kind in state.kinds.values():
            times = [at for name, at in due.items() if name.split(":")[0] == kind.name]
            every = kind.every(state.settings)
            schedule.append(
                {"name": kind.name, "what": kind.what, "every": every, "next": min(times, default=None)}
            )
        return show(
            request,
            "jobs.html",
            jobs=page.items,
            next=page.next,
            schedule=schedule,
            kinds=[k for k in state.kinds.values() if not k.for_run],
            here="jobs",
        )

    @pages.get("/jobs/{id}")
    def job(request: Request, id: Id) -> HTMLResponse:
        with state.catalog.read() as c:
            row = queries.one_job(c, id)
        if row is None:
            raise HTTPException(404, "there is no such job")
        return show(request, "job.html", job=row, here="jobs")

    @pages.post("/jobs/run")
    async def run_now(request: Request) -> Response:
        form = await _form(request)
        run = form.get("run", "")
        if run and (not run.isdecimal() or len(run) > 15):
            raise HTTPException(422, "the run must be a number")
        job_id = ask_for(state, form.get("name", ""), int(run) if run else None)
        return RedirectResponse(f"/jobs/{job_id}", 303)

    @pages.post("/jobs/{id}/cancel")
    def cancel(id: Id) -> Response:
        with state.catalog.write() as c:
            if job_rows.cancel(c, id, state.clock()) is None:
                raise HTTPException(404, "there is no such job")
        return RedirectResponse(f"/jobs/{id}", 303)


def _session(pages: APIRouter, policy: Policy, show: Show) -> None:
    @pages.get("/login")
    def login(request: Request) -> HTMLResponse:
        return show(request, "login.html", next=_local(request.query_params.get("next", "/")), wrong=False)

    @pages.post("/login")
    async def sign_in(request: Request) -> Response:
        form = await _form(request)
        onward = _local(form.get("next", "/"))
        if not policy.is_token(form.get("token", "")):
            return show(request, "login.html", 403, next=onward, wrong=True)
        answer = RedirectResponse(onward, 303)
        answer.set_cookie(
            COOKIE, session_of(policy.token), max_age=30 * 86400, httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer

    @pages.post("/logout")
    def sign_out() -> Response:
        answer = RedirectResponse("/", 303)
        answer.delete_cookie(COOKIE)
        return answer


def _local(path: str) -> str:
    """Only a path of ours: never another site that somebody put into a link."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"


async def _form(request: Request) -> dict[str, str]:
    body = (await request.body()).decode("utf-8", "replace")
    try:
        return {name: values[0] for name, values in parse_qs(body, max_num_fields=16).items()}
    except ValueError:
        raise HTTPException(400, "the form cannot be understood") from None
