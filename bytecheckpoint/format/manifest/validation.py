"""Validate a manifest: every rule of ``docs/format.md`` that can be checked without the data files.

The checks are arithmetic on columns, which takes a fraction of a second for a million shards. The numbers are
untrusted, so no comparison can overflow.
"""

from __future__ import annotations

import operator
import re
from itertools import islice

import numpy as np

from ...errors import UnsupportedVersionError
from ...tensors.dtypes import DTYPES
from ...tensors.tables import Int64, ragged_positions
from .document import Manifest, Summary
from .files import FILE_KINDS, is_encoded
from .tiling import check_tilings, first_row, reject, tensor_of_shard

MAX_NDIM = 64
MAX_HEADER_LENGTH = 100_000_008  # bytes: the longest safetensors header that readers accept, and the 8 bytes before it
_MAX_BYTES = 1 << 62  # per tensor or file; leaves room for sums and float rounding below 2^63
_MAX_WORLD = 1 << 31
_MAX_NAME = 1 << 16
_SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,199}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,254}")
_CODEC = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def validate(manifest: Manifest) -> None:
    """Raise ``FormatError``, or ``UnsupportedVersionError`` for an unknown kind or codec, if a rule is broken."""
    validate_summary(manifest)
    _check_files(manifest)
    _check_references(manifest)
    _check_tensors(manifest)
    _check_boxes(manifest)
    check_tilings(manifest)
    _check_ranges(manifest)
    _check_checksums(manifest)
    _check_aliases(manifest)


def validate_summary(summary: Summary) -> None:
    """Raise ``FormatError`` if a rule about the job or the names of sections is broken."""
    _check_job(summary)
    _check_sections(summary)


def validate_foreign(manifest: Manifest) -> None:
    """Check tables that describe another system's files.

    They have no attempt and no checksums, and files may hold several sections and other bytes between shards. Raises
    ``FormatError`` for a shard or a tensor that is out of bounds, or a name that leaves the folder.
    """
    _check_sections(manifest)
    files = manifest.files
    for name in files.name:
        if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
            reject(f"file name {name!r:.200} is not a plain name inside the folder")
    _check_column("size of file", files.size, 0, _MAX_BYTES, files.name)
    _check_column("chunk size of file", files.chunk_size, 1, _MAX_BYTES, files.name)
    _check_column("head of file", files.head_length, 0, _MAX_BYTES, files.name)
    _check_tensors(manifest)
    _check_boxes(manifest)
    check_tilings(manifest)
    _check_bounds(manifest)
    _check_checksums(manifest)
    _check_aliases(manifest)


def _check_job(manifest: Summary) -> None:
    if not 1 <= manifest.world_size <= _MAX_WORLD:
        reject(f"world size {manifest.world_size}")
    if manifest.step is not None and not 0 <= manifest.step < 1 << 63:
        reject(f"step {manifest.step}")
    if not _CREATED.fullmatch(manifest.created):
        reject(f"creation time {manifest.created!r:.80} is not like 2025-01-31T23:59:59.000000Z")
    if not _ATTEMPT.fullmatch(manifest.attempt):
        reject(f"attempt {manifest.attempt!r:.80} is not a plain directory name")
    if len(manifest.library_version) > 200:
        reject("library version is too long")


def _check_sections(manifest: Summary) -> None:
    names = [section.name for section in manifest.sections]
    bad = next((name for name in names if not _SECTION.fullmatch(name)), None)
    if bad is not None or len(set(names)) != len(names):
        reject(f"section name {bad!r:.80} is not allowed" if bad is not None else "a section name occurs twice")


