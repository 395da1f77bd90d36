"""The tables. Times are epoch seconds in UTC; JSON columns hold the contract's documents as they are.

History is appended: verdicts, findings, restores, saves, events and alerts are never changed into something else, they
end (`gone_at`, `resolved_at`). The columns of `runs` and `checkpoints` say what is true now, so that a page needs one query.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    text,
)

from ckptguard.catalog.clean import Words

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)
# SQLite numbers rows by itself only where the key is exactly INTEGER.
Big = BigInteger().with_variant(Integer, "sqlite")


def _id() -> Column[Any]:
    return Column("id", Big, primary_key=True, autoincrement=True)


def _of(table: str, *, nullable: bool = False) -> Column[Any]:
    return Column(f"{table[:-1]}_id", Big, ForeignKey(f"{table}.id", ondelete="CASCADE"), nullable=nullable)


runs = Table(
    "runs",
    metadata,
    _id(),
    Column("target", Words, nullable=False, unique=True),
    Column("name", Words, nullable=False),
    Column("layout", String(40)),
    Column("first_seen", Double, nullable=False),
    Column("looked_at", Double),
    Column("error", Words),
    Column("state", String(16), nullable=False, server_default="queued"),
    Column("state_since", Double),
    Column("state_reason", Words, nullable=False, server_default=""),
    Column("step", Big),
    Column("step_at", Double),
    Column("step_seconds", Double),
    Column("total_steps", Big),
    Column("gpus", Integer),
    Column("latest", Words),
    Column("newest_safe", Words),
    Column("resume_from", Words),
    Column("work_at_risk", JSON),
    Column("usual", JSON),
    Column("watched", Boolean, nullable=False, server_default=text("true")),
)

attempts = Table(
    "attempts",
    metadata,
    _id(),
    _of("runs"),
    Column("number", Integer, nullable=False),
    Column("first_step", Big),
    Column("last_step", Big),
    Column("started", Double),
    Column("ended", Double),
    UniqueConstraint("run_id", "number"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _id(),
    _of("runs"),
    Column("path", Words, nullable=False),
    Column("layout", String(40)),
    Column("step", Big),
    Column("attempt", Integer),
    Column("phase", String(16), nullable=False),
    Column("phase_since", Double, nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("changed_at", Double),
    Column("completed_at", Double),
    Column("modified", Double),
    Column("bytes", Big, nullable=False, server_default=text("0")),
    Column("files", Integer, nullable=False, server_default=text("0")),
    # Sizes, times and entity tags of all files in one digest: a verdict holds for what had this fingerprint.
    Column("fingerprint", String(40), nullable=False, server_default=""),
    Column("judged_fingerprint", String(40), nullable=False, server_default=""),
    Column("resume", String(10), nullable=False, server_default="unknown"),
    Column("evidence", String(10), nullable=False, server_default="listing"),
    Column("as_complete", Boolean, nullable=False, server_default=text("false")),
    Column("judged_at", Double),
    Column("proven_at", Double),
    Column("restored_at", Double),
    Column("restored_result", String(12)),
    Column("scrubbed_at", Double),
    Column("sealed", Boolean, nullable=False, server_default=text("false")),
    Column("components", JSON),
    Column("gaps", JSON),
    Column("coverage", JSON),
    Column("health", JSON),
    Column("gone_at", Double),
    UniqueConstraint("run_id", "path"),
    Index("ix_checkpoints_run_step", "run_id", "gone_at", "step"),
    Index("ix_checkpoints_proven", "gone_at", "proven_at"),
)

files = Table(
    "files",
    metadata,
    _id(),
    _of("checkpoints"),
    Column("name", Words, nullable=False),
    Column("size", Big, nullable=False),
    Column("modified", Double, nullable=False),
    Column("etag", Words),
    Column("block_size", Big, nullable=False),
    Column("blocks", JSON, nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("read_at", Double, nullable=False),
    UniqueConstraint("checkpoint_id", "name"),
    Index("ix_files_read_at", "read_at"),
)

tensors = Table(
    "tensors",
    metadata,
    _id(),
    _of("checkpoints"),
    Column("file", Words, nullable=False),
    Column("name", Words, nullable=False),
    Column("dtype", String(24), nullable=False),
    Column("shape", JSON, nullable=False),
    Column("nbytes", Big, nullable=False),
    Column("digest", String(40), nullable=False),
    Column("nonfinite", Big, nullable=False),
    Column("minimum", Double),
    Column("maximum", Double),
    Column("norm", Double),
    Index("ix_tensors_checkpoint", "checkpoint_id"),
)

verdicts = Table(
    "verdicts",
    metadata,
    _id(),
    _of("checkpoints"),
    Column("at", Double, nullable=False),
    Column("resume", String(10), nullable=False),
    Column("evidence", String(10), nullable=False),
    Column("fingerprint", String(40), nullable=False),
    Column("document", JSON, nullable=False),
    Index("ix_verdicts_checkpoint", "checkpoint_id", "at"),
)

findings = Table(
    "findings",
    metadata,
    _id(),
    _of("runs"),
    _of("checkpoints", nullable=True),
    # Which look this comes from: a later look of the same source says what still holds.
    Column("source", String(16), nullable=False),
    Column("code", String(40), nullable=False),
    Column("severity", String(8), nullable=False),
    Column("effect", String(8), nullable=False),
    Column("subject", Words, nullable=False),
    Column("message", Words, nullable=False),
    Column("hint", Words, nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("gone_at", Double),
    Index("ix_findings_open", "run_id", "gone_at", "severity"),
    Index("ix_findings_checkpoint", "checkpoint_id", "gone_at"),
    Index("ix_findings_code", "code"),
)

restores = Table(
    "restores",
    metadata,
    _id(),
    _of("checkpoints"),
    Column("at", Double, nullable=False),
    Column("result", String(12), nullable=False),
    Column("evidence", String(10), nullable=False),
    Column("bitwise", Boolean),
    Column("device", String(40), nullable=False, server_default=""),
    Column("seconds", Double, nullable=False),
    # The whole document, replayed steps included.
    Column("document", JSON, nullable=False),
    Index("ix_restores_checkpoint", "checkpoint_id", "at"),
)

saves = Table(
    "saves",
    metadata,
    _id(),
    _of("runs"),
    _of("checkpoints"),
    Column("step", Big),
    Column("started", Double, nullable=False),
    Column("completed", Double, nullable=False),
    Column("seconds", Double),
    # How long the training itself stood still, where the recorder says so.
    Column("blocked", Double),
    Column("bytes", Big, nullable=False),
    # Seen while it happened, or told by file times afterwards.
    Column("watched", Boolean, nullable=False),
    Index("ix_saves_run", "run_id", "completed"),
)

events = Table(
    "events",
    metadata,
    _id(),
    _of("runs"),
    _of("checkpoints", nullable=True),
    Column("at", Double, nullable=False),
    Column("what", String(24), nullable=False),
    Column("detail", Words, nullable=False),
    Index("ix_events_run", "run_id", "at"),
    Index("ix_events_checkpoint", "checkpoint_id", "at"),
)

uploads = Table(
    "uploads",
    metadata,
    _id(),
    _of("checkpoints"),
    Column("destination", Words, nullable=False),
    Column("started", Double, nullable=False),
    Column("completed", Double),
    Column("bytes", Big, nullable=False),
    Column("lag", Double),
    Column("verified", Boolean, nullable=False, server_default=text("false")),
    Column("error", Words),
    UniqueConstraint("checkpoint_id", "destination"),
)

logs = Table(
    "logs",
    metadata,
    _id(),
    _of("runs"),
    Column("file", Words, nullable=False),
    Column("rank", Integer),
    # Where reading goes on, and what the file was: a shorter or replaced one is read from its beginning.
    Column("position", Big, nullable=False),
    Column("size", Big, nullable=False),
    Column("step", Big),
    Column("at", Double),
    Column("interval", Double),
    Column("pause", Double),
    UniqueConstraint("run_id", "file"),
)

metrics = Table(
    "metrics",
    metadata,
    _id(),
    _of("runs"),
    Column("attempt", Integer, nullable=False),
    Column("step", Big, nullable=False),
    Column("at", Double),
    Column("loss", Double),
    Column("lr", Double),
    Column("grad_norm", Double),
    Column("loss_scale", Double),
    Index("ix_metrics_run", "run_id", "step"),
)

anomalies = Table(
    "anomalies",
    metadata,
    _id(),
    _of("runs"),
    Column("code", String(40), nullable=False),
    Column("severity", String(8), nullable=False),
    Column("first_step", Big),
    Column("last_step", Big),
    Column("scope", String(12), nullable=False),
    Column("evidence", Words, nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("gone_at", Double),
    Index("ix_anomalies_run", "run_id", "first_step"),
)

jobs = Table(
    "jobs",
    metadata,
    _id(),
    Column("name", String(24), nullable=False),
    _of("runs", nullable=True),
    _of("checkpoints", nullable=True),
    Column("origin", String(12), nullable=False),
    Column("state", String(12), nullable=False),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("queued_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("progress", Double),
    Column("doing", Words, nullable=False, server_default=""),
    Column("result", Words, nullable=False, server_default=""),
    Column("log", Words, nullable=False, server_default=""),
    Column("cancel", Boolean, nullable=False, server_default=text("false")),
    Index("ix_jobs_state", "state", "priority", "id"),
    Index("ix_jobs_name", "name", "queued_at"),
)

alerts = Table(
    "alerts",
    metadata,
    _id(),
    Column("key", Words, nullable=False),
    _of("runs"),
    _of("checkpoints", nullable=True),
    Column("code", String(40), nullable=False),
    Column("severity", String(8), nullable=False),
    Column("state", String(10), nullable=False),
    Column("title", Words, nullable=False),
    Column("message", Words, nullable=False),
    Column("hint", Words, nullable=False),
    Column("first_seen", Double, nullable=False),
    Column("said_at", Double, nullable=False),
    Column("resolved_at", Double),
    Index("ix_alerts_state", "state", "first_seen"),
    Index("ix_alerts_run", "run_id", "state"),
    # Two firing alerts of one key cannot be, whatever happens between two looks.
    Index(
        "uq_alerts_firing",
        "key",
        unique=True,
        sqlite_where=text("state = 'firing'"),
        postgresql_where=text("state = 'firing'"),
    ),
)

outbox = Table(
    "outbox",
    metadata,
    _id(),
    _of("alerts"),
    Column("sink", String(80), nullable=False),
    Column("document", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("due_at", Double, nullable=False),
    Column("tries", Integer, nullable=False, server_default=text("0")),
    Column("sent_at", Double),
    Column("dropped_at", Double),
    Column("error", Words),
    Index("ix_outbox_due", "sink", "sent_at", "due_at"),
)
