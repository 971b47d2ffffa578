"""From Hugging Face's safetensors files to a checkpoint of ours: streaming, checked, committed at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from .dtypes import DTYPES, DType
from .engine.checksums import ChunkHasher, chunk_size_for
from .engine.writing.commit import commit, new_attempt, remove_attempt
from .errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptionError,
    FormatError,
    KeyNotFoundError,
    NameCollisionError,
    NotACheckpointError,
    StateError,
    UnsupportedTensorError,
)
from .export import INDEX_KEY, SINGLE_KEY
from .geometry import Box
from .manifest import FileTable, Manifest, SectionInfo, timestamp
from .matching import Rename, renaming
from .metadata import BasicMeta
from .rewriting import PIECE, Progress, refuse_checkpoint
from .safetensors_file import HeaderEntry, HeaderRecord, SafetensorsHeader, build_header, parse_header
from .sections import check_state, split_rank_name
from .storage_backends import open_backend
from .storage_backends.base import StorageBackend
from .tables import BoxTable, TensorTable
from .version import HEADER_METADATA, VERSION

__all__ = ["ImportReport", "SafetensorsFolder", "import_safetensors"]

_MAX_INDEX = 256 << 20
_BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors is not None}
# Not written by this library under its own code, because the stock reader cannot map it; its bytes are plain.
_BY_CODE["F8_E8M0"] = DTYPES["float8_e8m0fnu"]


@dataclass(frozen=True)
class ImportReport:
    """What an import committed at ``url``. ``total_size`` is the bytes of all tensors."""

    url: str
    section: str
    files: tuple[str, ...]
    tensors: int
    total_size: int


class SafetensorsFolder:
    """The headers of one safetensors file, or of all files of a folder, proved and held against the index.

    ``url`` names a ``.safetensors`` file, or a folder with a ``model.safetensors``, an index, or one safetensors file
    alone. Raises ``CheckpointNotFoundError`` and ``NotACheckpointError`` for what is none, ``FormatError`` for what
    breaks the format or disagrees with the index, ``CorruptionError`` for a file that is missing.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        folder, name = _split_url(url)
        self.url = url
        self.backend = open_backend(folder, **dict(storage_options or {}))
        self._index = None if name else self._read_index()
        keys = [name] if name else self._keys()
        self.headers: dict[str, SafetensorsHeader] = {key: self._read_header(key) for key in keys}
        self._check_names()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return {record.name: record.shape for header in self.headers.values() for record in header.entries}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.end - record.begin for header in self.headers.values() for record in header.entries)

    def _read_index(self) -> dict[str, str] | None:
        """Names and the file that each is in; None without an index."""
        try:
            raw = self.backend.get(INDEX_KEY, max_size=_MAX_INDEX)
        except KeyNotFoundError:
            return None
        where = f"{self.backend.url}/{INDEX_KEY}"
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where} is not JSON: {error}") from None
        found = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
            raise FormatError(f"{where} has no weight_map of names to files")
        odd = sorted({file for file in found.values() if "/" in file or not file.endswith(".safetensors")})
        if odd:
            raise FormatError(f"{where} names {odd[0]!r:.200}, which is no safetensors file beside it")
        return found

    def _keys(self) -> list[str]:
        names = self.backend.list_children("")
        there = [name for name in names if name.endswith(".safetensors")]
        if self._index is not None:
            keys = sorted(set(self._index.values()))
            if SINGLE_KEY in there and SINGLE_KEY not in keys:
                raise NotACheckpointError(
                    f"{self.url} holds both {SINGLE_KEY} and {INDEX_KEY}, and they are not the same model; "
                    f"name the file that is meant, or remove the other"
                )
            return keys
        if SINGLE_KEY in there:
            return [SINGLE_KEY]
        if len(there) == 1:
            return there
        if not names:
            raise CheckpointNotFoundError(f"nothing is stored at {self.url}; check the path")
        raise NotACheckpointError(
            f"{self.url} holds no {SINGLE_KEY} and no {INDEX_KEY}"
            + (f", but {len(there)} safetensors files; name the one that is meant" if there else "")
        )

    def _read_header(self, key: str) -> SafetensorsHeader:
        def read(offset: int, length: int) -> bytes:
            buffer = bytearray(length)
            self.backend.read_into(key, offset, buffer)
            return bytes(buffer)

        try:
            return parse_header(read, self.backend.stat(key).size)
        except KeyNotFoundError as error:
            if self._index is None:
                raise CheckpointNotFoundError(f"no file {key} at {self.backend.url}; check the path") from error
            raise CorruptionError(
                f"{self.backend.url}/{key}: file is missing, but {INDEX_KEY} names it; fetch it, or export again"
            ) from error
        except FormatError as error:
            raise FormatError(f"{self.backend.url}/{key}: {error}") from error

    def _check_names(self) -> None:
        found: dict[str, str] = {}
        for key, header in self.headers.items():
            for record in header.entries:
                if record.name in found:
                    raise FormatError(f"{self.url}: {record.name!r:.200} is in {found[record.name]} and in {key}")
                found[record.name] = key
        if self._index is None or found == self._index:
            return
        faults = [f"{name!r:.200} is not in {file}" for name, file in self._index.items() if found.get(name) != file]
        faults += [f"{name!r:.200} of {file} is not listed" for name, file in found.items() if name not in self._index]
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise FormatError(f"{self.url}: {INDEX_KEY} does not fit the files: {'; '.join(faults[:5])}{more}")


