"""A function for Composer's checkpoint-validation hook, which asks it about every file before it is loaded:

export CHECKPOINT_VALIDATION_FUNCTION=ckptguard.integrations.composer.validate
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ckptguard.errors import FormatError, NothingRecognised
from ckptguard.inspect import Options, audit
from ckptguard.model import Severity

log = logging.getLogger("ckptguard")


def validate(
    checkpoint_filepath: str | os.PathLike[str], specs: Sequence[tuple[int, int]] | None = None
) -> bool:
    """Whether a checkpoint that Composer is about to load may be loaded; what is wrong is logged.

    A file or a folder. Composer downloads a file under a name that says nothing, so it is judged by its content alone, and
    a part of a sharded checkpoint by its container alone. `specs` (ranges that this rank will read) narrow nothing: a
    checkpoint with one damaged range is damaged. Raises StoreError where the file cannot be read.
    """
    path = Path(checkpoint_filepath)
    try:
        if path.is_dir():
            return _judge(path, str(path))
        with tempfile.TemporaryDirectory(prefix="ckptguard-composer-") as folder:
            # A link under a name that says what it is: the file itself stays as Composer left it.
            link = (
                Path(folder)
                / f"checkpoint{path.suffix if path.suffix in ('.pt', '.distcp', '.safetensors') else '.pt'}"
            )
            link.symlink_to(path.resolve())
            return _judge(link, str(path))
    except NothingRecognised as error:
        log.error("%s: %s", path, error.message)
        return False
    except FormatError as error:
        log.error("%s: %s", path, error)
        return False


def _judge(path: Path, shown: str) -> bool:
    verdicts = [v for report in audit(str(path), Options(grace=0.0)) for v in report.checkpoints]
    for verdict in verdicts:
        for finding in verdict.findings:
            if finding.severity > Severity.INFO:
                log.error("%s: %s: %s", shown, finding.code, finding.message)
    return bool(verdicts) and all(v.resume.safe for v in verdicts)
