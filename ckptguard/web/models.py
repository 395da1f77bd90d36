"""The shapes of the API's answers and requests, for the OpenAPI document. Field names are the contract's."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")
MOST_ID = 2**53

Id = Annotated[int, Path(ge=1, le=MOST_ID)]
Ref = Annotated[int | None, Query(ge=1, le=MOST_ID)]
Word = Annotated[str | None, Query(max_length=64, pattern=r"^[a-z0-9-]+$")]
Cursor = Annotated[int | None, Query(ge=0, le=MOST_ID, description="`next` of the page before")]
Limit = Annotated[int, Query(ge=1, le=200)]
ResumeWord = Literal["exact", "lossy", "unknown", "unsafe"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Paged(_Answer, Generic[Item]):
    """One page of a list; `next` is the cursor of the following one, null at the end."""

    items: list[Item]
    next: int | None


class WorkAtRisk(_Answer):
    """What would be lost if the job died now."""

    steps: int | None
    seconds: float | None
    gpu_hours: float | None
    newest_safe: str | None
    evidence: str | None


class RunItem(_Answer):
    id: int
    target: str
    name: str
    state: str
    state_since: str | None
    state_reason: str
    step: int | None
    total_steps: int | None
    latest: str | None
    newest_safe: str | None
    resume_from: str | None
    work_at_risk: WorkAtRisk | None
    checkpoints: dict[str, int] = Field(description="how many there are, by resume")
    alerts: int
    looked_at: str | None
    error: str | None


class CheckpointItem(_Answer):
    id: int
    run: int
    path: str
    layout: str | None
    step: int | None
    resume: str
    evidence: str
    phase: str
    files: int
    bytes: int
    components: dict[str, bool | None]
    gaps: list[str]
    coverage: dict[str, Any]
    health: dict[str, Any]
    sealed: bool
    first_seen: str | None
    completed: str | None
    judged: str | None
    restored: str | None
    restored_result: str | None
    gone: str | None


class FindingItem(_Answer):
    id: int
    run: int
    checkpoint_id: int | None
    checkpoint: str | None
    code: str
    severity: str
    effect: str
    subject: str
    message: str
    hint: str
    first_seen: str | None
    gone: str | None


class CheckpointDetail(CheckpointItem):
    findings: list[FindingItem]


class RestoreItem(BaseModel):
    """The document of `restore`, with its place in the catalog."""

    model_config = ConfigDict(extra="allow")

    id: int
    run: int
    checkpoint_id: int
    at: str
    seconds: float
    result: str
    evidence: str


class JobItem(_Answer):
    id: int
    name: str
    run: int | None
    target: str | None
    origin: str
    state: str
    progress: float | None
    doing: str
    result: str
    queued: str | None
    started: str | None
    ended: str | None
    seconds: float | None


class JobDetail(JobItem):
    log: str


class AlertItem(_Answer):
    schema_: int = Field(alias="schema")
    id: int
    key: str
    state: str
    severity: str
    run: str
    run_id: int
    checkpoint: str | None
    checkpoint_id: int | None
    code: str
    title: str
    message: str
    hint: str
    first_seen: str | None
    resolved: str | None
    work_at_risk: WorkAtRisk | None
    url: str | None


class JobRequest(_Answer):
    """A configured job, by name; never a command or a recipe."""

    name: str = Field(min_length=1, max_length=40, pattern=r"^[a-z-]+$")
    run: int | None = Field(default=None, ge=1, le=MOST_ID)


class Problem(_Answer):
    part: str
    message: str
    since: str | None
    vital: bool


class HealthAnswer(_Answer):
    status: Literal["ok", "degraded", "failing"]
    problems: list[Problem]


class ErrorBody(_Answer):
    code: str
    message: str
    hint: str


class ErrorAnswer(_Answer):
    schema_: int = Field(alias="schema")
    error: ErrorBody
