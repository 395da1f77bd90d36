"""Restore validation: real objects, replayed steps, compared. Torch is imported in the child processes only."""

from __future__ import annotations

from ckptguard.restore.model import Limits, RestoreReport
from ckptguard.restore.request import Request
from ckptguard.restore.validation import validate

__all__ = ["Limits", "Request", "RestoreReport", "validate"]
