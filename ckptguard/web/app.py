"""The application: pages, API, metrics and health behind one guard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from ckptguard.web import api, metrics, models, pages
from ckptguard.web.security import Guard, Policy
from ckptguard.web.state import State

CODES = {
    400: "usage",
    404: "not-found",
    405: "usage",
    409: "usage",
    422: "usage",
    403: "denied",
    503: "unreachable",
}


def create_app(state: State, policy: Policy) -> FastAPI:
    """The application over one catalog. It reads the catalog and queues configured jobs, nothing else."""
    from importlib.metadata import version

    app = FastAPI(
        title="ckptguard",
        version=version("ckptguard"),
        description="What is known of the checkpoints of every run. Lists are paged: `next` is the cursor of the next page.",
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(api.router(state))
    app.include_router(pages.router(state, policy))
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
    _service_routes(app, state)
    _errors(app, state)
    app.add_middleware(Guard, policy=policy)
    return app


def _service_routes(app: FastAPI, state: State) -> None:
    @app.get("/healthz", responses={503: {"model": models.HealthAnswer}}, tags=["service"])
    def healthz() -> models.HealthAnswer:
        """`ok`, `degraded` (something does not work, the service goes on) or, with 503, `failing`."""
        body = state.health_document()
        try:
            state.catalog.ping()
        except SQLAlchemyError as error:
            trouble = {"part": "catalog", "message": type(error).__name__, "since": None, "vital": True}
            body = {"status": "failing", "problems": [trouble, *body["problems"]]}
        return JSONResponse(body, 503 if body["status"] == "failing" else 200)  # type: ignore[return-value]

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {metrics.CONTENT_TYPE_LATEST: {}}}},
        tags=["service"],
    )
    def expose() -> Response:
        """OpenMetrics."""
        return Response(
            metrics.render(state), media_type=None, headers={"content-type": metrics.CONTENT_TYPE_LATEST}
        )


def _errors(app: FastAPI, state: State) -> None:
    """Errors as the contract's document, or as a page for whoever asked for one."""

    def answer(request: Request, status: int, text: str) -> Response:
        if request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", ""):
            code = CODES.get(status, "usage" if status < 500 else "internal")
            return JSONResponse({"schema": 1, "error": {"code": code, "message": text, "hint": ""}}, status)
        title = {404: "Not found", 503: "The catalog does not answer"}.get(status, "That did not work")
        return pages.message(state, title, text, status, request.url.path)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return answer(request, error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first: Any = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(request, 422, f"{where}: {first['msg']}")

    @app.exception_handler(SQLAlchemyError)
    async def gone(request: Request, error: SQLAlchemyError) -> Response:
        print(f"ckptguard: {request.url.path}: {type(error).__name__}", file=sys.stderr)
        return answer(request, 503, "the catalog does not answer; try again later")
