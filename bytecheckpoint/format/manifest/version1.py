"""The payload of format version 1: a map of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgpack
import numpy as np

from ...errors import FormatError, UnserializableError
from ...tensors.dtypes import DTYPES, find_dtype
from ...tensors.tables import BoxTable, Int64, TensorTable
from ..msgpack_scan import scan_msgpack, unpack_plain
from .columns import count_of, pack_names, pack_numbers, unpack_names, unpack_numbers, unpack_uint64
from .document import FileTable, Manifest, SectionInfo
from .validation import MAX_NDIM

__all__ = ["ManifestV1", "fields", "pack_metadata"]

_MAX_METADATA = 64 << 20


class ManifestV1:
    """Version 1 as a type: ``unpack`` inverts ``pack``. Both validate only what they need to build columns."""

    top: ClassVar[tuple[str, ...]] = (
        *("library_version", "step", "created", "world_size", "attempt", "metadata"),
        *("sections", "files", "tensors", "shards", "aliases"),
    )
    """The keys of the payload."""

    @classmethod
    def pack(cls, manifest: Manifest) -> bytes:
        """Return the payload of a valid manifest."""
        return _packed(cls.columns(manifest))

    @classmethod
    def unpack(cls, payload: bytes) -> Manifest:
        """Return the manifest. Raises ``FormatError`` for anything but a map of columns whose lengths agree."""
        document = unpack_plain("manifest payload", payload, max_depth=4)
        return cls.manifest(fields("manifest", document, cls.top))

    @staticmethod
    def columns(manifest: Manifest) -> dict[str, Any]:
        """Return the columns of a valid manifest."""
        files, tensors, shards = manifest.files, manifest.tensors, manifest.shards
        counts = np.bincount(shards.tensor, minlength=len(tensors)).astype(np.int64)
        dtypes = sorted(name for name in DTYPES if (tensors.dtype == DTYPES[name].code).any())
        dtype_index = np.zeros(len(DTYPES), np.int64)
        dtype_index[[DTYPES[name].code for name in dtypes]] = np.arange(len(dtypes))
        return {
            "library_version": manifest.library_version,
            "step": manifest.step,
            "created": manifest.created,
            "world_size": manifest.world_size,
            "attempt": manifest.attempt,
            "metadata": pack_metadata(manifest.metadata),
            "sections": {
                "name": pack_names([section.name for section in manifest.sections]),
                "kind": pack_names([section.kind for section in manifest.sections]),
            },
            "files": {
                "name": pack_names(files.name),
                **{key: pack(getattr(files, key)) for key, (pack, _) in _FILES.items()},
            },
            "tensors": {
                "name": pack_names(tensors.names),
                "section": pack_numbers(tensors.section),
                "dtype": {"of": pack_names(dtypes), "index": pack_numbers(dtype_index[tensors.dtype])},
                "ndim": pack_numbers(tensors.ndim),
                "shape": pack_numbers(tensors.shape),
                "scope": pack_numbers(manifest.scope + 1),
                "shards": pack_numbers(counts),
            },
            "shards": {
                "offsets": pack_numbers(shards.offsets),
                "lengths": pack_numbers(shards.lengths),
                "file": pack_numbers(manifest.shard_file),
                "offset": pack_numbers(manifest.shard_offset),
                "checksums": pack_numbers(manifest.checksums),
            },
            "aliases": {
                "name": pack_names([name for name, _ in manifest.aliases]),
                "target": pack_names([target for _, target in manifest.aliases]),
            },
        }

    @staticmethod
    def manifest(top: Mapping[str, Any]) -> Manifest:
        """Return the manifest with these columns. Raises ``FormatError``."""
        sections = [
            SectionInfo(name, kind) for name, kind in _same_length("sections", *_names(top, "sections", "name", "kind"))
        ]
        files = _unpack_files(fields("files", top["files"], ("name", *_FILES)))
        tensors, scope, counts = _unpack_tensors(
            fields("tensors", top["tensors"], _TENSORS), [section.name for section in sections]
        )
        column = fields("shards", top["shards"], _SHARDS)
        total = count_of("shards.file", column["file"])
        if int(counts.max(initial=0)) > total or int(counts.sum()) != total:
            raise FormatError(f"manifest: the tensors have {counts.sum()} shards, but {total} are listed")
        tensor = np.repeat(np.arange(len(tensors), dtype=np.int64), counts)
        coordinates = int(tensors.ndim[tensor].sum())
        return Manifest(
            library_version=_typed(top, "library_version", str),
            step=None if top["step"] is None else _typed(top, "step", int),
            created=_typed(top, "created", str),
            world_size=_typed(top, "world_size", int),
            attempt=_typed(top, "attempt", str),
            metadata=_unpack_metadata(_typed(top, "metadata", bytes)),
            sections=sections,
            files=files,
            tensors=tensors,
            scope=scope - 1,
            shards=BoxTable.from_columns(
                tensors,
                tensor,
                unpack_numbers("shards.offsets", column["offsets"], coordinates),
                unpack_numbers("shards.lengths", column["lengths"], coordinates),
            ),
            shard_file=unpack_numbers("shards.file", column["file"], total),
            shard_offset=unpack_numbers("shards.offset", column["offset"], total),
            checksums=unpack_uint64(
                "shards.checksums", column["checksums"], count_of("shards.checksums", column["checksums"])
            ),
            aliases=list(_same_length("aliases", *_names(top, "aliases", "name", "target"))),
        )


_TENSORS = ("name", "section", "dtype", "ndim", "shape", "scope", "shards")
_SHARDS = ("offsets", "lengths", "file", "offset", "checksums")


def _unpack_files(column: Mapping[str, Any]) -> FileTable:
    names = unpack_names("files.name", column["name"])
    unpacked = {key: unpack(f"files.{key}", column[key], len(names)) for key, (_, unpack) in _FILES.items()}
    return FileTable(name=names, **unpacked)


def _unpack_tensors(column: Mapping[str, Any], sections: list[str]) -> tuple[TensorTable, Int64, Int64]:
    names = unpack_names("tensors.name", column["name"])
    count = len(names)
    dtypes = fields("tensors.dtype", column["dtype"], ("of", "index"))
    codes = np.array([find_dtype(name).code for name in unpack_names("tensors.dtype.of", dtypes["of"])], np.int64)
    index = unpack_numbers("tensors.dtype.index", dtypes["index"], count)
    ndim = unpack_numbers("tensors.ndim", column["ndim"], count)
    if int(index.max(initial=-1)) >= len(codes) or int(ndim.max(initial=0)) > MAX_NDIM:
        raise FormatError(f"manifest: a tensor's dtype is not in the list, or it has over {MAX_NDIM} dimensions")
    shape = unpack_numbers("tensors.shape", column["shape"], int(ndim.sum()))
    section = unpack_numbers("tensors.section", column["section"], count)
    scope = unpack_numbers("tensors.scope", column["scope"], count)
    shards = unpack_numbers("tensors.shards", column["shards"], count)
    dtype = codes[index] if count else index
    return TensorTable(names, sections, section, dtype, ndim, shape), scope, shards


def _pack_choices(values: list[str]) -> dict[str, Any]:
    """Pack a column with few distinct strings: the strings, and the index of each row's string."""
    of = sorted(set(values))
    position = {value: i for i, value in enumerate(of)}
    return {"of": pack_names(of), "index": pack_numbers(np.array([position[v] for v in values], np.int64))}


