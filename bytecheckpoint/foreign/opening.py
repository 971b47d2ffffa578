"""Find out what is stored at a path: a checkpoint of this library, or one of another system.

Rank 0 reads it, and the other ranks receive the manifest or the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ..checkpoint.index import Index, decode_index, encode_index, is_encoded_index
from ..checkpoint.location import Location
from ..checkpoint.manifest_file import decode_manifest, read_manifest_bytes
from ..errors import CheckpointNotFoundError, NotACheckpointError, StorageError
from ..rules import Resolution, Rules
from ..runtime.gc_pause import paused
from ..storage_backends.base import StorageBackend
from .bytecheckpoint import read_bytecheckpoint
from .comparing import compare
from .dcp import read_dcp
from .deepspeed.reader import read_deepspeed
from .huggingface import read_huggingface
from .megatron.reader import read_megatron
from .rank_files import stored_by_ranks
from .reindexing import Stored
from .source_path import SourcePath, open_parent, read_index
from .torch_values import read_torch_file

_READERS: tuple[Callable[[SourcePath], Index | None], ...] = (
    *(read_megatron, read_dcp, read_bytecheckpoint, read_deepspeed, read_huggingface, read_torch_file),
)
"""Each returns None for files of another system, and raises for damaged files that it recognizes."""

_FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar", ".gguf")
"""A path with such a suffix may be a file. Other paths are opened as folders first."""


@dataclass(frozen=True)
class CheckpointSource:
    """A location as the caller passed it, and rules that describe what is stored there.

    ``backend`` serves the path itself, which may be a single file. With ``average``, the index has the tensors that
    rules describe as averaged, for a rewrite that computes them.
    """

    location: Location
    backend: StorageBackend
    rules: Rules | None = None
    average: Literal["mean"] | None = None

    @property
    def url(self) -> str:
        """The path or URL."""
        return self.location.url

    def index(self) -> Index:
        """Return the index of what is stored.

        Raises ``CheckpointNotFoundError`` or ``NotACheckpointError`` if no reader recognizes it, ``RuleError`` if rules
        do not explain it, and what decoding a manifest or reading a damaged file raises.
        """
        if self.rules is None:
            return self._index()
        with paused():
            stored, resolution = self.explain()
            index, comparisons = stored.reindexed(resolution)
        compare(index, comparisons)
        return index

    def explain(self) -> tuple[Stored, Resolution]:
        """Return what rules are applied to, and the result. Raises as ``index``."""
        rules = self.rules or Rules(())
        if rules.files:
            stored = stored_by_ranks(SourcePath(self.url, self.backend), rules)
        else:
            stored = Stored.of_index(self._index(), rules)
        return stored, stored.resolve(rules, self.average)

    def read(self) -> bytes:
        """Return what every rank needs in order to load, for ``decode``. Raises as ``index``."""
        found = self._find() if self.rules is None else self.index()
        if isinstance(found, Index):
            return encode_index(found)
        if is_encoded_index(found):
            decode_manifest(found, self.backend.url)  # raises: it is no manifest, and must not pass for an index
        return found

    def decode(self, data: bytes) -> Index:
        """Return the index that ``read`` found. Raises ``FormatError`` and ``CorruptionError``."""
        if not is_encoded_index(data):
            return Index(self.backend, decode_manifest(data, self.backend.url))
        index = decode_index(data, self.backend)
        if not index.name:
            return index
        return replace(index, backend=open_parent(self.location, self.backend.deadline_s))

    def _index(self) -> Index:
        found = self._find()
        return found if isinstance(found, Index) else Index(self.backend, decode_manifest(found, self.backend.url))

    def _find(self) -> bytes | Index:
        """The encoded manifest, or the index of another system's files."""
        file = self._file() if self.url.endswith(_FILE_SUFFIXES) else None
        if file is not None:
            return _read_file(file)
        try:
            return read_manifest_bytes(self.backend)
        except (CheckpointNotFoundError, NotACheckpointError):
            found = _read_foreign(SourcePath(self.url, self.backend))
            if found is None:
                raise
            return found
        except StorageError:
            # On a local disk, the path may be a file with any name. A remote store has failed.
            file = None if self.backend.is_remote else self._file()
            if file is None:
                raise
            return _read_file(file)

    def _file(self) -> SourcePath | None:
        return SourcePath.of_file(self.location, self.backend.deadline_s)


def _read_file(source: SourcePath) -> Index:
    found = _read_foreign(source)
    if found is None:
        raise NotACheckpointError(
            f"{source.url} is not a checkpoint: it is no safetensors file, and torch.save did not write it"
        )
    return found


def _read_foreign(source: SourcePath) -> Index | None:
    for read in _READERS:
        found = read_index(read, source)
        if found is not None:
            return found
    return None
