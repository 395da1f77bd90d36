"""The exact allow-list of callables that checkpoints need, and our stand-ins for them, which build plain data.

Sources: torch/_utils.py and torch/_tensor.py (`_rebuild_*`), numpy/_core/multiarray (`_reconstruct`, `scalar`), the standard
library's own reduce methods, and what the frameworks' files were seen to hold (docs/pickle.md lists them by framework).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptguard.formats._enums import KNOWN_ENUMS
from ckptguard.formats._inert import Name, Opaque, brief, checked_key
from ckptguard.formats._machine import Machine, Through
from ckptguard.formats._numpy_values import PickledArray, PickledDtype, frombuffer, numpy_scalar
from ckptguard.model import Tensor
from ckptguard.values import MAX_DIMENSIONS, itemsize

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that tensors of a torch file view. `numel` counts elements of `dtype`; bytes are `nbytes`."""

    key: str
    dtype: str
    numel: int
    location: str
    untyped: bool = False
    view_of: str = ""
    view_offset: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)


def storage_dtype(kind: Any) -> str | None:
    """The element type of a storage class's name, None where it is no storage class."""
    full = kind.full if isinstance(kind, Name) else ""
    module, _, name = full.rpartition(".")
    if module in ("torch", "torch.cuda", "torch.storage"):
        return STORAGE_DTYPES.get(name)
    return None


def dtype_of(value: Any) -> str | None:
    """torch.bfloat16 (a name, or text) as "bfloat16"."""
    full = value.full if isinstance(value, Name) else value if isinstance(value, str) else ""
    module, _, name = full.rpartition(".")
    return name if module == "torch" and name.isidentifier() else None


# --- tensors ------------------------------------------------------------------------------------------


def view(storage: Any, offset: int, size: Any, stride: Any, dtype: str | None = None) -> Tensor:
    """A tensor over a storage. `offset` and `stride` count elements of the tensor's dtype."""
    shape = tuple(int(d) for d in size)
    strides = tuple(int(s) for s in stride)
    if not isinstance(storage, Storage):
        raise TypeError("not a storage")
    if (
        len(shape) > MAX_DIMENSIONS
        or len(strides) != len(shape)
        or offset < 0
        or any(d < 0 for d in (*shape, *strides))
    ):
        raise ValueError("impossible geometry")
    kind = dtype or storage.dtype
    tensor = Tensor("", kind, shape, strides=strides, storage=storage.key, location=storage.location)
    tensor.contiguous = _is_contiguous(shape, strides)
    width = itemsize(kind)
    span = 0 if 0 in shape else 1 + sum((d - 1) * s for d, s in zip(shape, strides))
    # Offsets are within the storage here; the reader of the container moves them to where the record lies.
    tensor.start = (offset * width) + storage.view_offset * itemsize(storage.dtype)
    tensor.nbytes = span * width
    return tensor


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    want = 1
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != want:
            return 0 in shape
        want *= extent
    return True


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    return view(storage, offset, size, stride)


