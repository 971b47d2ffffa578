"""Read folders of Hugging Face libraries: models, adapters of PEFT, and checkpoints of the Trainer of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint.index import Index
from ..errors import FormatError, NotACheckpointError
from ..format.hf_index import INDEX_KEY
from .building import IndexBuilder, StoredLeaf
from .naming import MODEL_SECTION, is_state_dict, module_names
from .safetensors_folder import SafetensorsFolder, check_weight_map, meta_of, read_weight_map
from .source_path import SourcePath
from .torch_values import TorchValues, read_torch_file
from .training_files import SHARDED_MODEL, TrainingFiles

_BIN_INDEX_KEY = "pytorch_model.bin.index.json"
_BIN_KEYS = ("pytorch_model.bin", "pytorch_model_fsdp.bin", "adapter_model.bin")
"""The names of a model in one file."""


def read_huggingface(source: SourcePath) -> Index | None:
    """Return the index of a model, whose tensors form the section ``model``; None if there is none.

    The checkpoint of a Trainer or of accelerate also has the sections that ``TrainingFiles`` adds.

    A folder with safetensors files is read from these, even if it also has files of ``torch.save``. Those have CRC-32s;
    safetensors files have no checksums.

    Raises what ``SafetensorsFolder`` and ``_add_torch_model`` raise for damaged files and for a folder with several
    models, ``UnsupportedTensorError`` for a dtype that torch does not have, and ``NotACheckpointError`` for a folder
    of GGUF files only.
    """
    names = [source.name] if source.name else source.children
    if any(name.endswith((".safetensors", INDEX_KEY)) for name in names):
        folder = SafetensorsFolder(source)
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


def _add_safetensors(folder: SafetensorsFolder, builder: IndexBuilder) -> None:
    builder.add_section(MODEL_SECTION, "module")
    for key, header in folder.headers.items():
        size = header.data_start + max((record.end for record in header.entries), default=0)
        file = builder.add_file(key, size)
        for record in header.entries:
            meta = meta_of(record, f"{folder.backend.url}/{key}")
            leaf = StoredLeaf.whole(meta, file, header.data_start + record.begin)
            builder.add_tensor(MODEL_SECTION, record.name, leaf)


def _add_torch_model(source: SourcePath, builder: IndexBuilder) -> bool:
    """Add the section ``model`` of a folder to an index; False if the folder has no such model.

    Raises ``CorruptionError`` for a missing file, ``FormatError`` for a damaged one, one without a state dict, or one
    that disagrees with the index, and ``NotACheckpointError`` for several models.
    """
    found = [name for name in _BIN_KEYS if name in source.children]
    index = read_weight_map(source.backend, _BIN_INDEX_KEY, ".bin") if _BIN_INDEX_KEY in source.children else None
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
        check_weight_map(index, places, source.url, _BIN_INDEX_KEY)
    builder.add_section(MODEL_SECTION, "module")
    builder.add_tree(MODEL_SECTION, module_names(tensors))
    return True