def _check_files(manifest: Manifest) -> None:
    files = manifest.files
    count = len(files)
    columns = (files.size, files.section, files.rank, files.head_length, files.head_checksum, files.chunk_size)
    if any(len(column) != count for column in (*columns, files.kind, files.codec)):
        reject("columns of files differ in length")
    if len(set(files.name)) != count:
        reject("a file name occurs twice")
    inside = len(manifest.attempt) + 1
    for name in files.name:
        # One plain component below the attempt: no absolute name, no "..", no other attempt, nothing to normalise.
        if not name.startswith(manifest.attempt + "/") or not _FILE.fullmatch(name, inside):
            reject(f"file name {name!r:.200} is not a plain name inside {manifest.attempt}/")
    for kind in set(files.kind) - set(FILE_KINDS):
        raise UnsupportedVersionError(f"a file has kind {kind!r:.40}; this library reads {', '.join(FILE_KINDS)}")
    _check_codecs(manifest)
    values = np.array([kind != "tensors" for kind in files.kind], bool)
    _check_column("section of file", files.section, 0, len(manifest.sections), files.name)
    _check_column("rank of file", files.rank, 0, manifest.world_size, files.name)
    _check_column("size of file", files.size, 0, _MAX_BYTES, files.name)
    _check_column("chunk size of file", files.chunk_size, 1, _MAX_BYTES, files.name)
    _check_column("head of file", files.head_length, 0, _MAX_BYTES, files.name)
    # Readers allocate a header of this length, so it must be bounded.
    bad = (files.head_length > files.size) | (~values & (files.head_length > MAX_HEADER_LENGTH))
    bad |= values & (files.head_length != files.size)
    if (row := first_row(bad)) is not None:
        reject(f"head of {files.head_length[row]} bytes in file {files.name[row]} of {files.size[row]}")


def _check_codecs(manifest: Manifest) -> None:
    """Check which files are encoded. Whether a codec of that name is installed matters only to those who read data."""
    files = manifest.files
    for codec in set(files.codec):
        if not _CODEC.fullmatch(codec):
            reject(f"codec name {codec!r:.80} is not allowed")
    encoded = is_encoded(files.codec)
    if files.frames is None:
        if encoded.any():
            reject("an encoded file has no frames")
        return
    bad = encoded & np.array([kind != "tensors" for kind in files.kind], bool)
    bad |= encoded & (files.frames.sums(files.frames.stored) != files.size - files.head_length)
    if bad.any():
        name = files.name[int(np.argmax(bad))]
        reject(f"file {name}: its frames and its head do not add up to its size, or it is no tensor file")


def _check_references(manifest: Manifest) -> None:
    """Check the names of files of older checkpoints: that they are two plain components, like those of its own files.

    Every reference holds frames, and they are inside it.
    """
    names, size = manifest.references.name, manifest.references.size
    if len(set(names)) != len(names) or len(size) != len(names):
        reject("a reference occurs twice, or its columns differ in length")
    for name in names:
        attempt, _, file = name.partition("/")
        is_older = manifest.is_shared and attempt != manifest.attempt
        if not (is_older and _ATTEMPT.fullmatch(attempt) and _FILE.fullmatch(file)):
            reject(f"reference {name!r:.200} is not a file of an older checkpoint that shares its files")
    _check_column("size of reference", size, 0, _MAX_BYTES, names)
    frames = manifest.files.frames
    if frames is None:
        return
    if ((frames.source < 0) | (frames.source > len(names))).any():
        reject(f"a frame refers to file {int(frames.source.max(initial=0))} of {len(names)} references")
    shared = np.flatnonzero(frames.source)
    row, offset, length = frames.source[shared] - 1, frames.position[shared], frames.length[shared]
    if (np.bincount(row, minlength=len(names)) == 0).any():
        reject("no frame refers to one of the references")
    bad = (offset < 0) | (offset > size[row] - length)
    if (at := first_row(bad)) is not None:
        reject(
            f"frame {shared[at]} of {length[at]} bytes at {offset[at]} is outside {names[row[at]]!r:.200} of "
            f"{size[row[at]]}"
        )


def _check_column(what: str, column: Int64, low: int, high: int, names: list[str]) -> None:
    bad = (column < low) | (column >= high)
    if (row := first_row(bad)) is not None:
        reject(f"{what} {names[row]!r:.200} is {column[row]}, not from {low} to {high - 1}")


