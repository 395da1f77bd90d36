"""The pickle reader: what the standard pickler writes is read right, and nothing is ever called."""

from __future__ import annotations

import collections
import contextlib
import pickle
import struct
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.errors import FormatError
from ckptguard.formats.pickles import Name, Opaque, read_pickle, walk
from ckptguard.model import GlobalUse
from ckptguard.validators.pickle_safety import is_unsafe

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=300)
)
keys = st.text(max_size=8) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(keys, inner, max_size=5)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
        | st.frozensets(st.integers(), max_size=4)
        | st.sets(st.text(max_size=4), max_size=4)
        | st.builds(bytearray, st.binary(max_size=40))
    ),
    max_leaves=25,
)


@given(trees, st.integers(0, 5))
def test_plain_data_comes_back_as_it_was(tree: Any, protocol: int) -> None:
    data = pickle.dumps(tree, protocol)
    found = read_pickle(data)
    assert found.value == tree
    assert found.end == len(data)
    assert not any(is_unsafe(use) for use in found.globals)


def test_shared_and_circular_parts_stay_so() -> None:
    shared: list[Any] = [1]
    tree: dict[str, Any] = {"a": shared, "b": shared}
    tree["self"] = tree
    for protocol in range(6):
        found = read_pickle(pickle.dumps(tree, protocol)).value
        assert found["a"] is found["b"]
        assert found["self"] is found


def test_python_2_names_are_mapped_as_the_unpickler_maps_them() -> None:
    found = read_pickle(b"ccopy_reg\n_reconstructor\n(c__main__\nThing\nc__builtin__\nobject\nNtR.")
    assert found.value == found.value and found.value.name == "__main__.Thing"
    assert GlobalUse("copyreg._reconstructor", "allowed") in found.globals
    assert read_pickle(b"cos\nsystem\n.").value == Name("os.system")
    assert read_pickle(b"c__builtin__\nxrange\n.").value == Name("builtins.range")
    assert read_pickle(b"\x80\x03c__builtin__\nxrange\n.").value == Name("__builtin__.xrange")


class Point(collections.namedtuple("Point", "x y")):
    """A class whose objects pickle by NEWOBJ with arguments and state."""


def test_objects_are_kept_apart_from_their_classes() -> None:
    for protocol in (2, 4, 5):
        found = read_pickle(pickle.dumps(Point(1, [2]), protocol))
        assert isinstance(found.value, Opaque)
        assert (found.value.name.rpartition(".")[2], found.value.args) == ("Point", (1, [2]))
        assert {u.how for u in found.globals} == {"named", "built"}


# --- everything that would run code is written down ---------------------------------------------------


