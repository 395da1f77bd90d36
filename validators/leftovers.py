from __future__ import annotations

from collections.abc import Iterator

from ckptguard.codes import finding
from ckptguard.model import Finding
from ckptguard.ports import RunSubject


class Leftovers:
    """What saves and rotations left behind.

    Finds: temporary names older than a complete checkpoint, and older directories without completion mark or weights.
    Why it matters: they take space, and some frameworks' searches pick them up.
    Example: `ckpt_20.pt.tmp` beside a complete `ckpt_30.pt`.
    What to do: delete them when the training is not running (ckptguard prune lists them).
    Blind spots: what no layout recognises.
    """

    name = "leftovers"
    codes = ("debris",)

    def run(self, subject: RunSubject) -> Iterator[Finding]:
        for manifest in subject.leftovers:
            yield finding(
                "debris",
                manifest.path,
                f"{manifest.path}: {manifest.size} bytes of a save or rotation that is no checkpoint",
            )


RUN_CHECK = Leftovers()
