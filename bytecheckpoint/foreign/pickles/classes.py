"""The closed list of functions and classes that are interpreted. Everything else stays a name (``Global``)."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from ...errors import FormatError
from ...tensors.dtypes import DTYPES, DType
from .arrays import array_from_buffer, empty_array, scalar, set_array
from .bounds import check_keys
from .records import Global, Instance, Storage, TensorRef

_UTILS = "torch._utils"
_REFUSED = {
    "_rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no bytes",
    "_rebuild_sparse_tensor": "a sparse tensor",
    "_rebuild_sparse_csr_tensor": "a sparse tensor",
    "_rebuild_nested_tensor": "a nested tensor",
    "_rebuild_qtensor": "a quantized tensor",
    "_rebuild_wrapper_subclass": "a tensor subclass",
    "_rebuild_device_tensor_from_numpy": "a tensor in the form of an old XLA release",
    "_rebuild_xla_tensor": "a tensor in the form of an old XLA release",
    "_rebuild_tensor_v3": "a conjugated or negated view of a tensor",
}
_PLAIN_TENSORS = {
    Global(module, name)
    for module, name in (
        ("torch", "Tensor"),
        ("torch._tensor", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.nn.parameter", "Buffer"),
        ("torch.nn", "Parameter"),
    )
}
_ZERO_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
_ZERO_STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")

_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "ComplexHalf": "complex32",
    "Untyped": "uint8",
}


def find_global(module: str, name: str) -> Global | DType:
    """Return the dtype of this name, or the name."""
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    return Global(module, name)


def storage_dtype(kind: Any) -> DType | None:
    """Return the element type of a storage class; None if it is not known, such as that of a quantized tensor."""
    if type(kind) is not Global or kind.module not in ("torch", "torch.storage", "torch.cuda"):
        return None
    name = _STORAGES.get(kind.name.removesuffix("Storage"))
    return DTYPES[name] if name and kind.name.endswith("Storage") else None


def explain(value: Any) -> str:
    """Return what an object is, for an error message about an item that cannot be used."""
    if type(value) is not Instance:
        return f"a {type(value).__name__}"
    if value.cls.name == "_rebuild_from_type_v2" and len(value.args) > 1:
        return f"a tensor of class {value.args[1]}"
    if value.cls.name == "_rebuild_wrapper_subclass" and value.args:
        return f"a tensor of class {value.args[0]}"
    if value.cls.module == _UTILS and value.cls.name in _REFUSED:
        return _REFUSED[value.cls.name]
    return f"an object of class {value.cls}"


def set_state(target: Any, state: Any) -> int:
    """Set the state of an object. Returns the memory in bytes that this takes."""
    if type(target) is Instance:
        target.state = state
        return 100
    if type(target) is np.ndarray:
        return set_array(target, state)
    if type(target) in (OrderedDict, Counter, dict, TensorRef):
        return 0  # attributes such as a state dict's ``_metadata``, which has the versions of the modules
    raise FormatError(f"a {type(target).__name__} has a state")


# -- tensors --


def _tensor(
    storage: Any, start: Any, shape: Any, strides: Any, requires_grad: Any = None, hooks: Any = None, extra: Any = None
) -> Any:
    dtype = storage.dtype if type(storage) is Storage else None
    return _typed_tensor(storage, start, shape, strides, requires_grad, hooks, dtype, extra)


def _typed_tensor(
    storage: Any,
    start: Any,
    shape: Any,
    strides: Any,
    requires_grad: Any = None,
    hooks: Any = None,
    dtype: Any = None,
    extra: Any = None,
) -> Any:
    if type(storage) is not Storage or type(dtype) is not DType or (type(extra) is dict and any(extra.values())):
        args = (storage, start, shape, strides, None, None, dtype, extra)
        return Instance(Global(_UTILS, "_rebuild_tensor_v3"), args)
    if type(shape) is not tuple or type(strides) is not tuple:
        raise FormatError("the shape or the strides of a tensor are no tuple")
    return TensorRef(storage, dtype, shape, strides, start)


def _moved_tensor(data: Any, dtype: Any, *rest: Any) -> Any:
    if type(data) is TensorRef and data.dtype == dtype:
        return data
    return Instance(Global(_UTILS, "_rebuild_device_tensor_from_cpu_tensor"), (data, dtype, *rest))


def _typed_subclass(function: Any, cls: Any, args: Any, state: Any = None) -> Any:
    known = FUNCTIONS.get(function) if type(function) is Global and function.module == _UTILS else None
    if known is None or cls not in _PLAIN_TENSORS or type(args) is not tuple:
        return Instance(Global("torch._tensor", "_rebuild_from_type_v2"), (function, cls, args, state))
    return known(*args)


# -- plain values --


def _pairs(items: Any) -> list[tuple[Any, Any]]:
    if type(items) is dict:
        return list(items.items())
    if type(items) not in (list, tuple):
        raise FormatError("a dict is made of something other than pairs")
    found = []
    for pair in items:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise FormatError("a dict is made of something other than pairs")
        found.append((pair[0], pair[1]))
    check_keys([key for key, _ in found])
    return found


def _items(what: str, items: Any) -> Any:
    if type(items) not in (list, tuple):
        raise FormatError(f"a {what} is made of something other than a list")
    return items


def _set(items: Any = ()) -> set[Any]:
    check_keys(_items("set", items))
    return set(items)


def _deque(items: Any = (), length: Any = None) -> deque[Any]:
    if not (length is None or type(length) is int):
        raise FormatError("the length of a deque is no number")
    return deque(_items("deque", items), length)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise FormatError("the parts of a complex number are no floats")
    return complex(real, imaginary)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 stores bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise FormatError("bytes are stored as text in an unknown encoding")
    return text.encode("latin1")


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if type(data) is str else data if type(data) is bytes else b"")


def _path(kind: type[PurePath], *parts: Any) -> PurePath:
    if not all(type(part) is str for part in parts):
        raise FormatError("the parts of a path are no text")
    return kind(*parts)


_posix_path, _windows_path = partial(_path, PurePosixPath), partial(_path, PureWindowsPath)


def _reconstructor(cls: Any, base: Any, state: Any = None) -> Any:
    if type(cls) is not Global:
        raise FormatError("an object has no class")
    return Instance(cls, () if state is None else (state,))


def _member(cls: Any, name: Any) -> Any:
    """How Python 3.11 stores a member of an enum."""
    if cls == _ZERO_STAGE and name in _ZERO_STAGES:
        return _ZERO_STAGES[name]
    return Instance(Global("builtins", "getattr"), (cls, name))


def _both_names(module: str, old: str, functions: dict[str, Callable[..., Any]]) -> dict[Global, Callable[..., Any]]:
    """A module by its name in Python 3, and in Python 2 (which protocol 2 uses)."""
    return {Global(one, name): function for one in (module, old) for name, function in functions.items()}


FUNCTIONS: dict[Global, Callable[..., Any]] = {
    Global(_UTILS, "_rebuild_tensor"): _tensor,
    Global(_UTILS, "_rebuild_tensor_v2"): _tensor,
    Global(_UTILS, "_rebuild_tensor_v3"): _typed_tensor,
    Global(_UTILS, "_rebuild_parameter"): lambda data, *rest: data,
    Global(_UTILS, "_rebuild_parameter_with_state"): lambda data, *rest: data,
    Global(_UTILS, "_rebuild_device_tensor_from_cpu_tensor"): _moved_tensor,
    Global("torch._tensor", "_rebuild_from_type_v2"): _typed_subclass,
    Global("torch._tensor", "_rebuild_from_type"): _typed_subclass,
    Global("torch.tensor", "_rebuild_from_type_v2"): _typed_subclass,
    Global("torch.tensor", "_rebuild_from_type"): _typed_subclass,
    Global("torch", "Size"): lambda items=(): tuple(_items("size", items)),
    Global("collections", "OrderedDict"): lambda items=(): OrderedDict(_pairs(items)),
    Global("collections", "Counter"): lambda items=(): Counter(dict(_pairs(items))),
    Global("collections", "defaultdict"): lambda factory=None, items=(): dict(_pairs(items)),
    Global("collections", "deque"): _deque,
    **_both_names(
        "builtins",
        "__builtin__",
        {
            "set": _set,
            "frozenset": lambda items=(): frozenset(_set(items)),
            "complex": _complex,
            "bytes": lambda: b"",
            "bytearray": _bytearray,
            "getattr": _member,
        },
    ),
    **_both_names("copyreg", "copy_reg", {"_reconstructor": _reconstructor}),
    **_both_names("pathlib", "pathlib._local", {"PosixPath": _posix_path, "PurePosixPath": _posix_path}),
    **_both_names("pathlib", "pathlib._local", {"WindowsPath": _windows_path, "PureWindowsPath": _windows_path}),
    Global("_codecs", "encode"): _encode,
    **_both_names("numpy._core.multiarray", "numpy.core.multiarray", {"scalar": scalar, "_reconstruct": empty_array}),
    **_both_names("numpy._core.numeric", "numpy.core.numeric", {"_frombuffer": array_from_buffer}),
    _ZERO_STAGE: lambda value: value,
}
"""What is called in place of a function or class of the file."""
