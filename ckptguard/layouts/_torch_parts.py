"""What plain torch saves in one file and in several share: roles and ranks in names, and what the content means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptguard.layouts._state import Builder, holds_training_state, integer
from ckptguard.layouts._torch_content import interpret_known
from ckptguard.model import Absence, FileFacts, Manifest, ManifestFile, Role, State

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl", ".pth.tar", ".pt.tar", ".model", ".checkpoint")
RANK = re.compile(r"[._-]?rank[._-]?(\d+)", re.IGNORECASE)
_ROLE = re.compile(
    r"optimizer|optim|opt(?-i:(?![a-z]|[A-Z]{2}))|model|meta|scheduler|sched|scaler|rng|random|dataloader|loader|training_state|train_state|trainer_state|state_dict|state|ema|weights",
    re.IGNORECASE,
)
_ROLES = {
    "optimizer": Role.OPTIMIZER, "optim": Role.OPTIMIZER, "opt": Role.OPTIMIZER, "model": Role.MODEL, "weights": Role.MODEL,
    "meta": Role.TRAINER_STATE, "training_state": Role.TRAINER_STATE, "train_state": Role.TRAINER_STATE, "state": Role.TRAINER_STATE,
    "trainer_state": Role.TRAINER_STATE, "scheduler": Role.SCHEDULER, "sched": Role.SCHEDULER, "scaler": Role.SCALER, "rng": Role.RNG,
    "random": Role.RNG, "dataloader": Role.DATALOADER, "loader": Role.DATALOADER, "ema": Role.EMA,
}  # fmt: skip


# What people call a network that is one of several, or that is not called model.
NETWORK = re.compile(
    r"(?:my_?)?(?:net|network|net[-_]?[gd]|[gd]|[gd][-_]?net|gen|generator|disc|discriminator|actor|critic|policy|value|"
    r"encoder|decoder|unet|vae|backbone|transformer|student|teacher|classifier|head|q|q_?net(?:work)?|target(?:_q)?(?:_?net)?)",
    re.IGNORECASE,
)
# Endings under which nothing but torch files lies; a `.bin`, `.pkl` or `.model` may be anything.
OWN_ENDINGS = (".pt", ".pth", ".ckpt", ".pth.tar", ".pt.tar", ".checkpoint")


_PARTS = {Role.OPTIMIZER: "optimizer", Role.SCHEDULER: "scheduler", Role.RNG: "rng"}


def role_of(name: str) -> Role:
    """The part of the training state that a file's name says it holds; OTHER where it says none."""
    stem = RANK.sub("", name.rsplit(".", 1)[0])
    match = _ROLE.search(stem)
    if match:
        return _ROLES.get(match.group(0).lower(), Role.OTHER)
    return Role.MODEL if NETWORK.fullmatch(stem) else Role.OTHER


def rank_of(name: str) -> int | None:
    match = RANK.search(name)
    return int(match.group(1)) if match else None


def rank_absences(files: Iterable[ManifestFile]) -> tuple[Absence, ...]:
    """Ranks below the highest one that have no file of a role."""
    ranks: dict[Role, dict[int, str]] = {}
    for file in files:
        if file.rank is not None:
            ranks.setdefault(file.role, {})[file.rank] = file.name
    world = max((max(r) + 1 for r in ranks.values()), default=0)
    absent = []
    for role, known in ranks.items():
        example = next(iter(known.values()))
        for rank in sorted(set(range(world)) - known.keys()):
            name = RANK.sub(lambda m: m.group(0).replace(m.group(1), str(rank)), example)  # noqa: B023
            absent.append(
                Absence(
                    "missing-rank",
                    name,
                    f"the {role} shard of rank {rank} is not there; {len(known)} of {world} are",
                )
            )
    return tuple(absent)


def interpret_parts(manifest: Manifest, files: Mapping[str, FileFacts]) -> State:
    """What the files of one save hold, whatever their keys are called."""
    builder = Builder(manifest)
    for file in manifest.files:
        facts = files.get(file.name)
        if facts is None or facts.tree is None:
            continue
        if not holds_training_state(facts.tree) and file.role is Role.BUNDLE:
            builder.attributes["no_training_state"] = True
        if manifest.attributes.get("one_file") and interpret_known(builder, facts.tree, file.name):
            continue
        wanted = _PARTS.get(file.role)
        if wanted and file.rank is None and builder.is_other(file.name, facts.tree, wanted):
            continue
        if file.role is Role.EMA:
            builder.add_ema(facts.tree if isinstance(facts.tree, dict) else {}, file.name)
        else:
            # Of several networks, each in a file of its own, the names are told apart by the files.
            several = file.role is Role.MODEL and file.rank is None and len(manifest.by_role(Role.MODEL)) > 1
            path = file.name.rpartition("/")[2].partition(".")[0] if several else ""
            builder.add_tree(facts.tree, file.name, rank=file.rank, path=path)
    # A file a rank holds that rank's part: its shapes are not the parameters'.
    builder.optimizers = [replace(o, sharded=True) if o.rank is not None else o for o in builder.optimizers]
    _swap_averaged(builder)
    _ranks(builder, manifest, files)
    _count(builder)
    return builder.build()


def _count(builder: Builder) -> None:
    """What the number in the name counts, and at which step the checkpoint is where no file says it.

    A loop that saves once an epoch names its files by epochs and often stores nothing but the epoch. The optimizer has
    counted the steps all the same.
    """
    named = builder.manifest.step
    stated = [c for c in builder.counters if c.unit == "step" and c.name != "name"]
    if stated:
        # Of several counters (micro-batches, updates) the name tells which one the loop goes by.
        builder.step = next((c.value for c in stated if c.value == named), None)
        return
    epochs = [c.value for c in builder.counters if c.unit == "epoch"]
    by_epoch = named is not None and any(named in (e - 1, e, e + 1) for e in epochs)
    if named is not None and not by_epoch:
        return
    builder.counters = [replace(c, unit="epoch") if c.name == "name" else c for c in builder.counters]
    counts = [integer(s.values.get("step")) for o in builder.optimizers for s in o.states]
    builder.step = max((c for c in counts if c is not None), default=named)


def _ranks(builder: Builder, manifest: Manifest, files: Mapping[str, FileFacts]) -> None:
    """The world size that is recorded, against the ranks whose files are there."""
    ranks = {f.rank for f in manifest.files if f.rank is not None}
    recorded = next(
        (
            f.tree["world_size"]
            for f in files.values()
            if isinstance(f.tree, dict) and isinstance(f.tree.get("world_size"), int)
        ),
        None,
    )
    if ranks:
        builder.topology["world_size"] = recorded or max(ranks) + 1
        for rank in range(max(ranks) + 1, recorded or 0):
            example = next(f.name for f in manifest.files if f.rank is not None)
            name = RANK.sub(lambda m: m.group(0).replace(m.group(1), str(rank)), example)  # noqa: B023
            builder.problem(
                name, "missing-rank", "", f"{recorded} ranks took part, and rank {rank} has no file"
            )


def _swap_averaged(builder: Builder) -> None:
    """A file that holds averaged weights alone is one for inference: they are its only weights."""
    if builder.ema and not builder.model:
        builder.model = dict(builder.ema)
        builder.attributes["only_averaged"] = True