def _check_tensors(manifest: Manifest) -> None:
    tensors, names = manifest.tensors, manifest.tensors.names
    sections = [section.name for section in manifest.sections]
    if tensors.sections != sections:
        reject(f"the tensors refer to sections {tensors.sections}, not {sections}")
    columns = (tensors.section, tensors.dtype, tensors.ndim, manifest.scope)
    if any(len(column) != len(names) for column in columns) or int(tensors.starts[-1]) != len(tensors.shape):
        reject("columns of tensors differ in length")
    if not names:
        return
    if not all(map(operator.lt, names, islice(names, 1, None))):
        row = next(i for i in range(len(names)) if names[i] >= names[i + 1])
        reject(f"tensor names {names[row]!r:.200} and {names[row + 1]!r:.200} are equal or not in order")
    if max(map(len, names)) > _MAX_NAME:
        reject(f"a tensor name is over {_MAX_NAME} characters")
    _check_column("section of tensor", tensors.section, 0, len(manifest.sections), names)
    _check_column("dtype of tensor", tensors.dtype, 0, len(DTYPES), names)
    _check_column("dimensions of tensor", tensors.ndim, 0, MAX_NDIM + 1, names)
    _check_column("scope of tensor", manifest.scope, -1, manifest.world_size, names)
    # In a sorted list, every name between two names with a prefix has that prefix, so check the ends of each run.
    turns = np.flatnonzero(np.diff(tensors.section))
    for row in sorted({0, len(names) - 1, *turns.tolist(), *(turns + 1).tolist()}):
        if not names[row].startswith(f"{tensors.section_of(row)}."):
            reject(f"tensor {names[row]!r:.200} does not begin with the name of its section {tensors.section_of(row)}")
    for row in np.flatnonzero(manifest.scope >= 0).tolist():
        if not names[row].endswith(f"@{manifest.scope[row]}"):
            reject(f"tensor {names[row]!r:.200} belongs to rank {manifest.scope[row]}, but does not end in its number")
    _check_sizes(manifest)


def _check_sizes(manifest: Manifest) -> None:
    tensors = manifest.tensors
    if (tensors.shape < 0).any():
        reject("a tensor has a negative dimension")
    # Compute in floats and count zeros as ones, because strides are products too and must not overflow.
    sizes = np.append(np.maximum(tensors.shape, 1).astype(np.float64), 1.0)
    with np.errstate(over="ignore"):
        nbytes = np.multiply.reduceat(sizes, tensors.starts[:-1])
        nbytes[tensors.ndim == 0] = 1.0
        nbytes *= tensors.itemsize()
    if (nbytes >= _MAX_BYTES).any():
        row = int(np.argmax(nbytes))
        reject(f"tensor {tensors.names[row]!r:.200} of shape {tensors.shape_of(row)} is too large to address")


def _check_boxes(manifest: Manifest) -> None:
    tensors, shards = manifest.tensors, manifest.shards
    count = len(shards)
    if any(len(column) != count for column in (manifest.shard_file, manifest.shard_offset)):
        reject("columns of shards differ in length")
    if count and (int(shards.tensor.min()) < 0 or int(shards.tensor.max()) >= len(tensors)):
        reject("a shard refers to a tensor that does not exist")
    if (np.diff(shards.tensor) < 0).any():
        reject("shards are not in the order of their tensors")
    per_tensor = np.bincount(shards.tensor, minlength=len(tensors))
    if (per_tensor == 0).any():
        reject(f"tensor {tensors.names[int(np.argmin(per_tensor))]!r:.200} has no shard")
    ndim = tensors.ndim[shards.tensor]
    if not np.array_equal(np.diff(shards.starts), ndim) or len(shards.offsets) != len(shards.lengths):
        reject("a shard and its tensor have different numbers of dimensions")
    if len(shards.offsets) != int(shards.starts[-1]):
        reject("columns of shards differ in length")
    shape = tensors.shape[ragged_positions(tensors.starts[:-1][shards.tensor], ndim)]
    outside = (shards.lengths < 0) | (shards.lengths > shape) | (shards.offsets < 0)
    outside |= shards.offsets > shape - shards.lengths
    if outside.any():
        row = int(np.searchsorted(shards.starts, int(np.argmax(outside)), side="right")) - 1
        part = slice(int(shards.starts[row]), int(shards.starts[row + 1]))
        reject(
            f"shard at {shards.offsets[part].tolist()} of lengths {shards.lengths[part].tolist()} is not inside tensor "
            f"{tensor_of_shard(manifest, row)}"
        )


