"""Readers of metric logs, one kind a file; `read_logs` finds the one that a run has."""

from __future__ import annotations

from ckptguard.logs.search import read_log, read_logs

__all__ = ["read_log", "read_logs"]
