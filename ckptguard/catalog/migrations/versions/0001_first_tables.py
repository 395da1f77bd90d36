"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite numbers rows by itself only where the key is exactly INTEGER.
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("layout", sa.String(length=40), nullable=True),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("looked_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("state", sa.String(length=16), server_default="queued", nullable=False),
        sa.Column("state_since", sa.Double(), nullable=True),
        sa.Column("state_reason", sa.Text(), server_default="", nullable=False),
        sa.Column("step", BIG, nullable=True),
        sa.Column("step_at", sa.Double(), nullable=True),
        sa.Column("step_seconds", sa.Double(), nullable=True),
        sa.Column("total_steps", BIG, nullable=True),
        sa.Column("gpus", sa.Integer(), nullable=True),
        sa.Column("latest", sa.Text(), nullable=True),
        sa.Column("newest_safe", sa.Text(), nullable=True),
        sa.Column("resume_from", sa.Text(), nullable=True),
        sa.Column("work_at_risk", sa.JSON(), nullable=True),
        sa.Column("usual", sa.JSON(), nullable=True),
        sa.Column("watched", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("target", name=op.f("uq_runs_target")),
    )
    op.create_table(
        "anomalies",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("code", sa.String(length=40), nullable=False),
        sa.Column("severity", sa.String(length=8), nullable=False),
        sa.Column("first_step", BIG, nullable=True),
        sa.Column("last_step", BIG, nullable=True),
        sa.Column("scope", sa.String(length=12), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("gone_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_anomalies_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_anomalies")),
    )
    op.create_index("ix_anomalies_run", "anomalies", ["run_id", "first_step"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("first_step", BIG, nullable=True),
        sa.Column("last_step", BIG, nullable=True),
        sa.Column("started", sa.Double(), nullable=True),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_attempts_run_id")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("layout", sa.String(length=40), nullable=True),
        sa.Column("step", BIG, nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("phase_since", sa.Double(), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=True),
        sa.Column("completed_at", sa.Double(), nullable=True),
        sa.Column("modified", sa.Double(), nullable=True),
        sa.Column("bytes", BIG, server_default=sa.text("0"), nullable=False),
        sa.Column("files", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("fingerprint", sa.String(length=40), server_default="", nullable=False),
        sa.Column("judged_fingerprint", sa.String(length=40), server_default="", nullable=False),
        sa.Column("resume", sa.String(length=10), server_default="unknown", nullable=False),
        sa.Column("evidence", sa.String(length=10), server_default="listing", nullable=False),
        sa.Column("as_complete", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("judged_at", sa.Double(), nullable=True),
        sa.Column("proven_at", sa.Double(), nullable=True),
        sa.Column("restored_at", sa.Double(), nullable=True),
        sa.Column("restored_result", sa.String(length=12), nullable=True),
        sa.Column("scrubbed_at", sa.Double(), nullable=True),
        sa.Column("sealed", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("components", sa.JSON(), nullable=True),
        sa.Column("gaps", sa.JSON(), nullable=True),
        sa.Column("coverage", sa.JSON(), nullable=True),
        sa.Column("health", sa.JSON(), nullable=True),
        sa.Column("gone_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("run_id", "path", name=op.f("uq_checkpoints_run_id")),
    )
    op.create_index("ix_checkpoints_proven", "checkpoints", ["gone_at", "proven_at"], unique=False)
    op.create_index("ix_checkpoints_run_step", "checkpoints", ["run_id", "gone_at", "step"], unique=False)
    op.create_table(
        "logs",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("position", BIG, nullable=False),
        sa.Column("size", BIG, nullable=False),
        sa.Column("step", BIG, nullable=True),
        sa.Column("at", sa.Double(), nullable=True),
        sa.Column("interval", sa.Double(), nullable=True),
        sa.Column("pause", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_logs_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_logs")),
        sa.UniqueConstraint("run_id", "file", name=op.f("uq_logs_run_id")),
    )
    op.create_table(
        "metrics",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", BIG, nullable=False),
        sa.Column("at", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("lr", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("loss_scale", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_metrics_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metrics")),
    )
    op.create_index("ix_metrics_run", "metrics", ["run_id", "step"], unique=False)
    op.create_table(
        "alerts",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=True),
        sa.Column("code", sa.String(length=40), nullable=False),
        sa.Column("severity", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=10), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("said_at", sa.Double(), nullable=False),
        sa.Column("resolved_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_alerts_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_alerts_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index("ix_alerts_run", "alerts", ["run_id", "state"], unique=False)
    op.create_index("ix_alerts_state", "alerts", ["state", "first_seen"], unique=False)
    op.create_index(
        "uq_alerts_firing",
        "alerts",
        ["key"],
        unique=True,
        sqlite_where=sa.text("state = 'firing'"),
        postgresql_where=sa.text("state = 'firing'"),
    )
    op.create_table(
        "events",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("what", sa.String(length=24), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_events_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index("ix_events_checkpoint", "events", ["checkpoint_id", "at"], unique=False)
    op.create_index("ix_events_run", "events", ["run_id", "at"], unique=False)
    op.create_table(
        "files",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("size", BIG, nullable=False),
        sa.Column("modified", sa.Double(), nullable=False),
        sa.Column("etag", sa.Text(), nullable=True),
        sa.Column("block_size", BIG, nullable=False),
        sa.Column("blocks", sa.JSON(), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("read_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_files_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
        sa.UniqueConstraint("checkpoint_id", "name", name=op.f("uq_files_checkpoint_id")),
    )
    op.create_index("ix_files_read_at", "files", ["read_at"], unique=False)
    op.create_table(
        "findings",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=True),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("code", sa.String(length=40), nullable=False),
        sa.Column("severity", sa.String(length=8), nullable=False),
        sa.Column("effect", sa.String(length=8), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=False),
        sa.Column("gone_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_findings_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_findings_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_findings")),
    )
    op.create_index("ix_findings_checkpoint", "findings", ["checkpoint_id", "gone_at"], unique=False)
    op.create_index("ix_findings_code", "findings", ["code"], unique=False)
    op.create_index("ix_findings_open", "findings", ["run_id", "gone_at", "severity"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("name", sa.String(length=24), nullable=False),
        sa.Column("run_id", BIG, nullable=True),
        sa.Column("checkpoint_id", BIG, nullable=True),
        sa.Column("origin", sa.String(length=12), nullable=False),
        sa.Column("state", sa.String(length=12), nullable=False),
        sa.Column("priority", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("queued_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("progress", sa.Double(), nullable=True),
        sa.Column("doing", sa.Text(), server_default="", nullable=False),
        sa.Column("result", sa.Text(), server_default="", nullable=False),
        sa.Column("log", sa.Text(), server_default="", nullable=False),
        sa.Column("cancel", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_jobs_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_jobs_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index("ix_jobs_name", "jobs", ["name", "queued_at"], unique=False)
    op.create_index("ix_jobs_state", "jobs", ["state", "priority", "id"], unique=False)
    op.create_table(
        "restores",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("result", sa.String(length=12), nullable=False),
        sa.Column("evidence", sa.String(length=10), nullable=False),
        sa.Column("bitwise", sa.Boolean(), nullable=True),
        sa.Column("device", sa.String(length=40), server_default="", nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_restores_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_restores")),
    )
    op.create_index("ix_restores_checkpoint", "restores", ["checkpoint_id", "at"], unique=False)
    op.create_table(
        "saves",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=False),
        sa.Column("step", BIG, nullable=True),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("completed", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("blocked", sa.Double(), nullable=True),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("watched", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_saves_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_saves_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_saves")),
    )
    op.create_index("ix_saves_run", "saves", ["run_id", "completed"], unique=False)
    op.create_table(
        "tensors",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=False),
        sa.Column("file", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("dtype", sa.String(length=24), nullable=False),
        sa.Column("shape", sa.JSON(), nullable=False),
        sa.Column("nbytes", BIG, nullable=False),
        sa.Column("digest", sa.String(length=40), nullable=False),
        sa.Column("nonfinite", BIG, nullable=False),
        sa.Column("minimum", sa.Double(), nullable=True),
        sa.Column("maximum", sa.Double(), nullable=True),
        sa.Column("norm", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_tensors_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tensors")),
    )
    op.create_index("ix_tensors_checkpoint", "tensors", ["checkpoint_id"], unique=False)
    op.create_table(
        "uploads",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=False),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("completed", sa.Double(), nullable=True),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("lag", sa.Double(), nullable=True),
        sa.Column("verified", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_uploads_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
        sa.UniqueConstraint("checkpoint_id", "destination", name=op.f("uq_uploads_checkpoint_id")),
    )
    op.create_table(
        "verdicts",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("checkpoint_id", BIG, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("resume", sa.String(length=10), nullable=False),
        sa.Column("evidence", sa.String(length=10), nullable=False),
        sa.Column("fingerprint", sa.String(length=40), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name=op.f("fk_verdicts_checkpoint_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verdicts")),
    )
    op.create_index("ix_verdicts_checkpoint", "verdicts", ["checkpoint_id", "at"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("alert_id", BIG, nullable=False),
        sa.Column("sink", sa.String(length=80), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=True),
        sa.Column("dropped_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["alert_id"], ["alerts.id"], name=op.f("fk_outbox_alert_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_index("ix_outbox_due", "outbox", ["sink", "sent_at", "due_at"], unique=False)


def downgrade() -> None:
    for table in (
        "outbox",
        "verdicts",
        "uploads",
        "tensors",
        "saves",
        "restores",
        "jobs",
        "findings",
        "files",
        "events",
        "alerts",
        "metrics",
        "logs",
        "checkpoints",
        "attempts",
        "anomalies",
        "runs",
    ):
        op.drop_table(table)
