"""Where checkpoints lie: one backend a file, and wrappers that are Stores around a Store."""

from __future__ import annotations

from ckptguard.storage.opening import open_store

__all__ = ["open_store"]