def _check_bounds(manifest: Manifest) -> Int64:
    """Check that every shard lies in the data area of a tensor file; return the sizes of these areas, decoded."""
    files, file, offset = manifest.files, manifest.shard_file, manifest.shard_offset
    nbytes = manifest.shard_nbytes
    if len(file) and (int(file.min()) < 0 or int(file.max()) >= len(files)):
        reject("a shard refers to a file that does not exist")
    room = files.data_size
    bad = (offset < 0) | (nbytes > room[file]) | (offset > room[file] - nbytes)
    bad |= np.array([kind != "tensors" for kind in files.kind], bool)[file]
    if (row := first_row(bad)) is not None:
        reject(
            f"a shard of tensor {tensor_of_shard(manifest, row)} has {nbytes[row]} bytes at {offset[row]} of "
            f"{files.name[file[row]]}: outside its {room[file[row]]} bytes of data, or not a tensor file"
        )
    return room


def _check_ranges(manifest: Manifest) -> None:
    """Check that the shards of each file belong to its section, lie back to back and fill its data area."""
    room = _check_bounds(manifest)
    files, file, offset = manifest.files, manifest.shard_file, manifest.shard_offset
    nbytes = manifest.shard_nbytes
    bad = files.section[file] != manifest.tensors.section[manifest.shards.tensor]
    if (row := first_row(bad)) is not None:
        reject(
            f"a shard of tensor {tensor_of_shard(manifest, row)} is in "
            f"{files.name[file[row]]}: not a tensor file of its section"
        )
    rows = np.flatnonzero(nbytes)
    top = int(room.max(initial=0)) + 1
    if len(files) * top < 1 << 62:
        rows = rows[np.argsort(file[rows] * top + offset[rows])]
    else:
        rows = rows[np.lexsort((offset[rows], file[rows]))]
    at, begin, length = file[rows], offset[rows], nbytes[rows]
    same = at[1:] == at[:-1]
    expected = np.append(0, np.where(same, (begin + length)[:-1], 0)) if len(rows) else begin
    if (row := first_row(begin != expected)) is not None:
        reject(f"{files.name[at[row]]}: a shard begins at data byte {begin[row]}, not {expected[row]}: overlap or hole")
    end = np.zeros(len(files), np.int64)
    end[at] = begin + length  # ascending within each file, so the last one stays
    if (row := first_row(end != room)) is not None:
        reject(f"{files.name[row]}: shards end at data byte {end[row]}, the file at {room[row]}")


def _check_checksums(manifest: Manifest) -> None:
    counts = -(-manifest.shard_nbytes // manifest.files.chunk_size[manifest.shard_file])
    have = len(manifest.checksums)
    if int(counts.max(initial=0)) > have or int(counts.sum()) != have:
        reject(f"{have} chunk checksums, but the shards have {int(counts.sum())} chunks")


def _check_aliases(manifest: Manifest) -> None:
    aliases = manifest.aliases
    if any(aliases[i][0] >= aliases[i + 1][0] for i in range(len(aliases) - 1)):
        reject("aliases are not in order, or one occurs twice")
    for name, target in aliases:
        row = manifest.tensor_row(target)
        if row is None or manifest.tensor_row(name) is not None:
            reject(f"alias {name!r:.200} of {target!r:.200}: an alias must not be a tensor, and its target must be one")
        if not name.startswith(f"{manifest.tensors.section_of(row)}.") or len(name) > _MAX_NAME:
            reject(f"alias {name!r:.200} refers to a tensor of another section: {target!r:.200}")
