"""The manifest's bytes: an envelope that every version shares, and the payload of each version.

Nothing is believed before the checksum over the whole document held, and nothing is allocated on the word of a number
that the document's own size does not bear out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

from ..dtypes import DTYPES, dtype_named
from ..errors import CorruptionError, FormatError, UnserializableError, UnsupportedVersionError
from ..msgpack_scan import scan_msgpack, unpack_plain
from ..tables import BoxTable, Int64, TensorTable
from .columns import count_of, pack_names, pack_numbers, unpack_names, unpack_numbers, unpack_uint64
from .document import FileTable, Manifest, SectionInfo
from .rules import MAX_NDIM, validate

__all__ = ["FORMAT_VERSION", "MANIFEST_KEY", "MAX_MANIFEST_BYTES", "ManifestV1", "decode", "encode"]
__all__ += ["pack_metadata"]

FORMAT_VERSION = 1
"""The version this library writes."""

MANIFEST_KEY = "manifest.msgpack"
"""Where the manifest lies, relative to the checkpoint."""

MAX_MANIFEST_BYTES = 4 << 30
"""No manifest is longer, compressed or not."""

_MAGIC = "bytecheckpoint"
_START = b"\x96\xae" + _MAGIC.encode()  # an array of six, then the magic string
_TRAILER = 18  # msgpack's two bytes for "16 bytes follow", and those
_FREE_EXPANSION = 1 << 20  # bytes; below this, any ratio is harmless
_MAX_RATIO = 256
_MAX_METADATA = 64 << 20


class ManifestV1:
    """Payload of format version 1: a map of columns."""

    @staticmethod
    def pack(manifest: Manifest) -> bytes:
        files, tensors, shards = manifest.files, manifest.tensors, manifest.shards
        counts = np.bincount(shards.tensor, minlength=len(tensors)).astype(np.int64)
        dtypes = sorted(name for name in DTYPES if (tensors.dtype == DTYPES[name].code).any())
        dtype_index = np.zeros(len(DTYPES), np.int64)
        dtype_index[[DTYPES[name].code for name in dtypes]] = np.arange(len(dtypes))
        document = {
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
                "size": pack_numbers(files.size),
                "section": pack_numbers(files.section),
                "rank": pack_numbers(files.rank),
                "kind": _pack_choices(files.kind),
                "head_length": pack_numbers(files.head_length),
                "head_checksum": pack_numbers(files.head_checksum),
                "chunk_size": pack_numbers(files.chunk_size),
                "codec": _pack_choices(files.codec),
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
        return _packed(document)

    @staticmethod
    def unpack(payload: bytes) -> Manifest:
        document = unpack_plain("manifest payload", payload, max_depth=4)
        top = _fields("manifest", document, _TOP)
        sections = [
            SectionInfo(name, kind) for name, kind in _same_length("sections", *_names(top, "sections", "name", "kind"))
        ]
        files = _unpack_files(_fields("files", top["files"], _FILES))
        tensors, scope, counts = _unpack_tensors(
            _fields("tensors", top["tensors"], _TENSORS), [section.name for section in sections]
        )
        column = _fields("shards", top["shards"], _SHARDS)
        total = count_of("shards.file", column["file"])
        if int(counts.max(initial=0)) > total or int(counts.sum()) != total:
            raise FormatError(f"manifest: tensors announce {counts.sum()} shards, {total} are there")
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
            version=1,
        )


_TOP = (
    *("library_version", "step", "created", "world_size", "attempt", "metadata"),
    *("sections", "files", "tensors", "shards", "aliases"),
)
_FILES = ("name", "size", "section", "rank", "kind", "head_length", "head_checksum", "chunk_size", "codec")
_TENSORS = ("name", "section", "dtype", "ndim", "shape", "scope", "shards")
_SHARDS = ("offsets", "lengths", "file", "offset", "checksums")

_VERSIONS: dict[int, type[ManifestV1]] = {1: ManifestV1}


def encode(manifest: Manifest, *, compress: bool = True) -> bytes:
    """The document's bytes. The manifest is validated first, so that no faulty one is ever committed.

    Raises ``FormatError`` where it breaks a rule. Equal manifests give equal bytes (of one zstd version, if
    compressed).
    """
    validate(manifest)
    payload = _VERSIONS[manifest.version].pack(manifest)
    codec, stored = "raw", payload
    if compress:
        smaller = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(payload)
        if len(smaller) < len(payload) <= max(_FREE_EXPANSION, _MAX_RATIO * len(smaller)):
            codec, stored = "zstd", smaller
    body = _START + b"".join(_packed(part) for part in (manifest.version, codec, len(payload), stored)) + b"\xc4\x10"
    data = body + xxhash.xxh3_128_digest(body)
    if max(len(data), len(payload)) > MAX_MANIFEST_BYTES:
        raise FormatError(f"manifest of {len(payload)} bytes is over {MAX_MANIFEST_BYTES}; use fewer shards")
    return data


def decode(data: bytes) -> Manifest:
    """The manifest that ``data`` holds, validated.

    Raises ``CorruptionError`` where bytes are damaged or missing, ``UnsupportedVersionError`` for a version (or
    codec) that this library does not read, ``FormatError`` for a whole document that breaks a rule.
    """
    if not data.startswith(_START[1:], 1):
        raise CorruptionError(
            f"not a manifest, or damaged at its start ({len(data)} bytes, first {data[:16].hex() or 'none'})"
        )
    if len(data) <= len(_START) + _TRAILER or xxhash.xxh3_128_digest(data[:-16]) != data[-16:]:
        raise CorruptionError(
            f"checksum mismatch in the manifest ({len(data)} bytes): it was cut short or changed after it was written; "
            f"restore the file or load an earlier checkpoint"
        )
    version, codec, raw_length, stored = _open_envelope(data)
    payload = _expand(codec, raw_length, stored)
    manifest = _VERSIONS[version].unpack(payload)
    validate(manifest)
    return manifest


def _open_envelope(data: bytes) -> tuple[int, str, int, bytes]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"manifest of {len(data)} bytes is over {MAX_MANIFEST_BYTES}")
    unpacker = msgpack.Unpacker(max_buffer_size=len(data), max_array_len=6, max_map_len=0, max_ext_len=0)
    unpacker.feed(data)
    try:
        unpacker.read_array_header()
        unpacker.skip()
        version = unpacker.unpack()
        if type(version) is int and version not in _VERSIONS:
            raise UnsupportedVersionError(
                f"checkpoint has format version {version}; this library reads version "
                f"{', '.join(map(str, _VERSIONS))}: use a newer library"
            )
        scan_msgpack("manifest", data, max_depth=1)
        codec, raw_length, stored, checksum = (unpacker.unpack() for _ in range(4))
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"manifest envelope cannot be decoded: {error}") from None
    types = (type(version), type(codec), type(raw_length), type(stored), type(checksum))
    if data[0] != _START[0] or types != (int, str, int, bytes, bytes) or len(checksum) != 16:
        raise FormatError("manifest envelope is not [magic, version, codec, raw length, payload, checksum]")
    return version, codec, raw_length, stored


def _expand(codec: str, raw_length: int, stored: bytes) -> bytes:
    if codec not in ("raw", "zstd"):
        raise UnsupportedVersionError(f"manifest has codec {codec!r:.40}; this library reads 'raw' and 'zstd'")
    if not 0 <= raw_length <= min(MAX_MANIFEST_BYTES, max(_FREE_EXPANSION, _MAX_RATIO * len(stored))):
        raise FormatError(f"manifest payload of {len(stored)} bytes claims to expand to {raw_length}; refused")
    if codec == "raw":
        payload = stored
    else:
        try:
            # The library trusts the frame's own size over max_output_size, so that is what must be right first.
            if zstandard.frame_content_size(stored) != raw_length:
                raise FormatError(f"manifest's zstd frame does not hold the {raw_length} bytes that are announced")
            payload = zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_length)
        except zstandard.ZstdError as error:
            raise FormatError(f"manifest payload is not a zstd frame: {error}") from None
    if len(payload) != raw_length:
        raise FormatError(f"manifest payload has {len(payload)} bytes, not the {raw_length} that are announced")
    return payload


def _unpack_files(column: Mapping[str, Any]) -> FileTable:
    names = unpack_names("files.name", column["name"])
    count = len(names)
    number: Callable[[str], Int64] = lambda key: unpack_numbers(f"files.{key}", column[key], count)  # noqa: E731
    return FileTable(
        names,
        number("size"),
        number("section"),
        number("rank"),
        _unpack_choices("files.kind", column["kind"], count),
        number("head_length"),
        unpack_uint64("files.head_checksum", column["head_checksum"], count),
        number("chunk_size"),
        _unpack_choices("files.codec", column["codec"], count),
    )


def _unpack_tensors(column: Mapping[str, Any], sections: list[str]) -> tuple[TensorTable, Int64, Int64]:
    names = unpack_names("tensors.name", column["name"])
    count = len(names)
    dtypes = _fields("tensors.dtype", column["dtype"], ("of", "index"))
    codes = np.array([dtype_named(name).code for name in unpack_names("tensors.dtype.of", dtypes["of"])], np.int64)
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
    """A column of few different strings: those, and which one each row has."""
    of = sorted(set(values))
    position = {value: i for i, value in enumerate(of)}
    return {"of": pack_names(of), "index": pack_numbers(np.array([position[v] for v in values], np.int64))}


def _unpack_choices(what: str, column: object, count: int) -> list[str]:
    fields = _fields(what, column, ("of", "index"))
    of = unpack_names(what, fields["of"])
    index = unpack_numbers(what, fields["index"], count)
    if int(index.max(initial=-1)) >= len(of):
        raise FormatError(f"manifest column {what}: choice {int(index.max())} of {len(of)}")
    return [of[i] for i in index.tolist()]


def pack_metadata(metadata: dict[str, Any]) -> bytes:
    """The user's metadata as a msgpack document of its own.

    Raises ``UnserializableError`` unless it is a dict of None, bool, int (of 64 bits), float, str, bytes, list and
    dict with str or bytes keys, at most 64 deep and 64 MiB large. Call it before the first byte of a save is written.
    """
    try:
        data: bytes = msgpack.packb(metadata, use_bin_type=True, strict_types=True)
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


def _fields(what: str, found: object, wanted: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(found, dict) or set(found) != set(wanted):
        raise FormatError(f"manifest: {what} does not have exactly the fields {', '.join(wanted)}")
    return found


def _names(top: Mapping[str, Any], what: str, first: str, second: str) -> tuple[list[str], list[str]]:
    fields = _fields(what, top[what], (first, second))
    return unpack_names(f"{what}.{first}", fields[first]), unpack_names(f"{what}.{second}", fields[second])


def _same_length(what: str, first: list[str], second: list[str]) -> list[tuple[str, str]]:
    if len(first) != len(second):
        raise FormatError(f"manifest: {what} has columns of {len(first)} and {len(second)} rows")
    return list(zip(first, second))


def _typed(top: Mapping[str, Any], key: str, kind: type) -> Any:
    if type(top[key]) is not kind:
        raise FormatError(f"manifest: {key} is not {kind.__name__}")
    return top[key]
