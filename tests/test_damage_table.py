"""One table: what is done to a checkpoint, against every layout, and what must be said of it.

A layout is added by one line in SAMPLES. A cell in BLIND is a blind spot that is known: the test holds that it really is
one, and docs/blind-spots.md lists it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ckptguard.cli import build_app
from ckptguard.discover import find_checkpoints
from ckptguard.errors import NothingRecognised
from ckptguard.inspect import Options, audit
from ckptguard.layouts._base import build_directory
from ckptguard.model import Evidence, Manifest, ManifestFile, Resume, Role
from ckptguard.registry import layouts
from ckptguard.storage.local import LocalStore
from ckptguard.testing_damage import (
    append,
    drop,
    empty,
    extent_of,
    flip,
    resave,
    splice,
    swap,
    truncate,
    zero_fill,
    zero_range,
)

ROOT = Path(__file__).resolve().parents[1]
CORPUS = Path(os.environ.get("CKPTGUARD_CORPUS") or ROOT.parent / "shared" / "corpus")


# --- the columns: a run of each layout ----------------------------------------------------------------


def plain_loop(folder: Path, **save: Any) -> None:
    """A run of torch files by a plain loop."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 48), torch.nn.Linear(48, 96), torch.nn.Linear(96, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step in range(1, 21):
        optimizer.zero_grad()
        model(torch.randint(0, 64, (4, 8))).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng": torch.get_rng_state(),
                "step": step,
            }
            torch.save(state, folder / f"ckpt_{step}.pt", **save)


def from_corpus(case: str, inside: str = ".") -> Callable[[Path], None]:
    """A healthy run of the shared corpus, written by the framework itself."""

    def make(folder: Path) -> None:
        source = CORPUS / case / "input"
        if not source.is_dir():
            pytest.skip(f"no corpus at {CORPUS}: name it by CKPTGUARD_CORPUS")
        shutil.copytree(source / inside, folder, dirs_exist_ok=True, symlinks=True)

    return make


SAMPLES: dict[str, Callable[[Path], None]] = {
    "torch-file": plain_loop,
    "torch-file, old format": lambda folder: plain_loop(folder, _use_new_zipfile_serialization=False),
    "safetensors": from_corpus("st-single"),
    "safetensors, sharded": from_corpus("st-sharded"),
    "hf-trainer": from_corpus("hf-base"),
    "hf-trainer, LoRA": from_corpus("hf-lora"),
    "accelerate": from_corpus("acc-two"),
    "dcp": from_corpus("dcp-fsdp2"),
    "torchtitan": from_corpus("titan"),
    "deepspeed, ZeRO 1": from_corpus("ds-zero1"),
    "deepspeed, ZeRO 3": from_corpus("ds-zero3"),
    "megatron": from_corpus("mcore"),
    "lightning": from_corpus("pl-base"),
    "orbax": from_corpus("orbax"),
}


# --- the rows: what is done, and what must be found ---------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """One checkpoint of a run with its neighbour before, and the files that play the parts."""

    root: Path
    manifest: Manifest
    before: Manifest | None

    def path(self, file: ManifestFile) -> Path:
        return self.root / file.entry.key

    def largest(self, *roles: Role) -> Path | None:
        files = [f for r in roles for f in self.manifest.by_role(r) if f.entry.kind == "file"]
        return self.path(max(files, key=lambda f: f.entry.size)) if files else None

    @property
    def weights(self) -> Path:
        path = self.largest(Role.MODEL, Role.BUNDLE, Role.SHARD)
        assert path is not None
        return path

    def twin(self, path: Path) -> Path | None:
        """The same file of the checkpoint before."""
        if self.before is None:
            return None
        mine = next(f for f in self.manifest.files if self.path(f) == path)
        if len(self.manifest.files) == 1:
            return self.path(self.before.files[0])
        twin = self.before.file(mine.name)
        return self.root / twin.entry.key if twin is not None else None


Apply = Callable[[Scene], bool | None]  # False: this layout has no such part


@dataclass(frozen=True)
class Damage:
    """`codes`: one of them must be found on the checkpoint or its run, and the checkpoint must not be exact."""

    name: str
    apply: Apply
    codes: frozenset[str]


def to_weights(function: Callable[[Path], object]) -> Apply:
    def apply(scene: Scene) -> None:
        function(scene.weights)

    return apply


def to_role(function: Callable[[Path], object], *roles: Role) -> Apply:
    def apply(scene: Scene) -> bool:
        path = scene.largest(*roles)
        if path is None:
            return False
        function(path)
        return True

    return apply


def with_twin(function: Callable[[Path, Path], object], *roles: Role) -> Apply:
    def apply(scene: Scene) -> bool:
        path = scene.largest(*roles)
        twin = scene.twin(path) if path is not None else None
        if path is None or twin is None or path.read_bytes() == twin.read_bytes():
            return False
        function(path, twin)
        return True

    return apply


