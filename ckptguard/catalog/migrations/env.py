"""Runs the migrations on the connection that `ckptguard.catalog.engine.upgrade` opened; nothing else starts it."""

from __future__ import annotations

from alembic import context

from ckptguard.catalog.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
