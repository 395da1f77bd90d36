"""What `Accelerator.save_state` writes (accelerate 1.15 checkpointing.py), with one and several processes.

No completion mark and no temporary name. `random_states_R.pkl` comes from every rank; the number in `checkpoint_N`
counts saves, the `step` in the random states counts micro-batches: neither is the optimizer's step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptguard.formats.text import as_object
from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of, series_of, step_in
from ckptguard.layouts._hf import SHARD, WEIGHTS, add_config, add_weights, weight_files
from ckptguard.layouts._nested import (
    NESTED,
    add_nested,
    count_rng_files,
    nested_absences,
    nested_files,
    nested_in,
)
from ckptguard.layouts._ranks import absent_ranks
from ckptguard.layouts._state import STEP_NAMES, Builder, integer, is_optimizer, items
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Role, State
from ckptguard.ports import Resolve

RANDOM = re.compile(r"^random_states_(\d+)\.pkl$")
AUTOMATIC = re.compile(r"^checkpoint_(\d+)$")
FURTHER = re.compile(r"^(?:model|pytorch_model)_(\d+)\.(?:safetensors|bin)$")
FSDP_RANK = re.compile(r"^(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank(\d+)\.bin$")
RULES: tuple[tuple[re.Pattern[str], Role], ...] = (
    (re.compile(r"^(?:model|pytorch_model)(?:_\d+)?\.(?:safetensors|bin)$"), Role.MODEL),
    (re.compile(r"^pytorch_model_fsdp(?:_\d+)*(?:_rank\d+)?\.bin$"), Role.MODEL),
    (re.compile(r"^optimizer(?:_\d+)?(?:_rank\d+)?\.bin$"), Role.OPTIMIZER),
    (re.compile(r"^scheduler(?:_\d+)?\.bin$"), Role.SCHEDULER),
    (re.compile(r"^(?:sampler|dl_state_dict)(?:_\d+)?\.bin$"), Role.DATALOADER),
    (re.compile(r"^scaler\.pt$"), Role.SCALER),
    (RANDOM, Role.RNG),
    (re.compile(r"^custom_checkpoint_\d+\.pkl$"), Role.TRAINER_STATE),
)


class Accelerate(LayoutBase):
    name = "accelerate"
    order = 700

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        ranks = {int(m.group(1)) for n in directory.files if (m := RANDOM.match(n))}
        automatic = AUTOMATIC.match(directory.name)
        if not ranks and not self._is_half(directory, resolve):
            return ()
        base = directory.path
        files = list(self._own_files(directory))
        taken = {f.name for f in files}
        files += [f for f in weight_files(directory, base) if f.name not in taken]
        nested = nested_in(directory, resolve)
        files += nested_files(base, nested)
        absences = absent_ranks("RNG state", "random_states_{}.pkl", ranks)
        if not ranks:
            absences.append(
                Absence(
                    "incomplete-save",
                    "random_states_0.pkl",
                    "no rank has written its random states, which come last: the save did not finish",
                )
            )
        return (
            Manifest(
                path=base,
                layout=self.name,
                files=(*files, *rest_of(directory, files, base)),
                # checkpoint_N counts saves, which says nothing of steps.
                step=None if automatic else step_in(directory.name),
                carries=frozenset({"model", "optimizer", "scheduler", "rng"}),
                gaps=("dataloader",),
                absences=(*absences, *nested_absences(base, nested)),
                temporary=is_temporary(directory.name),
                finished=bool(ranks) and not is_temporary(directory.name),
                series=series_of(directory.name),
                attributes={NESTED: tuple(nested), "save": int(automatic.group(1)) if automatic else None},
            ),
        )

    @staticmethod
    def _is_half(directory: Directory, resolve: Resolve) -> bool:
        """A save that was cut off: accelerate's own names, and no random states yet."""
        names = directory.files.keys()
        automatic = AUTOMATIC.match(directory.name) and directory.path.split("/")[-2:-1] == ["checkpoints"]
        if not automatic or "config.json" in names or "trainer_state.json" in names:
            return False
        return any(p.match(n) for n in names for p, _ in RULES) or any(
            resolve(sub) for sub in directory.dirs.values()
        )

    @staticmethod
    def _own_files(directory: Directory) -> Sequence[ManifestFile]:
        base = len(directory.path) + 1 if directory.path else 0
        found = []
        for name, entry in sorted(directory.files.items()):
            role = next((r for p, r in RULES if p.match(name)), None)
            if (
                role is None
                and name.endswith(".safetensors")
                and not WEIGHTS.match(name)
                and not SHARD.match(name)
            ):
                role = Role.MODEL  # hooks save under names of their own: pytorch_lora_weights, learned_embeds
            if role is None:
                continue
            rank = RANDOM.match(name) or FSDP_RANK.match(name)
            format = "safetensors" if name.endswith(".safetensors") else "torch"
            found.append(
                ManifestFile(entry.key[base:], entry, role, format, int(rank.group(1)) if rank else None)
            )
        return found

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        _add_models(builder, manifest, files)
        add_nested(builder, manifest, files)
        if any(f.name == "config.json" for f in manifest.files):
            add_config(builder, files)
        for file in manifest.files:
            if "/" not in file.name:
                _add_file(builder, file, _tree(files, file.name), f"{file.name}" in files)
        ranks = frozenset(f.rank for f in manifest.by_role(Role.RNG) if f.rank is not None)
        if ranks:
            count_rng_files(builder, manifest, ranks, "random_states_{}.pkl")
        _add_steps(builder, manifest, files)
        groups = [g for o in builder.optimizers for g in o.groups]
        if groups and not builder.schedulers and not any("initial_lr" in g.options for g in groups):
            builder.components.setdefault("scheduler", None)  # none ever touched the optimizer
        builder.components.setdefault("dataloader", True if builder.loaders else None)
        return builder.build()


