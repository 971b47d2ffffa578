"""The payload of a manifest: a map of columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from ...errors import FormatError, UnserializableError
from ...tensors.dtypes import DTYPES, find_dtype
from ...tensors.tables import BoxTable, Int64, TensorTable
from ..msgpack_scan import unpack_maps, unpack_plain
from .columns import (
    fields,
    pack_choices,
    pack_names,
    pack_numbers,
    unpack_checksums,
    unpack_choices,
    unpack_names,
    unpack_numbers,
)
from .document import Manifest, SectionInfo, Summary, find_frames
from .files import FileTable, FrameTable, ReferenceTable, is_encoded
from .validation import MAX_NDIM

SAVE_TIMES_KEY = "bytecheckpoint.save"
"""The key in the stored metadata of how long the save took. It is no part of the user's metadata."""

_MAX_METADATA = 64 << 20

_TOP = (
    *("library_version", "step", "created", "world_size", "attempt", "shared", "metadata"),
    *("sections", "files", "tensors", "shards", "aliases", "frames", "references"),
)
_FILE_NUMBERS = ("size", "section", "rank", "head_length", "chunk_size")
_FILE_CHOICES = ("kind", "codec")
_FILES = ("name", *_FILE_NUMBERS, *_FILE_CHOICES, "head_checksum")
_TENSORS = ("name", "section", "dtype", "ndim", "shape", "scope", "shards")
_SHARDS = ("offsets", "lengths", "file", "offset", "checksums")
_FRAMES = ("length", "checksums", "source", "offset")


def pack_payload(manifest: Manifest) -> bytes:
    """Return the payload of a valid manifest."""
    try:
        packed: bytes = msgpack.packb(_columns(manifest), use_bin_type=True, strict_types=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"manifest holds a value that is not plain: {error}") from None
    return packed


def unpack_payload(payload: bytes) -> Manifest:
    """Return the manifest, of which only what is needed to build its columns has been validated.

    Raises ``FormatError`` for anything but a map of columns whose lengths agree.
    """
    top = _top(payload)
    summary, save_times = _summary(top)
    tensors, scope, counts = _unpack_tensors(
        fields("tensors", top["tensors"], _TENSORS), [section.name for section in summary.sections]
    )
    column = fields("shards", top["shards"], _SHARDS)
    shard_file = unpack_numbers("shards.file", column["file"])
    total = len(shard_file)
    if int(counts.max(initial=0)) > total or int(counts.sum()) != total:
        raise FormatError(f"manifest: the tensors have {counts.sum()} shards, but {total} are listed")
    tensor = np.repeat(np.arange(len(tensors), dtype=np.int64), counts)
    coordinates = int(tensors.ndim[tensor].sum())
    manifest = Manifest(
        **vars(summary),
        is_shared=_typed(top, "shared", bool),
        tensors=tensors,
        scope=scope - 1,
        shards=BoxTable.from_columns(
            tensors,
            tensor,
            unpack_numbers("shards.offsets", column["offsets"], coordinates),
            unpack_numbers("shards.lengths", column["lengths"], coordinates),
        ),
        shard_file=shard_file,
        shard_offset=unpack_numbers("shards.offset", column["offset"], total),
        checksums=unpack_checksums("shards.checksums", column["checksums"]),
        aliases=_pairs(top, "aliases", "name", "target"),
        save_times=save_times,
    )
    manifest.files = replace(manifest.files, frames=_unpack_frames(top, manifest))
    return manifest


def unpack_summary(payload: bytes) -> Summary:
    """Return what ``unpack_payload`` returns without its tables of tensors and shards, in a seventh of the time."""
    return _summary(_top(payload))[0]


def _top(payload: bytes) -> Mapping[str, Any]:
    return fields("manifest", unpack_maps("manifest payload", payload), _TOP)


def _summary(top: Mapping[str, Any]) -> tuple[Summary, Mapping[str, Any]]:
    """Return the summary, and how long the save took."""
    metadata = _unpack_metadata(_typed(top, "metadata", bytes))
    save_times = metadata.pop(SAVE_TIMES_KEY, None)
    summary = Summary(
        library_version=_typed(top, "library_version", str),
        step=None if top["step"] is None else _typed(top, "step", int),
        created=_typed(top, "created", str),
        world_size=_typed(top, "world_size", int),
        attempt=_typed(top, "attempt", str),
        metadata=metadata,
        sections=[SectionInfo(name, kind) for name, kind in _pairs(top, "sections", "name", "kind")],
        files=_unpack_files(fields("files", top["files"], _FILES)),
    )
    return summary, save_times if isinstance(save_times, dict) else {}


