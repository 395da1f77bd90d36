"""The one pass: a checkpoint's files become facts, as deep as was asked. All I/O of an audit happens here."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from threadpoolctl import threadpool_limits

from ckptguard import scan
from ckptguard.digest import blocks_digest
from ckptguard.errors import FormatError, KeyNotFound, ShortRead, StoreError
from ckptguard.formats import LATE_READERS, READERS, Parsed, Source, decode
from ckptguard.formats._base import SMALL
from ckptguard.model import Evidence, FileFacts, Manifest, ManifestFile, Problem, Tensor, TensorFacts
from ckptguard.ports import Store
from ckptguard.values import itemsize

Progress = Callable[[str, int], None]
"""Called with the file's name and how many of its bytes were just read."""

LARGE = 512 << 20

ACCUSING = frozenset(
    {
        "crc-mismatch",
        "digest-mismatch",
        "bad-header",
        "truncated",
        "out-of-bounds",
        "size-mismatch",
        "incomplete-save",
        "shape-mismatch",
        "missing-tensor",
    }
)


def default_jobs(store: Store | None = None) -> int:
    """Threads that read: the cores, at most 8; more where a reader mostly waits for answers."""
    cores = min(8, len(os.sched_getaffinity(0)))
    return max(4, 2 * cores) if store is not None and store.traits.request_bytes else cores


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to find out beyond structure. `blocks`: block size by file name, for files whose seal is to be compared."""

    depth: Evidence
    blocks: Mapping[str, int]


class Reader:
    """Reads checkpoints of one store with a bounded number of threads. Use as a context manager."""

    def __init__(self, store: Store, jobs: int | None = None, progress: Progress | None = None) -> None:
        self.store = store
        self.jobs = jobs or default_jobs(store)
        self.progress = progress or (lambda name, count: None)
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="ckptguard-read")
        # Threads of BLAS would fight with ours over the same cores: measured, they cost a third of the speed.
        self._blas = threadpool_limits(limits=1, user_api="blas")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._blas.restore_original_limits()

    def read(self, manifest: Manifest, wanted: Wanted) -> dict[str, FileFacts]:
        """Facts of every file of a checkpoint, by name. Faults are recorded as problems, never raised."""
        if wanted.depth is Evidence.LISTING:
            return {f.name: FileFacts(f.name, Evidence.LISTING) for f in manifest.files}
        parsed: dict[str, Parsed | Problem] = {}
        early = [f for f in manifest.files if f.format not in LATE_READERS]
        late = [f for f in manifest.files if f.format in LATE_READERS]
        for file, result in zip(
            early, self._pool.map(lambda f: self._parse(self.store, f, {}, wanted.depth), early)
        ):
            parsed[file.name] = result
        known = {name: p for name, p in parsed.items() if isinstance(p, Parsed)}
        for file, result in zip(
            late, self._pool.map(lambda f: self._parse(self.store, f, known, wanted.depth), late)
        ):
            parsed[file.name] = result
        if wanted.depth is Evidence.STRUCTURE:
            return {
                f.name: self._again(f, self._structure(f, parsed[f.name]), known, wanted)
                for f in manifest.files
            }
        scans = [(f, self._start_scan(self.store, f, parsed[f.name], wanted)) for f in manifest.files]
        return {
            f.name: self._again(f, self._content(f, parsed[f.name], plan, parts), known, wanted)
            for f, (plan, parts) in scans
        }

    # --- structure ----------------------------------------------------------------------------------

    def _parse(
        self, store: Store, file: ManifestFile, known: Mapping[str, Parsed], depth: Evidence
    ) -> Parsed | Problem:
        if file.entry.kind == "other":
            return Problem(
                "unreadable",
                "",
                f"it is no regular file{': ' + file.entry.target if file.entry.target else ''}, so it was not opened",
            )
        if file.entry.kind == "link" and file.entry.resolved is None:
            return Problem("missing-file", "", f"it is a link to {file.entry.target}, which is not there")
        if file.entry.size == 0 and file.format not in ("opaque", "text", "dcp-shard"):
            return Problem(
                "empty-file", "", "0 bytes: the save was interrupted, or the disk lost power before it wrote"
            )
        source = Source(store, file.entry.source, file.entry.size, deep=depth >= Evidence.CONTENT)
        try:
            if file.format in LATE_READERS:
                return _counted(LATE_READERS[file.format](source, file.name, known), source)
            reader = READERS.get(file.format)
            return _counted(reader(source), source) if reader else Parsed("")
        except FormatError as e:
            return Problem(e.code, "", str(e))
        except KeyNotFound:
            return Problem("missing-file", "", "it was listed and is gone now")
        except ShortRead as e:
            return Problem("truncated", "", str(e))
        except StoreError as e:
            return Problem("unreadable", "", str(e), hint=e.hint)
        except Exception as e:  # noqa: BLE001 - one file that we stumble over must not hide the others
            return _fault_of_ours(e, "reading the structure")

    def _structure(self, file: ManifestFile, parsed: Parsed | Problem) -> FileFacts:
        if isinstance(parsed, Problem):
            return FileFacts(file.name, Evidence.STRUCTURE, problems=(parsed,))
        return FileFacts(
            file.name,
            Evidence.STRUCTURE,
            parsed.kind,
            parsed.tree,
            parsed.tensors,
            parsed.globals,
            parsed.problems,
            bytes_read=parsed.details.get("bytes_read", 0),
            checksummed=sum(s.length for s in parsed.spans if s.crc is not None),
            details=parsed.details,
        )

    # --- content ------------------------------------------------------------------------------------

    def _start_scan(
        self, store: Store, file: ManifestFile, parsed: Parsed | Problem, wanted: Wanted
    ) -> tuple[scan.Plan, list[Future[scan.Part | Problem]]]:
        if isinstance(parsed, Problem) and parsed.code in ("unreadable", "missing-file"):
            return scan.Plan(0), []
        plan = plan_scan(parsed, file.entry.size, wanted.blocks.get(file.name, 0))
        if store.traits.request_bytes and plan.size >= LARGE:
            plan = replace(plan, joined=2)  # still enough for every thread, and half the requests
        key = file.entry.source

        def segment(begin: int, end: int) -> scan.Part | Problem:
            try:
                with store.stream(key, begin, end) as fill:
                    part = scan.scan_segment(fill, plan, begin, end)
            except ShortRead as e:
                return Problem("truncated", "", str(e))
            except StoreError as e:
                return Problem("unreadable", "", str(e), hint=e.hint)
            except Exception as e:  # noqa: BLE001 - one file that we stumble over must not hide the others
                return _fault_of_ours(e, "looking at the values")
            self.progress(file.name, end - begin)
            return part

        return plan, [self._pool.submit(segment, begin, end) for begin, end in plan.segments()]

    def _content(
        self,
        file: ManifestFile,
        parsed: Parsed | Problem,
        plan: scan.Plan,
        futures: list[Future[scan.Part | Problem]],
    ) -> FileFacts:
        facts = self._structure(file, parsed)
        joiner = scan.Joiner(plan)
        fault: Problem | None = None
        for future in _drain(futures):
            part = future.result()
            if isinstance(part, Problem):
                fault = fault or part
            elif fault is None:
                joiner.add(part)
        if fault is not None:
            known = any(p.code == fault.code for p in facts.problems)
            return facts if known else replace(facts, problems=(*facts.problems, fault))
        scanned = joiner.done()
        if isinstance(parsed, Problem):
            return replace(facts, read=Evidence.CONTENT, bytes_read=plan.size, **_blocks(plan, scanned))
        place_facts(parsed, plan, scanned)
        problems = [*parsed.problems, *_crc_problems(plan, scanned)]
        if parsed.verify is not None:
            problems += parsed.verify(scanned.gaps)
        good = sum(s.length for s, crc in zip(plan.spans, scanned.crcs) if s.crc is not None and s.crc == crc)
        return replace(
            facts,
            read=Evidence.CONTENT,
            problems=tuple(problems),
            bytes_read=plan.size,
            bytes_proven=good + parsed.proven,
            **_blocks(plan, scanned),
        )

    # --- the second look ----------------------------------------------------------------------------

    def _again(
        self, file: ManifestFile, facts: FileFacts, known: Mapping[str, Parsed], wanted: Wanted
    ) -> FileFacts:
        """Read a file again, past the cache, before it is accused; two readings that differ accuse the machine."""
        if not any(p.code in ACCUSING and not p.severity for p in facts.problems):
            return facts
        fresh = self.store.fresh(file.entry.key)
        if fresh is None:
            return facts
        parsed = self._parse(fresh, file, known, wanted.depth)
        if wanted.depth is Evidence.STRUCTURE:
            second = self._structure(file, parsed)
        else:
            second = self._content(file, parsed, *self._start_scan(fresh, file, parsed, wanted))
        first_codes = {(p.code, p.where) for p in facts.problems}
        second_codes = {(p.code, p.where) for p in second.problems}
        if first_codes == second_codes:
            return second
        difference = ", ".join(
            sorted(f"{code} {where}".strip() for code, where in first_codes ^ second_codes)
        )
        return replace(
            second,
            problems=(
                *second.problems,
                Problem("unstable-read", "", f"two readings of the same bytes differ ({difference})"),
            ),
        )


def _drain(futures: list[Future[scan.Part | Problem]]) -> Iterator[Future[scan.Part | Problem]]:
    """The futures in order, each forgotten once it was taken: a big file's parts are never all in memory."""
    futures.reverse()
    while futures:
        yield futures.pop()