def _rebuild_tensor_v3(
    storage: Any, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    return view(storage, offset, size, stride, dtype_of(dtype))


def _rebuild_qtensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    return view(storage, offset, size, stride)


def _first(value: Any, *_: Any) -> Any:
    return value


def _rebuild_from_type(machine: Machine, function: Any, cls: Any, args: Any, state: Any = None) -> Any:
    made = machine.call(function, args)
    if isinstance(made, Tensor) and isinstance(cls, Name) and cls.full not in _PLAIN_TENSORS:
        return Opaque(cls.full, (made,), state)
    if isinstance(made, Opaque) and made.state is None:
        made.state = state  # a wrapper (DTensor) keeps the tensor that it wraps there
    return made


_PLAIN_TENSORS = {
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
}


def _rebuild_meta_tensor(dtype: Any, size: Any, stride: Any, *_: Any) -> Tensor:
    shape = tuple(int(d) for d in size)
    return Tensor("", dtype_of(dtype) or "float32", shape, strides=tuple(stride), location="meta")


def _rebuild_wrapper_subclass(cls: Any, dtype: Any, size: Any, *rest: Any) -> Opaque:
    return Opaque(cls.full if isinstance(cls, Name) else "?", (dtype, size, *rest))


def _rebuild_from_numpy(data: Any, dtype: Any, device: Any, *_: Any) -> Any:
    if isinstance(data, np.ndarray):
        tensor = Tensor(
            "", dtype_of(dtype) or str(data.dtype), data.shape, nbytes=data.nbytes, location=str(device)
        )
        tensor.value = data
        return tensor
    return data


def _opaque(name: str) -> Callable[..., Opaque]:
    return lambda *args: Opaque(name, args)


# --- the standard library -----------------------------------------------------------------------------


def _dict(items: Any = (), *_: Any) -> dict[Any, Any]:
    if isinstance(items, dict):
        return dict(items)
    return {checked_key(k): v for k, v in items} if isinstance(items, list | tuple) else {}


def _defaultdict(_factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _dict(items)


def _encode(text: Any, encoding: Any = "utf-8", *_: Any) -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "ascii") or not isinstance(text, str):
        raise ValueError("an encoding that no checkpoint uses")
    return text.encode(encoding)


def _path(*parts: Any) -> str:
    return posixpath.join(*(p if isinstance(p, str) else brief(p) for p in parts)) if parts else "."


_PLAIN_BASES = frozenset(
    f"builtins.{n}"
    for n in (
        "object",
        "int",
        "float",
        "complex",
        "str",
        "bytes",
        "bytearray",
        "list",
        "tuple",
        "dict",
        "set",
        "frozenset",
    )
)


def _reconstructor(machine: Machine, cls: Any, base: Any = None, state: Any = None) -> Any:
    if isinstance(base, Name) and base.full not in _PLAIN_BASES:
        machine.call(base, (state,))  # copyreg runs base.__init__(object, state)
    return Opaque(cls.full if isinstance(cls, Name) else "?", (), state)


def _newobj(machine: Machine, cls: Any, *args: Any) -> Any:
    return machine.new(cls, args)


def _newobj_ex(machine: Machine, cls: Any, args: Any = (), kwargs: Any = None) -> Any:
    return machine.new(cls, args, kwargs)


def _bytearray(value: Any = b"", encoding: Any = "latin-1") -> bytearray:
    if isinstance(value, int):  # bytearray(n) would allocate n bytes
        raise ValueError("a length where bytes belong")
    return bytearray(_encode(value, encoding) if isinstance(value, str) else value)


def _text(value: Any = "", *_: Any) -> str:
    return value if isinstance(value, str) else brief(value, 4096)


CALLS: dict[str, Callable[..., Any] | Through] = {
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": _defaultdict,
    "collections.deque": lambda items=(), *_: list(items),
    "builtins.dict": _dict,
    "builtins.list": lambda items=(): list(items),
    "builtins.tuple": lambda items=(): tuple(items),
    "builtins.set": lambda items=(): {checked_key(i) for i in items},
    "builtins.frozenset": lambda items=(): frozenset(checked_key(i) for i in items),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda value=b"", encoding="latin-1": bytes(_bytearray(value, encoding)),
    "builtins.complex": lambda re=0, im=0: complex(re, im),
    "builtins.slice": lambda *args: Opaque("builtins.slice", args),
    "builtins.range": lambda *args: Opaque("builtins.range", args),
    "builtins.int": lambda value=0: int(value),
    "builtins.float": lambda value=0.0: float(value),
    "builtins.bool": lambda value=False: bool(value),
    "builtins.str": _text,
    "builtins.object": lambda: Opaque("builtins.object"),
    "_codecs.encode": _encode,
    "copyreg._reconstructor": Through(_reconstructor),
    "copyreg.__newobj__": Through(_newobj),
    "copyreg.__newobj_ex__": Through(_newobj_ex),
    "argparse.Namespace": lambda: Opaque("argparse.Namespace"),
    "types.SimpleNamespace": lambda *a: Opaque("types.SimpleNamespace", a),
    "datetime.timedelta": lambda *a: Opaque("datetime.timedelta", a),
    "datetime.datetime": lambda *a: Opaque("datetime.datetime", a),
    "datetime.date": lambda *a: Opaque("datetime.date", a),
    "datetime.time": lambda *a: Opaque("datetime.time", a),
    "datetime.timezone": lambda *a: Opaque("datetime.timezone", a),
    "decimal.Decimal": lambda value="0": Opaque("decimal.Decimal", (value,)),
    "fractions.Fraction": lambda *a: Opaque("fractions.Fraction", a),
    "uuid.UUID": lambda *a: Opaque("uuid.UUID", a),
    "random.Random": lambda *a: Opaque("random.Random", a),
    "signal.Signals": lambda value=0: Opaque("signal.Signals", (value,)),
    "_io.BytesIO": lambda value=b"", *_: Opaque("_io.BytesIO", (value,)),
    "io.BytesIO": lambda value=b"", *_: Opaque("io.BytesIO", (value,)),
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._utils._rebuild_qtensor": _rebuild_qtensor,
    "torch._utils._rebuild_sparse_tensor": _opaque("torch.sparse.Tensor"),
    "torch._utils._rebuild_sparse_csr_tensor": _opaque("torch.sparse_csr.Tensor"),
    "torch._utils._rebuild_nested_tensor": _opaque("torch.nested.Tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta_tensor,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "torch._utils._rebuild_device_tensor_from_numpy": _rebuild_from_numpy,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._tensor._rebuild_from_type_v2": Through(_rebuild_from_type),
    "torch._tensor._rebuild_from_type": Through(_rebuild_from_type),
    "torch.Size": lambda items=(): tuple(items),
    "torch.device": lambda kind="cpu", index=None: (
        _text(kind) if index is None else f"{_text(kind)}:{_text(index)}"
    ),
    "torch.serialization._get_layout": _text,
    "torch.torch_version.TorchVersion": _text,
    "torch.Tensor": lambda *a: Opaque("torch.Tensor", a),
    "torch.nn.parameter.Parameter": _first,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": lambda value=0: value,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": lambda value=0: value,
    "torch.distributed.remote_device._remote_device": lambda value="": Opaque("remote_device", (value,)),
    "torch.Generator": lambda *a: Opaque("torch.Generator", a),
    "numpy.ndarray": lambda *a: PickledArray(),
    "numpy.dtype": PickledDtype,
    "_random.Random": lambda *a: Opaque("_random.Random", a),
}
for _package in ("numpy.core", "numpy._core"):
    CALLS[f"{_package}.multiarray._reconstruct"] = lambda *a: PickledArray()
    CALLS[f"{_package}.multiarray.scalar"] = numpy_scalar
    CALLS[f"{_package}.numeric._frombuffer"] = frombuffer


def _dtype_class(kind: str) -> Callable[..., PickledDtype]:
    text = "S1" if kind in ("Str", "Bytes") else kind.lower()
    return lambda *_: PickledDtype(text)


for _kind in [
    "Bool",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "Float16",
    "Float32",
    "Float64",
    "Str",
    "Bytes",
]:
    CALLS[f"numpy.dtypes.{_kind}DType"] = _dtype_class(_kind)
for _constructor in ("__generator_ctor", "__bit_generator_ctor", "__randomstate_ctor"):
    CALLS[f"numpy.random._pickle.{_constructor}"] = _opaque(f"numpy.random._pickle.{_constructor}")
for _module in ("pathlib", "pathlib._local"):
    for _flavour in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath"):
        CALLS[f"{_module}.{_flavour}"] = _path
# TorchScript's own pickles (torch/jit/_pickle.py).
for _builder in (
    "build_intlist",
    "build_tensorlist",
    "build_doublelist",
    "build_boollist",
    "build_tensor_from_id",
    "restore_type_tag",
):
    CALLS[f"torch.jit._pickle.{_builder}"] = _opaque(f"torch.jit._pickle.{_builder}")
for _enum in KNOWN_ENUMS:
    CALLS[_enum] = lambda value=None, *_, name=_enum: Opaque(name, (value,))
