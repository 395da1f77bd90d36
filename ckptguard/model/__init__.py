"""The frozen data that the layers pass to one another. Standard library only.

target ─Store→ Entry ─Layout→ Manifest ─one pass→ FileFacts ─Layout→ State ─Checks→ Finding ─judge→ Verdict
"""

from __future__ import annotations

from ckptguard.model.listing import Directory, Entry
from ckptguard.model.manifest import Absence, Manifest, ManifestFile, Pointer
from ckptguard.model.reading import FileFacts, GlobalUse, Problem, Tensor, TensorFacts
from ckptguard.model.state import (
    CheckpointFacts,
    Counter,
    LoaderState,
    LogRow,
    OptimizerState,
    ParamGroup,
    ParamState,
    RngState,
    ScalerState,
    SchedulerState,
    State,
)
from ckptguard.model.verdict import Coverage, Finding, Health, NotRun, RunReport, Verdict
from ckptguard.model.words import Effect, Evidence, Resume, Role, Severity

__all__ = [
    "Absence",
    "CheckpointFacts",
    "Counter",
    "Coverage",
    "Directory",
    "Effect",
    "Entry",
    "Evidence",
    "FileFacts",
    "Finding",
    "GlobalUse",
    "Health",
    "LoaderState",
    "LogRow",
    "Manifest",
    "ManifestFile",
    "NotRun",
    "OptimizerState",
    "ParamGroup",
    "ParamState",
    "Pointer",
    "Problem",
    "Resume",
    "RngState",
    "Role",
    "RunReport",
    "ScalerState",
    "SchedulerState",
    "Severity",
    "State",
    "Tensor",
    "TensorFacts",
    "Verdict",
]
