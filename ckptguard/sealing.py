"""Seals a checkpoint as it lies: one pass for the audit and the digests."""

from __future__ import annotations

from typing import Any

from ckptguard.codes import CODES
from ckptguard.digest import BLOCK
from ckptguard.discover import group_runs
from ckptguard.errors import NothingRecognised, Refused
from ckptguard.facts import Progress, Reader, Wanted
from ckptguard.inspect import Look, Opened, Options, open_target
from ckptguard.model import Evidence, FileFacts, Manifest, Resume
from ckptguard.registry import layout_named
from ckptguard.seals import Seal, SealedFile, SealedTensor, read_seal, write_seal


def seal_checkpoint(
    target: str,
    *,
    force: bool = False,
    megatron: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Seal one checkpoint and return what was sealed. Refuses what is unsafe, and a seal that differs (unless `force`).

    Raises Refused, NothingRecognised, TargetNotFound, StoreError.
    """
    options = Options(jobs=jobs, grace=0.0)
    opened, directory, manifests = open_target(target, options)
    with Reader(opened.store, jobs, progress) as reader:
        run, manifest = _the_one(target, opened, group_runs(directory, manifests))
        look = Look(opened, run, options, reader)
        facts = look.read(manifest, Evidence.CONTENT)
        if facts is None:
            raise NothingRecognised(
                f"{target}: it is no checkpoint, or it is gone", "name a checkpoint itself"
            )
        verdict = look.verdict(facts, [facts])
        if verdict.resume in (Resume.UNSAFE, Resume.UNKNOWN):
            worst = next(f for f in verdict.findings if str(f.effect) == str(verdict.resume))
            raise Refused(
                f"{target} is {verdict.resume} already ({worst.code}: {worst.message})",
                CODES[worst.code].todo,
            )
        files = reader.read(manifest, Wanted(Evidence.CONTENT, {f.name: BLOCK for f in manifest.files}))
    relative = manifest.path[len(run.root.path) + 1 :] if run.root.path else manifest.path
    seal = make_seal(manifest, relative, files, options.now(), verdict.step, dict(verdict.components))
    old = read_seal(opened.store, run.root.path, relative)
    if old is not None and not force and _differs(old, seal, manifest):
        raise Refused(
            f"{target} was sealed before, with other content",
            "look at it first (ckptguard audit); --force replaces the seal",
        )
    if megatron:
        from ckptguard.megatron_integrity import write_integrity

        write_integrity(opened.store, manifest)  # type: ignore[arg-type]
    write_seal(opened.store, run.root.path, seal)  # type: ignore[arg-type]
    return {
        "checkpoint": target,
        "sealed": True,
        "files": len(seal.files),
        "bytes": manifest.size,
        "tensors": len(seal.tensors),
    }


def _the_one(target: str, opened: Opened, runs: list) -> tuple[Any, Manifest]:  # type: ignore[type-arg]
    found = [
        (run, m) for run in runs for m in run.checkpoints if opened.only is None or m.path == opened.only
    ]
    if not found:
        raise NothingRecognised(
            f"{target}: nothing here is recognised as a checkpoint", "name a checkpoint itself"
        )
    if len(found) > 1:
        raise NothingRecognised(
            f"{target} holds {len(found)} checkpoints",
            f"name them one by one, as {opened.shown(found[-1][1].path)}",
        )
    run, manifest = found[0]
    return run, manifest


def make_seal(
    manifest: Manifest,
    relative: str,
    files: dict[str, FileFacts],
    now: float,
    step: int | None,
    components: dict[str, bool | None],
) -> Seal:
    """The seal of what was read. Pure."""
    layout = layout_named(manifest.layout)
    state = layout.interpret(manifest, files) if layout is not None else None
    tensors = {}
    for name, tensor in (state.model if state is not None else {}).items():
        facts = tensor.facts
        if facts is not None and facts.nbytes == tensor.nbytes:
            tensors[f"model/{name}"] = SealedTensor(
                digest=facts.digest, dtype=tensor.dtype, shape=tensor.shape, norm=facts.norm, minimum=facts.minimum,
                maximum=facts.maximum, nan=facts.nan, inf=facts.inf,
            )  # fmt: skip
    sealed = {
        f.name: SealedFile(
            size=f.entry.size,
            modified=f.entry.modified,
            etag=f.entry.etag,
            digest=files[f.name].digest,
            blocks=files[f.name].blocks,
        )
        for f in manifest.files
        if files[f.name].block_size
    }
    return Seal(
        checkpoint=relative,
        sealed_by="seal",
        created=now,
        step=step,
        block_size=BLOCK,
        files=sealed,
        tensors=tensors,
        components=components,
    )


def _differs(old: Seal, new: Seal, manifest: Manifest) -> bool:
    """Whether a seal that is not stale says something else."""
    if old.stale_for({f.name: f.entry for f in manifest.files}):
        return False
    return any(
        name in new.files and new.files[name].digest != file.digest for name, file in old.files.items()
    )