def without(*names: str) -> Apply:
    """Saved again without a component, everything else whole."""

    def apply(scene: Scene) -> bool:
        path = scene.largest(Role.BUNDLE)
        if path is None:
            return False
        held = torch.load(path, weights_only=False)
        if not any(n in held for n in names):
            return False
        resave(path, lambda state: {k: v for k, v in state.items() if k not in names})
        return True

    return apply


def flip_weights(path: Path) -> None:
    if path.suffix != ".distcp":
        flip(path, record="" if path.suffix else None)
        return
    # Every item of a shard is an archive of its own: the end of the longest payload lies before its descriptor.
    raw, at, best = path.read_bytes(), 0, (0, 0)
    while (begin := raw.find(b"/data/0", at)) >= 0:
        at = raw.find(b"PK\x07\x08", begin)
        best = max(best, (at - begin, at))
    flip(path, best[1] - 2)


def zero_inside(path: Path) -> None:
    try:
        start, length = extent_of(path, "")
        zero_range(path, start + length // 4, max(64, length // 2))
    except Exception:  # a container of other containers: its middle
        zero_range(path, path.stat().st_size // 3, path.stat().st_size // 3)


BROKEN = frozenset(
    {"truncated", "bad-header", "out-of-bounds", "size-mismatch", "crc-mismatch", "shape-mismatch"}
)
GONE = frozenset(
    {"missing-file", "missing-model", "missing-rank", "missing-tensor", "incomplete-save", "debris"}
)
WEIGHTS = (Role.MODEL, Role.BUNDLE, Role.SHARD)
OTHER_SAVE = frozenset({"step-mismatch", "lr-mismatch", "mixed-saves", "frozen-weights", "duplicate-checkpoint", "digest-mismatch", "crc-mismatch", "data-position-mismatch", "size-mismatch", "out-of-bounds", "bad-header"})  # fmt: skip

DAMAGES = (
    Damage("one bit of a tensor flipped", to_weights(flip_weights), frozenset({"crc-mismatch", "bad-header"})),
    Damage("one bit flipped, after a seal", to_weights(flip_weights), frozenset({"digest-mismatch"})),
    Damage("zeros inside, after a seal", to_weights(zero_inside), frozenset({"digest-mismatch"})),
    Damage("a stretch of zeros inside", to_weights(zero_inside), BROKEN | {"zero-weights"}),
    Damage("cut in half", to_weights(lambda p: truncate(p, 0.5)), BROKEN),
    Damage("its last byte cut off", to_weights(lambda p: truncate(p, -1)), BROKEN),
    Damage("all zeros", to_weights(zero_fill), BROKEN),
    Damage("emptied", to_weights(empty), frozenset({"empty-file", "truncated"})),
    Damage("bytes appended", to_weights(append), BROKEN | {"unindexed-tensor"}),
    Damage("removed", to_weights(drop), GONE),
    Damage("spliced from two saves", with_twin(splice, *WEIGHTS), BROKEN | {"missing-tensor"}),
    Damage("weights of the save before", with_twin(lambda a, b: shutil.copyfile(b, a), *WEIGHTS), OTHER_SAVE),
    Damage("optimizer removed", to_role(drop, Role.OPTIMIZER), frozenset({"missing-optimizer", *GONE})),
    Damage("optimizer of the save before", with_twin(swap, Role.OPTIMIZER), OTHER_SAVE),
    Damage("optimizer cut", to_role(lambda p: truncate(p, 0.7), Role.OPTIMIZER), BROKEN),
    Damage("optimizer with a flipped bit", to_role(flip_weights, Role.OPTIMIZER), frozenset({"crc-mismatch", "bad-header"})),
    Damage("scheduler removed", to_role(drop, Role.SCHEDULER), frozenset({"missing-scheduler", "missing-file"})),
    Damage("scheduler of the save before", with_twin(swap, Role.SCHEDULER), OTHER_SAVE),
    Damage("generators removed", to_role(drop, Role.RNG), frozenset({"missing-rng", "missing-rank", "missing-file"})),
    Damage("generators cut", to_role(lambda p: truncate(p, 0.5), Role.RNG), BROKEN),
    Damage("trainer's state removed", to_role(drop, Role.TRAINER_STATE), frozenset({"missing-trainer-state", "missing-file", "incomplete-save"})),
    Damage("trainer's state cut", to_role(lambda p: truncate(p, 0.5), Role.TRAINER_STATE), BROKEN),
    Damage("metadata removed", to_role(drop, Role.METADATA), frozenset({"missing-file", "incomplete-save", "missing-model"})),
    Damage("metadata cut", to_role(lambda p: truncate(p, 0.5), Role.METADATA), BROKEN),
    Damage("index removed", to_role(drop, Role.INDEX), frozenset({"missing-file", "incomplete-save", "unindexed-tensor"})),
    Damage("index cut", to_role(lambda p: truncate(p, 0.5), Role.INDEX), BROKEN),
    Damage("configuration removed", to_role(drop, Role.CONFIG), frozenset({"missing-config", "missing-file"})),
    Damage("saved again without the optimizer", without("optimizer", "optimizer_states"), frozenset({"missing-optimizer"})),
    Damage("saved again without the scheduler", without("scheduler", "lr_schedulers"), frozenset({"missing-scheduler"})),
    Damage("saved again without the generators", without("rng"), frozenset({"missing-rng"})),
    Damage("saved again without the weights", without("model", "state_dict"), frozenset({"missing-model"})),
)  # fmt: skip

NO_CHECKSUM = "the format has no checksum: seal it, or keep a replica"
LISTED = "the arrays are compressed in a format of their own, and listed only"
BYTES = ("one bit of a tensor flipped", "a stretch of zeros inside", "spliced from two saves")
OLD = "torch-file, old format"
BARE = ("safetensors", "safetensors, sharded", "hf-trainer", "hf-trainer, LoRA", "accelerate")
# The old format names its storages by where they lay in memory, so two saves may or may not fit together.
SOMETIMES = {(OLD, "spliced from two saves")}
PAGE = "shorter than a page (4 KiB), and the format has no checksum: seal it, or keep a replica"
BLIND: dict[tuple[str, str], str] = {
    **{(layout, BYTES[0]): NO_CHECKSUM for layout in (*BARE, OLD)},
    **{(layout, BYTES[1]): PAGE for layout in BARE},
    **{(layout, BYTES[2]): NO_CHECKSUM for layout in BARE if not layout.startswith("safetensors")},
    **{
        ("orbax", damage): LISTED
        for damage in (
            *BYTES,
            "cut in half",
            "its last byte cut off",
            "all zeros",
            "bytes appended",
            "removed",
        )
    },
}


# --- the table ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("sample") / "run"
            folder.mkdir()
            SAMPLES[name](folder)
            made[name] = folder
        return made[name]

    return get


def scene_of(root: Path) -> Scene:
    manifests = find_checkpoints(build_directory(LocalStore(root).list()), layouts())
    ordered = sorted(manifests, key=lambda m: (-1 if m.step is None else m.step, m.path))
    newest = ordered[-1]
    before = next(
        (m for m in reversed(ordered[:-1]) if m.series == newest.series and m.layout == newest.layout), None
    )
    return Scene(root, newest, before)


def said(root: Path, path: str) -> tuple[Resume | None, set[str]]:
    """(the verdict on the checkpoint, the loud codes on it and on its run); no verdict where it is not listed."""
    try:
        reports = audit(str(root), Options(grace=0.0, depth=Evidence.CONTENT))
    except NothingRecognised:
        return None, {"debris"}
    codes = {f.code for r in reports for f in r.findings if f.loud or f.code == "debris"}
    verdict = next((v for r in reports for v in r.checkpoints if v.path == str(root / path)), None)
    if verdict is None:
        return None, codes
    return verdict.resume, codes | {f.code for f in verdict.findings}


def seal(run: Path, path: str) -> None:
    """Seal the checkpoint as it is now."""
    done = CliRunner().invoke(build_app(), ["seal", str(run / path), "--quiet"])
    assert done.exit_code == 0, done.output


def cells(name: str, run: Path, folder: Path) -> Iterator[str]:
    """Every cell of one column that is not as the table says."""
    for i, damage in enumerate(DAMAGES):
        copy = Path(shutil.copytree(run, folder / str(i) / "run", symlinks=True))
        scene = scene_of(copy)
        if damage.name.endswith("after a seal"):
            seal(copy, scene.manifest.path)
        if damage.apply(scene) is False:
            continue
        resume, codes = said(copy, scene.manifest.path)
        found = bool(codes & damage.codes) and resume is not Resume.EXACT
        # A checkpoint that is one file is gone with it, and nothing is said of what is not there.
        found = found or (damage.name == "removed" and resume is None)
        # Bytes behind the end, or a tensor too many, leave what is loaded as it was.
        found = found or "unindexed-tensor" in codes & damage.codes
        if (name, damage.name) in SOMETIMES:
            pass
        elif (name, damage.name) in BLIND:
            if found:
                yield f"{damage.name}: found ({sorted(codes & damage.codes)}), so it is no blind spot any more"
        elif not found:
            yield f"{damage.name}: {resume}, {sorted(codes)}; expected one of {sorted(damage.codes)}"
        shutil.rmtree(copy.parent)


@pytest.mark.parametrize("name", SAMPLES)
def test_column(name: str, sample: Callable[[str], Path], tmp_path: Path) -> None:
    run = sample(name)
    scene = scene_of(run)
    resume, _ = said(run, scene.manifest.path)
    assert resume is not None and resume.safe, "the sample must be good before it is damaged"
    wrong = list(cells(name, run, tmp_path))
    assert not wrong, "\n".join(wrong)


def test_the_blind_spots_are_documented() -> None:
    """docs/blind-spots.md is this table in words."""
    lines = [
        "| layout | damage to the weights, unless said otherwise | why it is not seen |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {layout} | {damage} | {why} |" for (layout, damage), why in BLIND.items()]
    text = (ROOT / "docs" / "blind-spots.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in text, "\n".join(lines)