def _columns(manifest: Manifest) -> dict[str, Any]:
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
        "shared": manifest.is_shared,
        "metadata": _pack_metadata_and_times(manifest),
        "sections": _pack_pairs([(section.name, section.kind) for section in manifest.sections], "name", "kind"),
        "files": {
            "name": pack_names(files.name),
            **{key: pack_numbers(getattr(files, key)) for key in _FILE_NUMBERS},
            **{key: pack_choices(getattr(files, key)) for key in _FILE_CHOICES},
            "head_checksum": files.head_checksum.tobytes(),
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
            "checksums": manifest.checksums.tobytes(),
        },
        "aliases": _pack_pairs(manifest.aliases, "name", "target"),
        **_frame_columns(files.frames),
    }


def _frame_columns(frames: FrameTable | None) -> dict[str, Any]:
    none = np.empty(0, np.int64)
    references = ReferenceTable() if frames is None else frames.references
    return {
        "frames": {
            "length": pack_numbers(none if frames is None else frames.length),
            "checksums": b"" if frames is None else frames.checksums.tobytes(),
            "source": pack_numbers(none if frames is None else frames.source),
            "offset": pack_numbers(none if frames is None else frames.position[frames.source != 0]),
        },
        "references": {"name": pack_names(references.name), "size": pack_numbers(references.size)},
    }


def _unpack_files(column: Mapping[str, Any]) -> FileTable:
    names = unpack_names("files.name", column["name"])
    columns: dict[str, Any] = {
        **{key: unpack_numbers(f"files.{key}", column[key], len(names)) for key in _FILE_NUMBERS},
        **{key: unpack_choices(f"files.{key}", column[key], len(names)) for key in _FILE_CHOICES},
        "head_checksum": unpack_checksums("files.head_checksum", column["head_checksum"]),
    }
    return FileTable(names, **columns)


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


def _unpack_frames(top: Mapping[str, Any], manifest: Manifest) -> FrameTable | None:
    column = fields("frames", top["frames"], _FRAMES)
    found = fields("references", top["references"], ("name", "size"))
    names = unpack_names("references.name", found["name"])
    length = unpack_numbers("frames.length", column["length"])
    source = unpack_numbers("frames.source", column["source"], len(length))
    checksums = unpack_checksums("frames.checksums", column["checksums"])
    if not (is_encoded(manifest.files.codec).any() or len(length) or len(checksums) or names):
        return None
    return find_frames(
        manifest,
        length,
        checksums,
        source=source,
        offset=unpack_numbers("frames.offset", column["offset"], int(np.count_nonzero(source))),
        references=ReferenceTable(names, unpack_numbers("references.size", found["size"], len(names))),
    )


def pack_metadata(metadata: dict[str, Any]) -> bytes:
    """Pack the user's metadata as a separate msgpack document.

    Call it before the first byte of a save is written. Raises ``UnserializableError`` unless it is a dict of None,
    bool, int (of 64 bits), float, str, bytes, list and dict with str or bytes keys, at most 64 levels deep and 64 MiB
    large.
    """
    try:
        data: bytes = msgpack.packb(metadata, use_bin_type=True)  # a tuple becomes an array
        unpack_plain("metadata", data)
    except (TypeError, ValueError, OverflowError, FormatError) as error:
        raise UnserializableError(
            f"metadata cannot be stored: {error}; it takes plain values (None, bool, int, float, str, bytes, lists and "
            f"dicts with str keys, no tuples). Store anything else as a section of the state"
        ) from None
    if len(data) > _MAX_METADATA or type(metadata) is not dict:
        raise UnserializableError(f"metadata is not a dict of at most {_MAX_METADATA} bytes; store it as a section")
    return data


def _pack_metadata_and_times(manifest: Manifest) -> bytes:
    if manifest.save_times:
        with suppress(UnserializableError):  # with the times, it may be too large
            return pack_metadata({**manifest.metadata, SAVE_TIMES_KEY: manifest.save_times})
    return pack_metadata(manifest.metadata)


def _unpack_metadata(data: bytes) -> dict[str, Any]:
    if len(data) > _MAX_METADATA:
        raise FormatError(f"user metadata of {len(data)} bytes is over {_MAX_METADATA}")
    metadata = unpack_plain("user metadata", data)
    if not isinstance(metadata, dict):
        raise FormatError("user metadata is not a map")
    return metadata


def _pack_pairs(pairs: Sequence[tuple[str, str]], *names: str) -> dict[str, Any]:
    return {name: pack_names([pair[index] for pair in pairs]) for index, name in enumerate(names)}


def _pairs(top: Mapping[str, Any], what: str, *names: str) -> list[tuple[str, str]]:
    found = fields(what, top[what], names)
    first, second = (unpack_names(f"{what}.{name}", found[name]) for name in names)
    if len(first) != len(second):
        raise FormatError(f"manifest: {what} has columns of {len(first)} and {len(second)} rows")
    return list(zip(first, second, strict=True))


def _typed(top: Mapping[str, Any], key: str, kind: type) -> Any:
    if type(top[key]) is not kind:
        raise FormatError(f"manifest: {key} is not {kind.__name__}")
    return top[key]
