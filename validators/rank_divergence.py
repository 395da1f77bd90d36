from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ckptguard.codes import finding
from ckptguard.model import Evidence, Finding, Tensor
from ckptguard.ports import Subject


class RankDivergence:
    """Whether what all ranks hold alike is alike in all their files.

    Finds: files of one checkpoint that state another step, learning rate, loss scale, version or world size than the rest.
    Why it matters: such a file is of another save; it loads, and that rank continues from another point than the others.
    Example: rank 1's optimizer partition restored from the backup of an older checkpoint.
    What to do: take the file from a replica, or resume from the checkpoint before.
    Blind spots: files of two saves that agree in every replicated value (see masters); what ranks hold each on its own.
    """

    name = "rank-divergence"
    needs = Evidence.STRUCTURE
    codes = ("rank-divergence",)

    def run(self, subject: Subject) -> Iterator[Finding]:
        stated: dict[str, list[tuple[str, Any]]] = defaultdict(list)
        for file, values in subject.facts.state.replicated:
            for name, value in values.items():
                stated[name].append((file, _plain(value)))
        odd: dict[str, list[str]] = defaultdict(list)
        for name, pairs in stated.items():
            usual = _usual([value for _, value in pairs])
            for file, value in pairs:
                if value != usual:
                    odd[file].append(f"{name} {_short(value)}, not {_short(usual)}")
        for file, differences in odd.items():
            yield finding(
                "rank-divergence",
                file,
                f"{file} differs from the other ranks' files: {'; '.join(differences[:4])}",
            )


def _usual(values: list[Any]) -> Any:
    """What most files say; the first of them where no value has more than another."""
    return max(values, key=values.count)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        number = value.scalar()
        return (
            value.dtype,
            value.shape,
            number if number is not None else value.facts and value.facts.digest,
        )
    if isinstance(value, list):
        return tuple(_plain(v) for v in value)
    return "nan" if isinstance(value, float) and value != value else value


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."


CHECK = RankDivergence()
