"""Read folders of Hugging Face libraries: models, adapters of PEFT, and checkpoints of the Trainer of transformers."""

from __future__ import annotations

from ..checkpoint.index import Index
from ..errors import NotACheckpointError
from ..format.hf_index import INDEX_KEY
from .building import IndexBuilder, StoredLeaf
from .naming import MODEL_SECTION
from .place import Place
from .safetensors_folder import SafetensorsFolder, meta_of
from .torch_folder import add_torch_model
from .trainer import STATE_KEY, TrainerState

__all__ = ["read_huggingface"]


def read_huggingface(place: Place) -> Index | None:
    """Return the index of a model, whose tensors form the section ``model``; None if there is none.

    A Trainer's checkpoint also has the sections that ``TrainerState`` adds.

    A folder with safetensors files is read from these, even if it also has files of ``torch.save``. Those have CRC-32s;
    safetensors files have no checksums.

    Raises what ``SafetensorsFolder`` and ``add_torch_model`` raise for damaged files and for a folder with several
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
    if add_torch_model(place, builder):
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
