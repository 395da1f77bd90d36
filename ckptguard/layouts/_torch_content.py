"""Trainers that save one plain torch file, told by its content whatever its name is."""

from __future__ import annotations

from typing import Any

from ckptguard.layouts import _composer_state, _lightning_state
from ckptguard.layouts._state import Builder

KNOWN = (_lightning_state, _composer_state)


def interpret_known(builder: Builder, tree: Any, file: str) -> bool:
    """Interpret a tree that a known trainer saved, and name its layout; False where none recognises it."""
    for trainer in KNOWN:
        if trainer.holds(tree):
            trainer.interpret_tree(builder, tree, file)
            for gap in trainer.GAPS:
                builder.components.setdefault(gap, None if not builder.rngs or gap != "rng" else True)
            return True
    return False
