"""Read folders of Hugging Face libraries: models, adapters of PEFT, and checkpoints of the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.index import Index
from ..errors import CorruptionError, FormatError, KeyNotFoundError, NotACheckpointError, UnsupportedTensorError
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

    Raises what ``_add_safetensors`` and ``_add_torch_model`` raise for damaged files and for a folder with several
    models, ``UnsupportedTensorError`` for a dtype that torch does not have, and ``NotACheckpointError`` for a folder
    of GGUF files only.
    """
    names = [source.name] if source.name else source.children
    if any(name.endswith(".safetensors") or (name == INDEX_KEY and not source.name) for name in names):
        builder = IndexBuilder(source.backend, "safetensors")
        _add_safetensors(source, builder)
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


def _add_safetensors(source: SourcePath, builder: IndexBuilder) -> None:
    """Add the section ``model`` of a safetensors file or of a folder that has some to an index.

    Raises as ``_model_files`` and ``_check_names``, ``NotACheckpointError`` for a folder of which the model is unclear,
    ``FormatError`` for a file that violates the format, and ``CorruptionError`` for one that is missing.
    """
    files, places = ([source.name], {}) if source.name else _model_files(source, INDEX_KEY, [SINGLE_KEY])
    files = files or [name for name in source.children if name.endswith(".safetensors")]
    if len(files) > 1 and not places:
        raise NotACheckpointError(
            f"{source.url} holds no {SINGLE_KEY} and no {INDEX_KEY}, but {len(files)} safetensors files; name the one "
            f"to use"
        )
    headers = {key: _read_header(source.backend, key) for key in files}
    names = {key: [record.name for record in header.entries] for key, header in headers.items()}
    _check_names(source.url, names, INDEX_KEY, places)
    builder.add_section(MODEL_SECTION, "module")
    for key, header in headers.items():
        size = header.data_start + max((record.end for record in header.entries), default=0)
        file = builder.add_file(key, size)
        for record in header.entries:
            meta = _meta_of(record, f"{source.backend.url}/{key}")
            leaf = StoredLeaf.whole(meta, file, header.data_start + record.begin)
            builder.add_tensor(MODEL_SECTION, record.name, leaf)


def _add_torch_model(source: SourcePath, builder: IndexBuilder) -> bool:
    """Add the section ``model`` of a folder to an index; False if the folder has no such model.

    Raises as ``_model_files`` and ``_check_names``, ``CorruptionError`` for a missing file, and ``FormatError`` for a
    damaged one or one without a state dict.
    """
    files, places = _model_files(source, _BIN_INDEX_KEY, _BIN_KEYS)
    documents = source.objects(files, listed_in=_BIN_INDEX_KEY)
    values = TorchValues(builder)
    trees: dict[str, dict[str, Any]] = {}
    for file, document in zip(files, documents, strict=True):
        tree = values.tree(document)
        if not is_state_dict(tree) and tree != {}:
            raise FormatError(f"{source.backend.url}/{file}: it does not hold a model's tensors by name")
        trees[file] = tree
    _check_names(source.url, trees, _BIN_INDEX_KEY, places)
    if files:
        builder.add_section(MODEL_SECTION, "module")
        tensors = {name: leaf for tree in trees.values() for name, leaf in tree.items()}
        builder.add_tree(MODEL_SECTION, module_names(tensors))
    return bool(files)


def _model_files(source: SourcePath, index_key: str, known: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the files of the model in a folder, and the file of each name that its index states.

    ``known`` are the names of a model in one file. Raises ``NotACheckpointError`` for several models, and
    ``FormatError`` for an index that names files of another kind, or elsewhere.
    """
    found = [name for name in known if name in source.children]
    places: dict[str, str] = {}
    if index_key in source.children:
        places = _read_weight_map(source.backend, index_key)
        found = [index_key, *(name for name in found if name not in places.values())]
    if len(found) > 1:
        raise NotACheckpointError(
            f"{source.url} holds both {found[0]} and {found[1]}, which are different models; name the file to use, or "
            f"remove the other"
        )
    return sorted(set(places.values())) or found, places


def _read_weight_map(backend: StorageBackend, key: str) -> dict[str, str]:
    document = read_json(backend, key, _MAX_INDEX_BYTES)
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise FormatError(f"{backend.url}/{key} has no weight_map of names to files")
    kind = key.split(".")[1]
    odd = sorted({file for file in found.values() if "/" in file or not file.endswith(f".{kind}")})
    if odd:
        raise FormatError(f"{backend.url}/{key} names {odd[0]!r:.200}, which is not a {kind} file in the same folder")
    return found


def _check_names(url: str, names: Mapping[str, Iterable[str]], index_key: str, places: Mapping[str, str]) -> None:
    """Compare the names in each file with those of others, and with the index at ``index_key``. Raises ``FormatError``.

    A file may hold more than the index lists: transformers loads that, too.
    """
    found: dict[str, str] = {}
    for file, inside in names.items():
        for name in inside:
            if name in found:
                raise FormatError(f"{url}: {name!r:.200} is in {found[name]} and in {file}")
            found[name] = file
    faults = [f"{name!r:.200} is not in {file}" for name, file in places.items() if found.get(name) != file]
    if faults:
        raise FormatError(f"{url}: {index_key} disagrees with the files: {listed(faults, separator='; ')}")


def _read_header(backend: StorageBackend, key: str) -> SafetensorsHeader:
    def read(offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        backend.read_into(key, offset, buffer)
        return bytes(buffer)

    where = f"{backend.url}/{key}"
    try:
        return parse_header(read, backend.stat(key).size)
    except KeyNotFoundError as error:
        raise CorruptionError(
            f"{where}: file is missing, but {INDEX_KEY} names it; fetch it, or export again"
        ) from error
    except FormatError as error:
        refuse_pointer(read(0, min(16, backend.stat(key).size)), where)
        raise FormatError(f"{where}: {error}") from error


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
