"""Read folders of Hugging Face libraries: models, adapters of PEFT, and checkpoints of the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.index import Index
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
from .building import IndexBuilder, StoredLeaf
from .naming import MODEL_SECTION, is_state_dict, module_names
from .source_path import SourcePath, read_json
from .torch_values import TorchValues, read_torch_file
from .training_files import SHARDED_MODEL, TrainingFiles

_MAX_INDEX_BYTES = 256 << 20  # refuse a larger index instead of parsing it
_BIN_INDEX_KEY = "pytorch_model.bin.index.json"
_BIN_KEYS = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "adapter_model.bin")
"""The names of a model in one file."""


def read_huggingface(source: SourcePath) -> Index | None:
    """Return the index of a model, whose tensors form the section ``model``; None if there is none.

    The checkpoint of a Trainer or of accelerate also has the sections that ``TrainingFiles`` adds.

    A folder with safetensors files is read from these, even if it also has files of ``torch.save``. Those have CRC-32s;
    safetensors files have no checksums.

    Raises what ``_SafetensorsFolder`` and ``_add_torch_model`` raise for damaged files and for a folder with several
    models, ``UnsupportedTensorError`` for a dtype that torch does not have, and ``NotACheckpointError`` for a folder
    of GGUF files only.
    """
    names = [source.name] if source.name else source.children
    if any(name.endswith((".safetensors", INDEX_KEY)) for name in names):
        folder = _SafetensorsFolder(source)
        builder = IndexBuilder(source.backend, "safetensors")
        _add_safetensors(folder, builder)
        return _build(source, builder)
    if source.name:
        return None
    builder = IndexBuilder(source.backend, "torch.save")
    if _add_torch_model(source, builder) or SHARDED_MODEL in names:
        return _build(source, builder)
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    return None if gguf is None else read_torch_file(replace(source, url=f"{source.url}/{gguf}", name=gguf))


def _build(source: SourcePath, builder: IndexBuilder) -> Index:
    if source.name:
        return builder.build(name=source.name)
    files = TrainingFiles(source, builder)
    builder.system = files.system or builder.system
    return builder.build(step=files.step, world_size=files.world_size)


def _add_safetensors(folder: _SafetensorsFolder, builder: IndexBuilder) -> None:
    builder.add_section(MODEL_SECTION, "module")
    for key, header in folder.headers.items():
        size = header.data_start + max((record.end for record in header.entries), default=0)
        file = builder.add_file(key, size)
        for record in header.entries:
            meta = _meta_of(record, f"{folder.backend.url}/{key}")
            leaf = StoredLeaf.whole(meta, file, header.data_start + record.begin)
            builder.add_tensor(MODEL_SECTION, record.name, leaf)


def _add_torch_model(source: SourcePath, builder: IndexBuilder) -> bool:
    """Add the section ``model`` of a folder to an index; False if the folder has no such model.

    Raises ``CorruptionError`` for a missing file, ``FormatError`` for a damaged one, one without a state dict, or one
    that disagrees with the index, and ``NotACheckpointError`` for several models.
    """
    found = [name for name in _BIN_KEYS if name in source.children]
    index = _read_weight_map(source.backend, _BIN_INDEX_KEY, ".bin") if _BIN_INDEX_KEY in source.children else None
    if index is not None:
        found = [_BIN_INDEX_KEY, *(name for name in found if name not in index.values())]
    if not found:
        return False
    if len(found) > 1:
        raise NotACheckpointError(
            f"{source.url} holds both {found[0]} and {found[1]}, which are different models; name the file to use, or "
            f"remove the other"
        )
    files = found if index is None else sorted(set(index.values()))
    documents = source.objects(files, listed_in=_BIN_INDEX_KEY)
    values = TorchValues(builder)
    tensors: dict[str, Any] = {}
    places: dict[str, str] = {}
    for file, document in zip(files, documents, strict=True):
        tree = values.tree(document)
        if not is_state_dict(tree) and tree != {}:
            raise FormatError(f"{source.backend.url}/{file}: it does not hold a model's tensors by name")
        for name, leaf in tree.items():
            if name in tensors:
                raise FormatError(f"{source.url}: {name!r:.200} is in {places[name]} and in {file}")
            tensors[name], places[name] = leaf, file
    if index is not None:
        _check_weight_map(index, places, source.url, _BIN_INDEX_KEY)
    builder.add_section(MODEL_SECTION, "module")
    builder.add_tree(MODEL_SECTION, module_names(tensors))
    return True


class _SafetensorsFolder:
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
        self.url, self.backend = source.url, source.backend
        self._index = None if source.name else _read_weight_map(source.backend, INDEX_KEY, ".safetensors")
        keys = [source.name] if source.name else self._keys(source.children)
        self.headers: dict[str, SafetensorsHeader] = {key: self._read_header(key) for key in keys}
        self._check_names()

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
            _check_weight_map(self._index, found, self.url, INDEX_KEY)


def _meta_of(record: HeaderRecord, where: str) -> BasicMeta:
    """Return dtype and shape of a tensor in the file ``where``.

    Raises ``UnsupportedTensorError`` for a dtype that torch does not have.
    """
    found = dtype_and_shape(record)
    if found is None:
        raise UnsupportedTensorError(
            f"{where}: {record.name!r:.200} is {record.dtype}{list(record.shape)}, for which torch has no dtype"
        )
    return BasicMeta(*found)


def _read_weight_map(backend: StorageBackend, key: str, suffix: str) -> dict[str, str] | None:
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


def _check_weight_map(index: Mapping[str, str], found: Mapping[str, str], url: str, key: str) -> None:
    """Compare the index at ``key`` with the file in which each name was found. Raises ``FormatError``.

    A file may hold more than the index lists: transformers loads that, too.
    """
    faults = [f"{name!r:.200} is not in {file}" for name, file in index.items() if found.get(name) != file]
    if not faults:
        return
    raise FormatError(f"{url}: {key} disagrees with the files: {listed(faults, separator='; ')}")
