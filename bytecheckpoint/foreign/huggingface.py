"""Read folders of Hugging Face libraries: models, adapters of PEFT, and checkpoints of the Trainer of transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..checkpoint.index import Index
from ..errors import FormatError, NotACheckpointError
from ..format.hf_index import INDEX_KEY
from ..format.values import UnreadObject
from .building import IndexBuilder, StoredLeaf
from .naming import EXTRA_SECTION, MODEL_SECTION, OPTIMIZER_SECTION, is_state_dict, module_names
from .pickles import TensorRef
from .safetensors_folder import SafetensorsFolder, check_weight_map, meta_of, read_weight_map
from .source_path import SourcePath, read_json
from .torch_values import TorchValues, read_small, read_torch_file

_BIN_INDEX_KEY = "pytorch_model.bin.index.json"
_BIN_KEYS = ("pytorch_model.bin", "adapter_model.bin")
"""The names of a model in one file."""


def read_huggingface(source: SourcePath) -> Index | None:
    """Return the index of a model, whose tensors form the section ``model``; None if there is none.

    A Trainer's checkpoint also has the sections that ``TrainerState`` adds.

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
    if _add_torch_model(source, builder):
        return _build(source, builder)
    gguf = next((name for name in names if name.endswith(".gguf")), None)
    return None if gguf is None else read_torch_file(replace(source, url=f"{source.url}/{gguf}", name=gguf))


def _build(source: SourcePath, builder: IndexBuilder) -> Index:
    if source.name or STATE_KEY not in source.children:
        return builder.build(name=source.name)
    builder.system = "transformers"
    trainer = TrainerState(source, builder)
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


STATE_KEY = "trainer_state.json"
"""The counters, which every checkpoint of a Trainer has."""

_SECTIONS = {
    "optimizer.pt": OPTIMIZER_SECTION,
    "optimizer.bin": OPTIMIZER_SECTION,  # with FSDP
    "scheduler.pt": "lr_scheduler",
    "scaler.pt": "grad_scaler",
}
_RNG_SECTION = "rng"
_RNG = re.compile(r"rng_state(?:_(0|[1-9]\d{0,6}))?\.pth")
_MAX_STATE_BYTES = 256 << 20
_MAX_GENERATOR_BYTES = 1 << 20


class TrainerState:
    """Adds the files of one checkpoint to an index.

    Attributes:
        step: The number of optimizer steps, if it is stored.
        world_size: The number of ranks that stored their random generators.
    """

    def __init__(self, source: SourcePath, builder: IndexBuilder) -> None:
        """Read the files. Raises ``FormatError`` and ``CorruptionError`` for damaged ones."""
        self._backend, self._values = source.backend, TorchValues(builder)
        counters = read_json(source.backend, STATE_KEY, _MAX_STATE_BYTES)
        if not isinstance(counters, dict):
            raise FormatError(f"{source.backend.url}/{STATE_KEY} is not a JSON object")
        step = counters.get("global_step")
        self.step = step if type(step) is int and step >= 0 else None
        sections = {key: section for key, section in _SECTIONS.items() if key in source.children}
        generators = {int(match[1] or 0): key for key in source.children if (match := _RNG.fullmatch(key))}
        # A node may have only the files of its own ranks.
        if sorted(generators) != list(range(len(generators))):
            generators = {}
        self.world_size = max(len(generators), 1)
        keys = [*sections, *generators.values()]
        found = dict(zip(keys, source.objects(keys), strict=True))
        for key, section in sections.items():
            builder.add_tree(section, self._values.tree(found[key]))
        if generators:
            builder.add_section(_RNG_SECTION, "stateful")
        for rank, key in generators.items():
            builder.add_tree(_RNG_SECTION, self._generators(found[key], rank), rank=rank)
        builder.add_tree(EXTRA_SECTION, counters)

    def _generators(self, found: Any, rank: int) -> dict[str, Any]:
        """The state of ``bytecheckpoint.RNGState``."""
        found = found if isinstance(found, dict) else {}
        devices = {kind: state for kind, state in found.items() if kind not in ("python", "numpy", "cpu")}
        accelerator: dict[str, Any] = {}
        for kind, state in devices.items():
            states = state if isinstance(state, list) else [state]  # one generator, or those of all devices
            accelerator = {"type": kind, "states": [self._bytes(one) for one in states]}
        return {
            "rank": rank,
            "world_size": self.world_size,
            "python": self._values.tree(found.get("python")),
            "numpy": _numpy_state(found.get("numpy")),
            "torch": self._bytes(found.get("cpu")),
            "accelerator": accelerator,
        }

    def _bytes(self, tensor: Any) -> Any:
        """The contents of a generator's state."""
        is_state = type(tensor) is TensorRef and tensor.is_contiguous and tensor.nbytes <= _MAX_GENERATOR_BYTES
        if not is_state or tensor.dtype.name != "uint8":
            return UnreadObject("no state of a random generator")
        return read_small(self._backend, tensor).numpy()


def _numpy_state(found: Any) -> Mapping[str, Any] | UnreadObject:
    """The named form of what ``numpy.random.get_state()`` returns."""
    if type(found) is not tuple or len(found) != 5 or not isinstance(found[1], np.ndarray):
        return UnreadObject("no state of numpy's random generator")
    kind, key, position, has_gauss, gauss = found
    return {"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": gauss}
