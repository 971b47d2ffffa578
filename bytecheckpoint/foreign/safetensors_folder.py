"""Read the headers of safetensors files that another library wrote, and the index of a model in several files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from ..checkpoint.location import AnyLocation, Location
from ..errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    KeyNotFoundError,
    NotACheckpointError,
    UnsupportedTensorError,
)
from ..format.hf_index import INDEX_KEY, SINGLE_KEY, refuse_pointer
from ..format.safetensors import HeaderRecord, SafetensorsHeader, dtype_and_shape, parse_header
from ..runtime.messages import listed
from ..storage_backends.base import StorageBackend
from ..tensors.metadata import BasicMeta
from .source_path import SourcePath, read_json


class SafetensorsFolder:
    """The validated headers of one safetensors file, or of all files of a folder.

    ``source`` is a ``.safetensors`` file, or a folder with ``model.safetensors``, an index, or a single safetensors
    file.
    """

    def __init__(self, source: SourcePath) -> None:
        """Read all headers and the index.

        Raises ``CheckpointNotFoundError`` or ``NotACheckpointError`` if there is no model, ``FormatError`` if a file
        violates the format or disagrees with the index, and ``CorruptionError`` if a file is missing.
        """
        if source.name and not source.name.endswith(".safetensors"):
            raise NotACheckpointError(f"{source.url} is no safetensors file")
        self.url, self.backend, self.name = source.url, source.backend, source.name
        self._index = None if source.name else read_weight_map(source.backend, INDEX_KEY, ".safetensors")
        keys = [source.name] if source.name else self._keys(source.children)
        self.headers: dict[str, SafetensorsHeader] = {key: self._read_header(key) for key in keys}
        self._check_names()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {record.name: record.shape for header in self.headers.values() for record in header.entries}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(record.end - record.begin for header in self.headers.values() for record in header.entries)

    @classmethod
    def at(cls, path: AnyLocation) -> Self:
        """Read the headers of the files at a location. Raises as the constructor."""
        location = Location.of(path)
        file = SourcePath.of_file(location) if location.url.endswith(".safetensors") else None
        return cls(file or SourcePath(location.url, location.open()))

    def _keys(self, names: Sequence[str]) -> list[str]:
        found = [name for name in names if name.endswith(".safetensors")]
        if self._index is not None:
            keys = sorted(set(self._index.values()))
            if SINGLE_KEY in found and SINGLE_KEY not in keys:
                raise NotACheckpointError(
                    f"{self.url} holds both {SINGLE_KEY} and {INDEX_KEY}, which are different models; "
                    f"name the file to use, or remove the other"
                )
            return keys
        if SINGLE_KEY in found:
            return [SINGLE_KEY]
        if len(found) == 1:
            return found
        if not names:
            raise CheckpointNotFoundError(f"nothing is stored at {self.url}; check the path")
        raise NotACheckpointError(
            f"{self.url} holds no {SINGLE_KEY} and no {INDEX_KEY}"
            + (f", but {len(found)} safetensors files; name the one to use" if found else "")
        )

    def _read_header(self, key: str) -> SafetensorsHeader:
        def read(offset: int, length: int) -> bytes:
            buffer = bytearray(length)
            self.backend.read_into(key, offset, buffer)
            return bytes(buffer)

        where = f"{self.backend.url}/{key}"

        try:
            return parse_header(read, self.backend.stat(key).size)
        except KeyNotFoundError as error:
            if self._index is None:
                raise CheckpointNotFoundError(f"no file {key} at {self.backend.url}; check the path") from error
            raise CorruptionError(
                f"{where}: file is missing, but {INDEX_KEY} names it; fetch it, or export again"
            ) from error
        except FormatError as error:
            refuse_pointer(read(0, min(16, self.backend.stat(key).size)), where)
            raise FormatError(f"{where}: {error}") from error

    def _check_names(self) -> None:
        found: dict[str, str] = {}
        for key, header in self.headers.items():
            for record in header.entries:
                if record.name in found:
                    raise FormatError(f"{self.url}: {record.name!r:.200} is in {found[record.name]} and in {key}")
                found[record.name] = key
        if self._index is not None:
            check_weight_map(self._index, found, self.url, INDEX_KEY)


def meta_of(record: HeaderRecord, where: str) -> BasicMeta:
    """Return dtype and shape of a tensor in the file ``where``.

    Raises ``UnsupportedTensorError`` for a dtype that torch does not have.
    """
    found = dtype_and_shape(record)
    if found is None:
        raise UnsupportedTensorError(
            f"{where}: {record.name!r:.200} is {record.dtype}{list(record.shape)}, for which torch has no dtype"
        )
    return BasicMeta(*found)


_MAX_INDEX_BYTES = 256 << 20  # refuse a larger index instead of parsing it


def read_weight_map(backend: StorageBackend, key: str, suffix: str) -> dict[str, str] | None:
    """Return the file of each name, or None if there is no index.

    All files must be in the folder of the index, with names that end in ``suffix``. Raises ``FormatError``.
    """
    where = f"{backend.url}/{key}"
    try:
        document = read_json(backend, key, _MAX_INDEX_BYTES)
    except KeyNotFoundError:
        return None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise FormatError(f"{where} has no weight_map of names to files")
    odd = sorted({file for file in found.values() if "/" in file or not file.endswith(suffix)})
    if odd:
        raise FormatError(f"{where} names {odd[0]!r:.200}, which is not a {suffix[1:]} file in the same folder")
    return found


def check_weight_map(index: Mapping[str, str], found: Mapping[str, str], url: str, key: str) -> None:
    """Compare the index at ``key`` with the file in which each name was found. Raises ``FormatError``.

    A file may hold more than the index lists: transformers loads that, too.
    """
    faults = [f"{name!r:.200} is not in {file}" for name, file in index.items() if found.get(name) != file]
    if not faults:
        return
    raise FormatError(f"{url}: {key} disagrees with the files: {listed(faults, separator='; ')}")