def _unpack_choices(what: str, column: object, count: int) -> list[str]:
    found = fields(what, column, ("of", "index"))
    of = unpack_names(what, found["of"])
    index = unpack_numbers(what, found["index"], count)
    if int(index.max(initial=-1)) >= len(of):
        raise FormatError(f"manifest column {what}: choice {int(index.max())} of {len(of)}")
    return [of[i] for i in index.tolist()]


# The columns of ``FileTable`` after the names, in the order of the document: how each is packed, and unpacked to a
# number of rows.
_NUMBERS = (pack_numbers, unpack_numbers)
_CHOICES = (_pack_choices, _unpack_choices)
_FILES: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[str, object, int], Any]]] = {
    "size": _NUMBERS,
    "section": _NUMBERS,
    "rank": _NUMBERS,
    "kind": _CHOICES,
    "head_length": _NUMBERS,
    "head_checksum": (pack_numbers, unpack_uint64),
    "chunk_size": _NUMBERS,
    "codec": _CHOICES,
}


def pack_metadata(metadata: dict[str, Any]) -> bytes:
    """Pack the user's metadata as a separate msgpack document.

    Call it before the first byte of a save is written. Raises ``UnserializableError`` unless it is a dict of None,
    bool, int (of 64 bits), float, str, bytes, list and dict with str or bytes keys, at most 64 levels deep and 64 MiB
    large.
    """
    try:
        data: bytes = msgpack.packb(metadata, use_bin_type=True)  # a tuple becomes an array
        scan_msgpack("metadata", data)
        msgpack.unpackb(data, strict_map_key=True)
    except (TypeError, ValueError, OverflowError, FormatError) as error:
        raise UnserializableError(
            f"metadata cannot be stored: {error}; it takes plain values (None, bool, int, float, str, bytes, lists and "
            f"dicts with str keys, no tuples). Store anything else as a section of the state"
        ) from None
    if len(data) > _MAX_METADATA or type(metadata) is not dict:
        raise UnserializableError(f"metadata is not a dict of at most {_MAX_METADATA} bytes; store it as a section")
    return data


def _unpack_metadata(data: bytes) -> dict[str, Any]:
    if len(data) > _MAX_METADATA:
        raise FormatError(f"user metadata of {len(data)} bytes is over {_MAX_METADATA}")
    metadata = unpack_plain("user metadata", data)
    if not isinstance(metadata, dict):
        raise FormatError("user metadata is not a map")
    return metadata


def _packed(value: object) -> bytes:
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True, strict_types=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"manifest holds a value that is not plain: {error}") from None
    return packed


def fields(what: str, found: object, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return ``found`` if it is a map of exactly these keys. Raises ``FormatError``."""
    if not isinstance(found, dict) or set(found) != set(names):
        raise FormatError(f"manifest: {what} does not have exactly the fields {', '.join(names)}")
    return found


def _names(top: Mapping[str, Any], what: str, first: str, second: str) -> tuple[list[str], list[str]]:
    found = fields(what, top[what], (first, second))
    return unpack_names(f"{what}.{first}", found[first]), unpack_names(f"{what}.{second}", found[second])


def _same_length(what: str, first: list[str], second: list[str]) -> list[tuple[str, str]]:
    if len(first) != len(second):
        raise FormatError(f"manifest: {what} has columns of {len(first)} and {len(second)} rows")
    return list(zip(first, second))


def _typed(top: Mapping[str, Any], key: str, kind: type) -> Any:
    if type(top[key]) is not kind:
        raise FormatError(f"manifest: {key} is not {kind.__name__}")
    return top[key]
