"""The Hugging Face Trainer's `checkpoint-N` directories (transformers trainer.py `_save_checkpoint`, 5.24).

Written in place with no completion mark; `trainer_state.json` comes last on rank 0, other ranks write their RNG file
without a barrier. The Trainer loads optimizer and scheduler only where both are there, and says nothing if one is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptguard.formats.pickles import Opaque
from ckptguard.formats.text import as_object
from ckptguard.layouts._base import LayoutBase, is_temporary, rest_of, series_of
from ckptguard.layouts._hf import (
    CONFIGS,
    INDEX,
    SHARD,
    TOKENIZERS,
    WEIGHTS,
    add_config,
    add_tokenizer,
    add_weights,
    weight_files,
)
from ckptguard.layouts._hf_parallel import add_parallel, parallel_absences, parallel_files
from ckptguard.layouts._nested import NESTED, nested_files, nested_in
from ckptguard.layouts._state import Builder, integer, is_optimizer, scalar
from ckptguard.logs.trainer_state import history_rows
from ckptguard.model import Absence, Directory, FileFacts, Manifest, ManifestFile, Role, State
from ckptguard.ports import Resolve

NAME = re.compile(r"^(?:tmp-)?checkpoint-(\d+)$")
RNG = re.compile(r"^rng_state(?:_(\d+))?\.pth$")
STATE = "trainer_state.json"
UNFINISHED = "checkpoint-is-incomplete.txt"
RULES: dict[str, tuple[Role, str]] = {
    "optimizer.pt": (Role.OPTIMIZER, "torch"),
    "optimizer.bin": (Role.OPTIMIZER, "torch"),
    "scheduler.pt": (Role.SCHEDULER, "torch"),
    "scaler.pt": (Role.SCALER, "torch"),
    STATE: (Role.TRAINER_STATE, "json"),
    "training_args.bin": (Role.ARGS, "torch"),
    "pytorch_model_fsdp.bin": (Role.MODEL, "torch"),
}


class HfTrainer(LayoutBase):
    name = "hf-trainer"
    order = 600

    def claim(self, directory: Directory, resolve: Resolve) -> Sequence[Manifest]:
        if not self._is_mine(directory):
            return ()
        base = directory.path
        files = list(weight_files(directory, base))
        for name, entry in sorted(directory.files.items()):
            rng = RNG.match(name)
            if rng:
                rank = int(rng.group(1)) if rng.group(1) else 0
                files.append(ManifestFile(name, entry, Role.RNG, "torch", rank))
            elif name in RULES:
                role, format = RULES[name]
                files.append(ManifestFile(name, entry, role, format))
        files += parallel_files(directory)
        nested = nested_in(directory, resolve)
        files += nested_files(base, nested)
        files += rest_of(directory, files, base)
        step = NAME.match(directory.name)
        unfinished = UNFINISHED in directory.files
        return (
            Manifest(
                path=base,
                layout=self.name,
                files=tuple(files),
                step=int(step.group(1)) if step else None,
                carries=frozenset({"model", "optimizer", "scheduler", "rng", "config", "trainer_state"}),
                gaps=("dataloader",),
                absences=(*self._absences(files, unfinished), *parallel_absences(directory, nested)),
                finished=not unfinished and STATE in directory.files and not is_temporary(directory.name),
                temporary=is_temporary(directory.name),
                series=series_of(directory.name) if step else "",
                attributes={NESTED: tuple(nested)},
            ),
        )

    @staticmethod
    def _is_mine(directory: Directory) -> bool:
        names = directory.files.keys()
        if any(NAME.match(d) for d in directory.dirs):
            return False  # the output directory of a run, perhaps with its final export
        if STATE in names:
            return True
        if "training_args.bin" in names and {"optimizer.pt", "scheduler.pt"} & names:
            return True
        # A save that was killed early has nothing but its name and what the Trainer writes first; loops of
        # people's own use the same directory names for files of theirs.
        return bool(NAME.match(directory.name)) and bool(names) and all(map(_is_trainers, names))

    @staticmethod
    def _absences(files: Sequence[ManifestFile], unfinished: bool) -> list[Absence]:
        absent = []
        if unfinished:
            absent.append(
                Absence(
                    "incomplete-save", UNFINISHED, "the mark of a save that was not finished is still there"
                )
            )
        ranks = {f.rank for f in files if f.role is Role.RNG and RNG.match(f.name)}
        single = any(f.name == "rng_state.pth" for f in files)
        if ranks and not single:
            # rng_state_N.pth is written only where there are several processes.
            world = max(2, max(r for r in ranks if r is not None) + 1)
            for rank in sorted(set(range(world)) - ranks):
                absent.append(
                    Absence(
                        "missing-rank",
                        f"rng_state_{rank}.pth",
                        f"the RNG state of rank {rank} is not there; {len(ranks)} of at least {world} are",
                    )
                )
        return absent

    def interpret(self, manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
        builder = Builder(manifest)
        add_weights(builder, manifest, files)
        add_config(builder, files)
        add_tokenizer(builder, files)
        builder.components.setdefault("config", False)
        state = as_object(_tree(files, STATE))
        builder.add_counter("global_step", state.get("global_step"), STATE)
        builder.step = integer(state.get("global_step"))
        builder.log.extend(history_rows(state))
        for name in ("optimizer.pt", "optimizer.bin"):
            tree = _tree(files, name)
            if is_optimizer(tree):
                builder.add_optimizer(tree, name)
            elif files.get(name) is not None and not builder.is_other(name, tree, "optimizer"):
                builder.components["optimizer"] = True
        scheduler = _tree(files, "scheduler.pt")
        if builder.is_other("scheduler.pt", scheduler, "scheduler"):
            pass
        elif isinstance(scheduler, dict):
            builder.add_scheduler(scheduler, "scheduler.pt")
        elif "scheduler.pt" in files:
            builder.components["scheduler"] = True
        scaler = _tree(files, "scaler.pt")
        if isinstance(scaler, dict):
            builder.add_scaler(scaler, "scaler.pt")
        for file in manifest.by_role(Role.RNG):
            streams = _tree(files, file.name)
            if builder.is_other(file.name, streams, "rng"):
                continue
            if isinstance(streams, dict):
                builder.add_rng({str(k): v for k, v in streams.items()}, file.name, file.rank)
            else:
                builder.components["rng"] = True
        add_parallel(builder, manifest, files)
        self._arguments(builder, _tree(files, "training_args.bin"))
        ranks = [f.rank for f in manifest.by_role(Role.RNG) if f.rank is not None]
        if ranks:
            builder.topology.setdefault("world_size", max(ranks) + 1)
        builder.components.setdefault("dataloader", None)
        builder.attributes["best"] = state.get("best_model_checkpoint")
        builder.attributes["max_steps"] = integer(state.get("max_steps"))
        builder.attributes["epoch"] = scalar(state.get("epoch"))
        builder.attributes["batch_size"] = integer(state.get("train_batch_size"))
        return builder.build()

    @staticmethod
    def _arguments(builder: Builder, args: Any) -> None:
        """What the run is configured to do, from the training arguments (read, never built)."""
        if not isinstance(args, Opaque):
            return
        if args.get("save_only_model") is True:
            builder.attributes["model_only"] = True
        if args.get("fp16") is True:
            builder.attributes["fp16"] = True
        if args.get("auto_find_batch_size") is not True:
            builder.attributes["configured_batch_size"] = integer(args.get("per_device_train_batch_size"))
        builder.attributes["gradient_accumulation"] = integer(args.get("gradient_accumulation_steps"))
        optim = args.get("optim")
        builder.attributes["optimizer_name"] = (
            optim.args[0] if isinstance(optim, Opaque) and optim.args else None
        )


def _is_trainers(name: str) -> bool:
    """Whether the Trainer writes files of this name."""
    return (
        name in RULES
        or name
        in (
            *CONFIGS,
            *TOKENIZERS,
            "generation_config.json",
            "README.md",
            UNFINISHED,
            "latest",
            "zero_to_fp32.py",
            "zero_to_torch.py",
        )
        or bool(RNG.match(name) or WEIGHTS.match(name) or SHARD.match(name) or INDEX.match(name))
        or is_temporary(name)
    )


def _tree(files: Mapping[str, FileFacts], name: str) -> Any:
    facts = files.get(name)
    return facts.tree if facts is not None else None


LAYOUT = HfTrainer()
