"""Element types: names, sizes, and safetensors codes. Does not use torch.

A dtype has torch's name without the prefix ``torch.``. A dtype without a safetensors code is stored as ``U8`` with one
more dimension of ``itemsize`` (see ``docs/format.md``); the manifest keeps its name.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import FormatError


class DType(NamedTuple):
    """One element type. ``itemsize`` is in bytes; ``safetensors`` is None if that format has no code for it.

    ``format/safetensors.py`` maps shapes, too.
    """

    name: str
    itemsize: int
    kind: str  # "bool" | "int" | "uint" | "float" | "complex" | "bits"
    safetensors: str | None = None
    code: int = -1  # position in DTYPES; stable, for in-memory columns only (the manifest stores names)

    def __str__(self) -> str:
        return self.name


_TABLE: list[tuple[str, int, str, str | None]] = [
    ("bool", 1, "bool", "BOOL"),
    ("uint8", 1, "uint", "U8"),
    ("int8", 1, "int", "I8"),
    ("int16", 2, "int", "I16"),
    ("uint16", 2, "uint", "U16"),
    ("int32", 4, "int", "I32"),
    ("uint32", 4, "uint", "U32"),
    ("int64", 8, "int", "I64"),
    ("uint64", 8, "uint", "U64"),
    ("float16", 2, "float", "F16"),
    ("bfloat16", 2, "float", "BF16"),
    ("float32", 4, "float", "F32"),
    ("float64", 8, "float", "F64"),
    ("complex64", 8, "complex", "C64"),
    ("complex32", 4, "complex", None),
    ("complex128", 16, "complex", None),
    ("float8_e4m3fn", 1, "float", "F8_E4M3"),
    ("float8_e5m2", 1, "float", "F8_E5M2"),
    ("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", 1, "float", "F8_E8M0"),
    ("float4_e2m1fn_x2", 1, "bits", "F4"),  # safetensors counts each of the two numbers in an element
    *((f"{sign}int{bits}", 1, "bits", None) for sign in ("", "u") for bits in range(1, 8)),
    ("bits8", 1, "bits", None),
    ("bits16", 2, "bits", None),
    ("bits1x8", 1, "bits", None),
    ("bits2x4", 1, "bits", None),
    ("bits4x2", 1, "bits", None),
]

DTYPES: dict[str, DType] = {
    name: DType(name, size, kind, code, index) for index, (name, size, kind, code) in enumerate(_TABLE)
}
"""Every element type of the format, by name."""


def find_dtype(name: str) -> DType:
    """Return the dtype of this name. Raises ``FormatError`` if the format has no such dtype."""
    try:
        return DTYPES[name]
    except KeyError:
        raise FormatError(f"unknown dtype {name!r}; known dtypes: {', '.join(DTYPES)}") from None


# Significand bits (with the hidden one) and exponent bits of the float types; signed range bits of the integer types.
_FLOATS = {
    "float64": (53, 11),
    "float32": (24, 8),
    "bfloat16": (8, 8),
    "float16": (11, 5),
    "float8_e4m3fn": (4, 4),
    "float8_e5m2": (3, 5),
}
_COMPLEX_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def is_lossless_cast(source: DType, target: DType) -> bool:
    """Whether ``target`` represents every value of ``source`` exactly."""
    if source == target:
        return True
    if source.kind == "complex":
        return target.kind == "complex" and is_lossless_cast(_part(source), _part(target))
    if target.kind == "complex":
        return is_lossless_cast(source, _part(target))
    if source.name in _FLOATS and target.name in _FLOATS:
        return all(a <= b for a, b in zip(_FLOATS[source.name], _FLOATS[target.name], strict=True))
    if source.kind in ("int", "uint", "bool") and target.kind in ("int", "uint"):
        return _value_bits(source) <= _value_bits(target) and (source.kind != "int" or target.kind == "int")
    if source.kind in ("int", "uint", "bool") and target.name in _FLOATS:
        return _value_bits(source) <= _FLOATS[target.name][0] and _FLOATS[target.name][1] >= 8
    return False


def is_meaningful_cast(source: DType, target: DType) -> bool:
    """Whether a cast makes sense if the caller accepts rounding.

    It does not from numbers with a fraction to integers, and not to or from opaque bits.
    """
    if "bits" in (source.kind, target.kind):
        return False
    ranks = {"bool": 0, "uint": 1, "int": 1, "float": 2, "complex": 3}
    return ranks[source.kind] <= ranks[target.kind]


def _part(dtype: DType) -> DType:
    return DTYPES[_COMPLEX_PARTS[dtype.name]]


def _value_bits(dtype: DType) -> int:
    return 1 if dtype.kind == "bool" else 8 * dtype.itemsize - (dtype.kind == "int")