def _add_models(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """model_1.safetensors and so on are further prepared models, whose names may be those of the first."""
    further = {f.name: int(m.group(1)) for f in manifest.by_role(Role.MODEL) if (m := FURTHER.match(f.name))}
    add_weights(
        builder, replace(manifest, files=tuple(f for f in manifest.files if f.name not in further)), files
    )
    for name, number in further.items():
        builder.add_model(as_object(_tree(files, name)), name, prefix=f"{number}:")


def _add_file(builder: Builder, file: ManifestFile, tree: Any, listed: bool) -> None:
    if file.role is Role.OPTIMIZER:
        if is_optimizer(tree):
            builder.add_optimizer(tree, file.name, rank=file.rank, sharded=file.rank is not None)
        elif listed and not builder.is_other(file.name, tree, "optimizer"):
            builder.components["optimizer"] = True
    elif file.role is Role.SCHEDULER:
        if builder.is_other(file.name, tree, "scheduler"):
            pass
        elif isinstance(tree, dict):
            builder.add_scheduler(tree, file.name)
        elif listed:
            builder.components["scheduler"] = True
    elif file.role is Role.SCALER and isinstance(tree, dict):
        builder.add_scaler(tree, file.name)
    elif file.role is Role.DATALOADER and tree is not None:
        builder.add_loader(dict(items(tree)), file.name)
    elif file.role is Role.RNG:
        streams = {str(k): v for k, v in as_object(tree).items() if k != "step"}
        if streams:
            builder.add_rng({_STREAMS.get(k, k): v for k, v in streams.items()}, file.name, file.rank)
        elif listed:
            builder.components["rng"] = True
        builder.add_counter("micro-batches", as_object(tree).get("step"), file.name, "micro-batch")


_STREAMS = {
    "random_state": "python",
    "numpy_random_seed": "numpy",
    "torch_manual_seed": "torch",
    "torch_cuda_manual_seed": "cuda",
}


def _add_steps(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """The step of training: a registered object's own, else the optimizer's. A name's number is the script's own count."""
    save = manifest.attributes.get("save")
    builder.counters = [replace(c, unit="unknown") if c.name == "name" else c for c in builder.counters]
    if save is not None:
        builder.add_counter("save_iteration", save, manifest.path, "save")
    micro = {c.value for c in builder.counters if c.unit == "micro-batch"}
    made = max(
        (s for o in builder.optimizers for p in o.states if (s := integer(p.values.get("step"))) is not None),
        default=None,
    )
    own = None
    for file in manifest.by_role(Role.TRAINER_STATE):
        for key, value in items(_tree(files, file.name)).items():
            step = integer(value)
            if str(key).lower() not in STEP_NAMES or step is None:
                continue
            # A script may count micro-batches as steps too; then its count is accelerate's own.
            unit = "micro-batch" if step in micro and step != made else "step"
            builder.add_counter(f"{file.name}:{key}", step, file.name, unit)
            own = step if unit == "step" and own is None else own
    if own is None and made is not None:
        builder.add_counter("optimizer step", made, builder.optimizers[0].subject)
    builder.step = own if own is not None else made
    if builder.step is None and save is not None and builder.optimizers:
        builder.step = save  # an optimizer that counts nothing (SGD): saves are at least in their order


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None


LAYOUT = Accelerate()