def glob(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


CALLS_BY_STACK_GLOBAL = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R."
BUILT_NAME = b"\x80\x04(\x8c\x02os\x8c\x06systeml" + b"0" + CALLS_BY_STACK_GLOBAL[2:]
HOSTILE = {
    "reduce": glob("os", "system") + b"(S'id'\ntR.",
    "stack global": CALLS_BY_STACK_GLOBAL,
    "stack global after other work": BUILT_NAME,
    "dotted name in an innocent module": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x02id\x85R.",
    "instance": b"(S'id'\nios\nsystem\n.",
    "object": b"(" + glob("os", "system") + b"S'id'\no.",
    "python 2 alias": glob("commands", "getoutput") + b"(S'id'\ntR.",
    "builtin eval": glob("__builtin__", "eval") + b"(S'1'\ntR.",
    "named only": glob("os", "system") + b".",
    "extension code": b"\x80\x02\x82\x01)R.",
    "extension code, not called": b"\x80\x02\x83\x01\x01.",
    "through the reconstructor of tensors": glob("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + glob("pydoc", "pipepager")
    + glob("torch", "Tensor")
    + b"(S'a'\nS'id'\ntNtR.",
    "through the reconstructor, twice": glob("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + glob("torch._tensor", "_rebuild_from_type")
    + b"N("
    + glob("pydoc", "pipepager")
    + b"N(S'a'\nS'id'\ntNtNtR.",
    "a base class's __init__": glob("copy_reg", "_reconstructor")
    + b"("
    + glob("pydoc", "TextDoc")
    + glob("torch.utils.collect_env", "run")
    + b"S'id'\ntR.",
    "state put on a class": glob("torch", "Tensor") + b"(N}S'__reduce__'\nNstb.",
    "calling what was made": b"\x80\x02" + glob("some.module", "Maker") + b")\x81)R.",
    "keyword arguments of a class of the library": b"\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93)}\x92.",
    "enum form of the library": glob("torch.hub", "load_state_dict_from_url") + b"(S'http://x'\ntR.",
    "a persistent id outside of a torch file": b"S'storage'\nQ.",
    "before a protocol mark": glob("os", "system") + b"\x80\x04\x8c\x02id\x85R.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    found = read_pickle(HOSTILE[name])
    assert any(is_unsafe(use) for use in found.globals), found.globals


# --- bombs --------------------------------------------------------------------------------------------


def doubling(depth: int, pair: bytes = b"\x86") -> bytes:
    """Values that hold the one before twice: 2**depth in all, from a few bytes each."""
    out = b"\x80\x02)q\x00"
    for i in range(1, depth):
        out += b"h" + bytes([i - 1]) + b"h" + bytes([i - 1]) + pair + b"q" + bytes([i])
    return out


LISTS = b"\x80\x02]q\x00" + b"".join(
    b"](h" + bytes([i - 1]) + b"h" + bytes([i - 1]) + b"eq" + bytes([i]) for i in range(1, 200)
)
BOMBS = {
    "lists of lists": LISTS + b".",
    "a key whose hash never ends": doubling(200) + b"}h\xc7Ns.",
    "a set whose hash never ends": b"\x80\x04" + doubling(200)[2:] + b"\x8f(h\xc7\x90.",
    "a frozen set whose hash never ends": b"\x80\x04" + doubling(200)[2:] + b"(h\xc7\x91.",
    "a set built by a call": doubling(200) + b"cbuiltins\nset\n(](h\xc7etR.",
    "a dictionary built by a call": doubling(200) + b"ccollections\nOrderedDict\n(](h\xc7N\x86etR.",
    "text of what holds itself": LISTS + b"cbuiltins\nstr\n(h\xc7tR.",
    "a persistent id of what holds itself": LISTS + b"h\xc7Q.",
    "an integer of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "an integer of a megabyte": b"\x8b" + struct.pack("<i", 1 << 20) + bytes(1 << 20) + b".",
    "a name of a megabyte": b"\x80\x04X"
    + struct.pack("<I", 1 << 20)
    + b"a" * (1 << 20)
    + b"q\x00"
    + b"h\x00h\x00\x930" * 5000
    + b"N.",
    "copies of copies": b"\x80\x02]("
    + b"N" * 1000
    + b"eq\x000"
    + b"cbuiltins\nlist\n(h\x00tR0" * 100_000
    + b"N.",
    "encoded over and over": b"\x80\x02X"
    + struct.pack("<I", 1 << 20)
    + b"a" * (1 << 20)
    + b"q\x00("
    + b"c_codecs\nencode\n(h\x00tR" * 1000
    + b"l.",
    "bytearrays by length": b"\x80\x02cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR.",
    "bytes by length": b"\x80\x02cbuiltins\nbytes\n(J\xff\xff\xff\x7ftR.",
    "a deep nest": b"]" * 50_000 + b"a" * 49_999 + b".",
    "deep tuples": b"\x80\x02N" + b"\x85" * 50_000 + b".",
    "a frame of an exabyte": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
    "a string of an exabyte": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
    "a memo index of four billion": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a dtype of everything": b"cnumpy\ndtype\n(S'(99999,99999,99999)f8'\ntR.",
    "a regular expression of numbers": b"I" + b"9" * 100_000 + b"\n.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_soon_and_small(name: str) -> None:
    import resource

    data = BOMBS[name]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for persistent in (None, _refuse):
        try:
            found = read_pickle(data, persistent=persistent)
            sum(1 for _ in walk(found.value))
        except FormatError as error:
            assert len(str(error)) < 400
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def _refuse(pid: Any) -> Any:
    from ckptguard.formats.torch_zip import _storage

    return _storage(pid, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"N",
        b"(.",
        b"0.",
        b"\x80\xff.",
        b"\xff.",
        b"R.",
        b"Na.",
        b"}Ns.",
        b"h\x05.",
        b"((((.",
        b"\x97.",
        b"S'x\n.",
        b"cx\n.",
    ],
)
def test_damaged_pickles_raise_one_error(data: bytes) -> None:
    with pytest.raises(FormatError) as error:
        read_pickle(data)
    assert error.value.code in ("bad-header", "truncated")


@given(st.binary(max_size=400))
def test_any_bytes_raise_one_error(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        read_pickle(data)


@given(trees, st.integers(0, 5), st.data())
def test_a_changed_pickle_raises_one_error(tree: Any, protocol: int, data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps(tree, protocol))
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        found = read_pickle(bytes(raw))
        sum(1 for _ in walk(found.value))
