"""tar files that hold a checkpoint: Composer's, people's own, and torch's oldest format (before 0.1.10).

Members of a tar lie in it as they are, so a torch or safetensors member is read in place, with all its checksums.
torch's oldest format has the members `storages`, `tensors` and `pickle`; a tar has no checksum of its own but over headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptguard.errors import FormatError
from ckptguard.formats._base import Parsed, Source, Span
from ckptguard.formats.pickles import read_pickle
from ckptguard.model import Problem, Tensor

BLOCK = 512
MOST_MEMBERS = 100_000
READABLE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
OLDEST = frozenset({"storages", "tensors", "pickle"})
MAX_PICKLE = 64 << 20


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    start: int
    size: int


def read(source: Source) -> Parsed:
    """Read a tar's checkpoint members in place. Raises FormatError (truncated, bad-header), StoreError."""
    members = list(walk_members(source))
    names = {m.name for m in members}
    if names >= OLDEST:
        return _oldest(source, {m.name: m for m in members})
    inside = [m for m in members if m.size and m.name.lower().endswith(READABLE)]
    if not inside:
        shown = ", ".join(sorted(names)[:5]) or "nothing"
        raise FormatError(
            "bad-header",
            f"a tar archive of {len(members)} members ({shown}), none of which is a checkpoint that could be read in place",
        )
    parsed = [(m, _member(source, m)) for m in inside]
    trees = {m.name: p.tree for m, p in parsed}
    tree = next(iter(trees.values())) if len(trees) == 1 else trees
    return Parsed(
        "tar",
        tree,
        tuple(t for _, p in parsed for t in p.tensors),
        tuple(dict.fromkeys(use for _, p in parsed for use in p.globals)),
        tuple(problem for _, p in parsed for problem in p.problems),
        tuple(span for _, p in parsed for span in p.spans),
        tuple(gap for _, p in parsed for gap in p.gaps),
        _verify([p for _, p in parsed]),
    )


def walk_members(source: Source) -> Iterator[Member]:
    """The regular files of a tar, by their headers. Raises FormatError where a header or a member's end is not there."""
    at, long_name = 0, ""
    for _ in range(MOST_MEMBERS):
        if at + BLOCK > source.size:
            raise FormatError(
                "truncated",
                f"the archive ends at byte {source.size} without its end mark; a header was due at byte {at}",
            )
        header = source.read(at, BLOCK)
        if not header.strip(b"\0"):
            return
        _check_header(header, at)
        size = _number(header[124:136], at)
        kind = header[156:157]
        start, at = at + BLOCK, at + BLOCK + -(-size // BLOCK) * BLOCK
        if start + size > source.size:
            raise FormatError(
                "truncated",
                f"{_name(header)} of {size} bytes begins at byte {start}, the archive ends at {source.size}",
            )
        if kind == b"L" and size < BLOCK * 8:
            long_name = source.read(start, size).rstrip(b"\0").decode("utf-8", "replace")
        elif kind in (b"0", b"\0", b"7"):
            yield Member(long_name or _name(header), start, size)
            long_name = ""
    raise FormatError("bad-header", f"the archive holds more than {MOST_MEMBERS} members")


def _check_header(header: bytes, at: int) -> None:
    wanted = _number(header[148:156], at)
    found = sum(header[:148]) + 8 * 0x20 + sum(header[156:])
    if wanted != found:
        raise FormatError(
            "bad-header",
            f"the header at byte {at} of the archive is damaged: its checksum is {found}, {wanted} was recorded",
        )


def _number(field: bytes, at: int) -> int:
    if field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError as e:
        raise FormatError(
            "bad-header", f"the header at byte {at} of the archive has no number where one belongs"
        ) from e


def _name(header: bytes) -> str:
    name = header[:100].rstrip(b"\0").decode("utf-8", "replace")
    prefix = header[345:500].rstrip(b"\0").decode("utf-8", "replace") if header[257:262] == b"ustar" else ""
    return (
        f"{prefix}/{name}".removeprefix("/")
        if prefix and b"ustar  " not in header[257:265]
        else name.removeprefix("./")
    )


# --- members that are containers of their own ---------------------------------------------------------


def _member(source: Source, member: Member) -> Parsed:
    from ckptguard.formats import READERS, sniff

    head = source.read(member.start, min(BLOCK, member.size))
    if sniff(head) == "tar":
        raise FormatError("bad-header", f"{member.name} is a tar inside of a tar")
    part = source.part(member.start, member.size)
    try:
        parsed = READERS["safetensors" if member.name.endswith(".safetensors") else "torch"](part)
    except FormatError as e:
        raise FormatError(e.code, f"{member.name}: {e}") from e
    source.bytes_read += part.bytes_read
    return _moved(parsed, member)


def _moved(parsed: Parsed, member: Member) -> Parsed:
    """A member's offsets as offsets in the whole file."""
    for tensor in parsed.tensors:
        if tensor.start is not None:
            tensor.start += member.start
    verify = parsed.verify
    return replace(
        parsed,
        spans=tuple(
            Span(s.start + member.start, s.length, s.crc, f"{member.name}:{s.name}") for s in parsed.spans
        ),
        gaps=tuple((start + member.start, length) for start, length in parsed.gaps),
        problems=tuple(
            replace(p, where=f"{member.name}:{p.where}" if p.where else member.name) for p in parsed.problems
        ),
        verify=None
        if verify is None
        else lambda found: verify(
            {at - member.start: raw for at, raw in found.items() if at >= member.start}
        ),
    )


def _verify(members: Iterable[Parsed]) -> Any:
    checks = [p.verify for p in members if p.verify is not None]

    def verify(found: Mapping[int, bytes]) -> Iterator[Problem]:
        for check in checks:
            yield from check(found)

    return verify if checks else None


# --- torch's oldest format ----------------------------------------------------------------------------


def _oldest(source: Source, members: Mapping[str, Member]) -> Parsed:
    """`storages` and `tensors` hold their pickles and raw data one after another; `pickle` refers to them by number.

    Only the structure is read: which tensors there are is in the last pickle's persistent ids.
    """
    member = members["pickle"]
    if member.size > MAX_PICKLE:
        raise FormatError("bad-header", f"the pickle of {member.size} bytes is larger than any of that time")
    found: dict[str, Tensor] = {}

    def persistent(key: Any) -> Any:
        if isinstance(key, tuple) and key and key[0] == "tensor":
            key = key[1]
        name = str(key)[:64]
        return found.setdefault(name, Tensor(name, "unknown", (), location="meta"))

    pickled = read_pickle(source.read(member.start, member.size), persistent=persistent)
    return Parsed("torch-tar", pickled.value, globals=pickled.globals)
