"""What was seen, judged, restored and alerted: an append-only history in SQLite or PostgreSQL."""

from __future__ import annotations

from ckptguard.catalog.engine import Catalog, open_catalog

__all__ = ["Catalog", "open_catalog"]