def import_safetensors(
    source_url: str,
    target_url: str,
    *,
    section: str = "model",
    step: int | None = None,
    rename: Rename | None = None,
    progress: Progress = lambda nbytes: None,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Commit a checkpoint at ``target_url`` whose ``section`` holds the tensors of ``source_url`` (a folder or file).

    ``rename`` maps an imported name to the one within the section. Pieces of a few MiB are read and written; the
    checkpoint appears when all is durable, and nothing is left behind by a failure. Raises as ``SafetensorsFolder``
    does, ``KeyExistsError`` where a checkpoint is at the target already, ``UnsupportedTensorError`` for dtypes that
    torch does not have, ``StorageError``.
    """
    check_state({section: None})
    if step is not None and step < 0:
        raise StateError(f"step must not be negative: {step}")
    source = SafetensorsFolder(source_url, storage_options=source_options)
    target = open_backend(target_url, **dict(storage_options or {}))
    refuse_checkpoint(target, source.backend.url)
    names = _names(source, renaming(rename))
    attempt = new_attempt()
    try:
        written = [
            _copy_file(source, key, target, f"{attempt}/{section}-{number:05d}.safetensors", names, progress)
            for number, key in enumerate(source.headers)
        ]
        commit(target, _manifest(section, step, attempt, written, chunk_size_for(source.nbytes)))
    except CommitUnknownError:
        raise
    except BaseException:
        remove_attempt(target, attempt)
        raise
    return ImportReport(target.url, section, tuple(source.headers), len(names), source.nbytes)


@dataclass(frozen=True)
class _Written:
    """One durable file: its tensors in file order, and the checksums of their chunks."""

    key: str
    head: bytes
    tensors: list[tuple[str, BasicMeta]]
    checksums: list[int]

    @property
    def size(self) -> int:
        return len(self.head) + sum(meta.nbytes for _, meta in self.tensors)


def _names(source: SafetensorsFolder, rename: Callable[[str], str]) -> dict[str, str]:
    """The name within the section, by the name in the file."""
    names = {name: rename(name) for name in source.shapes}
    seen: dict[str, str] = {}
    for name, new in names.items():
        if new in seen:
            raise NameCollisionError(f"{seen[new]!r:.200} and {name!r:.200} would both become {new!r:.200}")
        if not new or split_rank_name(new)[1] is not None:
            raise NameCollisionError(f"{new!r:.200}: a name cannot be empty or end in @<number>; rename it")
        seen[new] = name
    return names


def _meta(record: HeaderRecord, where: str) -> BasicMeta:
    dtype: DType | None = _BY_CODE.get(record.dtype)
    if dtype is None:
        raise UnsupportedTensorError(f"{where}: {record.name!r:.200} has dtype {record.dtype}, which torch has not")
    return BasicMeta(dtype, record.shape)


def _copy_file(
    source: SafetensorsFolder,
    key: str,
    target: StorageBackend,
    new_key: str,
    names: Mapping[str, str],
    progress: Progress,
) -> _Written:
    header = source.headers[key]
    tensors = [(names[record.name], _meta(record, f"{source.backend.url}/{key}")) for record in header.entries]
    head = build_header(
        [HeaderEntry(name, meta.dtype, meta.shape, meta.nbytes) for name, meta in tensors],
        HEADER_METADATA,
    )
    hasher = ChunkHasher(chunk_size_for(source.nbytes))
    buffer = memoryview(bytearray(PIECE))
    with target.create(new_key, len(head) + sum(meta.nbytes for _, meta in tensors)) as writer:
        writer.write(0, head)
        for record in header.entries:
            for begin in range(record.begin, record.end, PIECE):
                piece = buffer[: min(PIECE, record.end - begin)]
                source.backend.read_into(key, header.data_start + begin, piece)
                writer.write(len(head) + begin, piece)
                hasher.update(piece)
                progress(len(piece))
            hasher.end_item()
        writer.complete()
    return _Written(new_key, head, tensors, hasher.checksums)


def _manifest(section: str, step: int | None, attempt: str, written: Sequence[_Written], chunk_size: int) -> Manifest:
    tensors = [(section, name, meta) for file in written for name, meta in file.tensors]
    nbytes = [[meta.nbytes for _, meta in file.tensors] for file in written]
    return Manifest.assemble(
        library_version=VERSION,
        step=step,
        created=timestamp(),
        world_size=1,
        attempt=attempt,
        metadata={},
        sections=[SectionInfo(section, "module")],
        files=FileTable(
            name=[file.key for file in written],
            size=np.array([file.size for file in written], np.int64),
            section=np.zeros(len(written), np.int64),
            rank=np.zeros(len(written), np.int64),
            kind=["tensors"] * len(written),
            head_length=np.array([len(file.head) for file in written], np.int64),
            head_checksum=np.array([xxhash.xxh3_64_intdigest(file.head) for file in written], np.uint64),
            chunk_size=np.full(len(written), chunk_size, np.int64),
            codec=["raw"] * len(written),
        ),
        tensors=TensorTable.build(tensors) if tensors else _no_tensors(section),
        scope=np.full(len(tensors), -1, np.int64),
        shards=BoxTable.build([(row, Box.whole(meta.shape)) for row, (_, _, meta) in enumerate(tensors)]),
        shard_file=np.repeat(np.arange(len(written)), [len(file.tensors) for file in written]),
        shard_offset=np.concatenate([np.cumsum([0, *sizes], dtype=np.int64)[:-1] for sizes in nbytes]),
        checksums=np.array([value for file in written for value in file.checksums], np.uint64),
        aliases=[],
    )


def _no_tensors(section: str) -> TensorTable:
    empty = np.empty(0, np.int64)
    return TensorTable([], [section], empty, empty, empty, empty)


def _split_url(url: str) -> tuple[str, str]:
    """The folder and, where ``url`` names a safetensors file, the file in it."""
    if not url.endswith(".safetensors") or "::" in url:
        return url, ""
    folder, _, name = url.rpartition("/")
    return folder or ("/" if url.startswith("/") else "."), name