def _fault_of_ours(error: Exception, doing: str) -> Problem:
    return Problem(
        "check-failed",
        "",
        f"{doing} failed with {type(error).__name__}: {error}",
        hint="report this as a fault of ckptguard",
    )


def _counted(parsed: Parsed, source: Source) -> Parsed:
    return replace(
        parsed,
        details={**parsed.details, "bytes_read": source.bytes_read + parsed.details.get("bytes_read", 0)},
    )


def _blocks(plan: scan.Plan, scanned: scan.Scanned) -> dict:
    if not plan.block_size:
        return {}
    return {"blocks": scanned.blocks, "block_size": plan.block_size, "digest": blocks_digest(scanned.blocks)}


def _crc_problems(plan: scan.Plan, scanned: scan.Scanned) -> Iterator[Problem]:
    for span, crc in zip(plan.spans, scanned.crcs):
        if span.crc is not None and span.crc != crc:
            yield Problem(
                "crc-mismatch",
                span.name,
                f"CRC-32 of the {span.length} bytes of {span.name} is {crc:08x}, {span.crc:08x} was recorded",
            )


# --- which bytes are whose ----------------------------------------------------------------------------


def plan_scan(parsed: Parsed | Problem, size: int, block_size: int) -> scan.Plan:
    """The plan for a file's pass: tensors' extents merged where they share bytes."""
    if isinstance(parsed, Problem):
        return scan.Plan(size, block_size=block_size)
    extents: list[scan.Extent] = []
    bare = all(s.crc is None for s in parsed.spans)
    for tensor in sorted(
        (t for t in parsed.tensors if t.start is not None and t.nbytes),
        key=lambda t: (t.start or 0, -t.nbytes),
    ):
        start, dtype = tensor.start or 0, tensor.dtype if "big-endian" not in tensor.location else "opaque"
        if extents and start < extents[-1].end:
            last = extents[-1]
            if start + tensor.nbytes > last.end:
                # Numbers of two kinds, or out of step, in one stretch: its values mean nothing as either.
                fits = dtype == last.dtype and (start - last.start) % (itemsize(dtype) or 1) == 0
                extents[-1] = scan.Extent(
                    last.start, start + tensor.nbytes - last.start, dtype if fits else "opaque"
                )
            continue
        extents.append(
            scan.Extent(
                start,
                tensor.nbytes,
                dtype,
                keep=tensor.value is None and tensor.nbytes <= SMALL,
                bare=bare,
            )
        )
    spans = tuple(sorted((s for s in parsed.spans if s.length), key=lambda s: s.start))
    return scan.Plan(size, tuple(extents), spans, tuple(sorted(parsed.gaps)), block_size)


def place_facts(parsed: Parsed, plan: scan.Plan, scanned: scan.Scanned) -> None:
    """Give each tensor the facts of the extent that it lies in, and its value where that was small and unread."""
    starts = {e.start: i for i, e in enumerate(plan.extents)}
    ordered = sorted(starts)
    for tensor in parsed.tensors:
        if tensor.start is None or not tensor.nbytes:
            continue
        i = starts.get(tensor.start)
        if i is None:
            i = starts[_before(ordered, tensor.start)]
        extent, facts = plan.extents[i], scanned.tensors[i]
        # Looked at as another kind of number, the bytes are the same and the statistics are not.
        other = extent.dtype not in (tensor.dtype, "opaque")
        tensor.facts = TensorFacts(facts.digest, facts.nbytes) if other else facts
        if (
            i in scanned.kept
            and tensor.value is None
            and extent.nbytes == tensor.nbytes
            and itemsize(tensor.dtype)
        ):
            _set_value(tensor, scanned.kept[i])


def _before(ordered: list[int], start: int) -> int:
    return ordered[bisect_right(ordered, start) - 1]


def _set_value(tensor: Tensor, raw: bytes) -> None:
    if tensor.contiguous:
        tensor.value = decode(raw, tensor.dtype, tensor.shape)
