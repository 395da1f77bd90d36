"""How the ranks of a writer end."""

from __future__ import annotations

import os
import sys

import torch


def leave() -> None:
    """End this rank once all have written. Nothing is torn down: threads of gloo and DeepSpeed that are still at work
    abort the process now and then as they are destroyed, and what was written is not to be judged by that."""
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
