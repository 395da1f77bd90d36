"""Records a training run, so that its checkpoints can be proven: in a plain loop, or under a trainer."""

from __future__ import annotations

from ckptguard.record.fingerprints import fingerprint, join_fingerprints
from ckptguard.record.recorder import Overhead, Recorder
from ckptguard.record.rng import next_draws

__all__ = ["Overhead", "Recorder", "fingerprint", "join_fingerprints", "next_draws"]
