"""Read folders of Hugging Face libraries: models, adapters of PEFT, and checkpoints of the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from ..checkpoint.index import Index
from ..errors import CorruptionError, FormatError, KeyNotFoundError, NotACheckpointError
from ..format.hf_index import INDEX_KEY
from .archives import read_archive
from .building import IndexBuilder, StoredLeaf
from .naming import MODEL_SECTION, is_state_dict, module_names
from .place import Place, read_all
from .safetensors_folder import SafetensorsFolder, meta_of
from .torch_values import TorchValues
from .trainer import STATE_KEY, TrainerState
from .weight_map import check_weight_map, read_weight_map

__all__ = ["read_huggingface"]

_BIN_INDEX_KEY = "pytorch_model.bin.index.json"
_BIN_KEYS = ("pytorch_model.bin", "adapter_model.bin")
"""The names of a model in one file."""


def read_huggingface(place: Place) -> Index | None:
    """Return the index of a model, whose tensors form the section ``model``; None if there is none.

    A Trainer's checkpoint also has the sections that ``TrainerState`` adds.

    A folder with safetensors files is read from these, even if it also has files of ``torch.save``. Those have CRC-32s;
    safetensors files have no checksums.

    Raises what ``SafetensorsFolder`` and ``_add_torch_model`` raise for damaged files and for a folder with several
    models, ``UnsupportedTensorError`` for a dtype that torch does not have, and ``NotACheckpointError`` for a folder
    of GGUF files only.
    """
    names = [place.name] if place.name else place.children
    if any(name.endswith((".safetensors", INDEX_KEY)) for name in names):
        folder = SafetensorsFolder(place)
        builder = IndexBuilder(place.backend, "safetensors")
        _add_safetensors(folder, builder)
        return _build(place, builder)
    if place.name:
        return None
    builder = IndexBuilder(place.backend, "torch.save")
    if _add_torch_model(place, builder):
        return _build(place, builder)
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    if gguf is not None:
        raise NotACheckpointError(
            f"{place.url} holds a GGUF file of llama.cpp ({gguf}), whose quantized blocks are not read; use the "
            f"safetensors files that it was converted from"
        )
    return None


def _build(place: Place, builder: IndexBuilder) -> Index:
    if place.name or STATE_KEY not in place.children:
        return builder.build(name=place.name)
    builder.system = "transformers"
    trainer = TrainerState(place, builder)
    return builder.build(step=trainer.step, world_size=trainer.world_size)


def _add_safetensors(folder: SafetensorsFolder, builder: IndexBuilder) -> None:
    builder.add_section(MODEL_SECTION, "module")
    for key, header in folder.headers.items():
        size = header.data_start + max((record.end for record in header.entries), default=0)
        file = builder.add_file(key, size)
        for record in header.entries:
            meta = meta_of(record, f"{folder.backend.url}/{key}")
            leaf = StoredLeaf.whole(meta, file, header.data_start + record.begin)
            builder.add_tensor(MODEL_SECTION, record.name, leaf)


def _add_torch_model(place: Place, builder: IndexBuilder) -> bool:
    """Add the section ``model`` of a folder to an index; False if the folder has no such model.

    Raises ``CorruptionError`` for a missing file, ``FormatError`` for a damaged one, one without a state dict, or one
    that disagrees with the index, and ``NotACheckpointError`` for several models.
    """
    found = [name for name in _BIN_KEYS if name in place.children]
    index = read_weight_map(place.backend, _BIN_INDEX_KEY, ".bin") if _BIN_INDEX_KEY in place.children else None
    if index is not None:
        found = [_BIN_INDEX_KEY, *(name for name in found if name not in index.values())]
    if not found:
        return False
    if len(found) > 1:
        raise NotACheckpointError(
            f"{place.url} holds both {found[0]} and {found[1]}, which are different models; name the file to use, or "
            f"remove the other"
        )
    files = found if index is None else sorted(set(index.values()))
    documents = read_all(lambda file: _read_model(place, file), files)
    values = TorchValues(builder)
    tensors: dict[str, Any] = {}
    places: dict[str, str] = {}
    for file, document in zip(files, documents, strict=True):
        tree = values.tree(document)
        if not is_state_dict(tree) and tree != {}:
            raise FormatError(f"{place.backend.url}/{file}: it does not hold a model's tensors by name")
        for name, leaf in tree.items():
            if name in tensors:
                raise FormatError(f"{place.url}: {name!r:.200} is in {places[name]} and in {file}")
            tensors[name], places[name] = leaf, file
    if index is not None:
        check_weight_map(index, places, place.url, _BIN_INDEX_KEY)
    builder.add_section(MODEL_SECTION, "module")
    builder.add_tree(MODEL_SECTION, module_names(tensors))
    return True


def _read_model(place: Place, file: str) -> Any:
    try:
        return read_archive(place.backend, file).value
    except KeyNotFoundError as error:
        raise CorruptionError(
            f"{place.backend.url}/{file}: file is missing, but {_BIN_INDEX_KEY} names it; fetch it again"
        ) from error
