"""Read models of Hugging Face libraries in files of ``torch.save``: one file, or several with an index."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import CorruptionError, FormatError, KeyNotFoundError, NotACheckpointError
from .archives import read_archive
from .building import IndexBuilder
from .naming import MODEL_SECTION, is_state_dict, module_names
from .place import Place
from .torch_values import TorchValues
from .weight_map import check_weight_map, read_weight_map

__all__ = ["BIN_INDEX_KEY", "BIN_KEYS", "add_torch_model"]

BIN_INDEX_KEY = "pytorch_model.bin.index.json"
BIN_KEYS = ("pytorch_model.bin", "adapter_model.bin")
"""The names of a model in one file."""

_THREADS = 16  # of reads that wait for the store


def add_torch_model(place: Place, builder: IndexBuilder) -> bool:
    """Add the section ``model`` of a folder to an index; False if the folder has no such model.

    Raises ``CorruptionError`` for a missing file, ``FormatError`` for a damaged one, one without a state dict, or one
    that disagrees with the index, and ``NotACheckpointError`` for several models.
    """
    found = [name for name in BIN_KEYS if name in place.children]
    index = read_weight_map(place.backend, BIN_INDEX_KEY, ".bin") if BIN_INDEX_KEY in place.children else None
    if index is not None:
        found = [BIN_INDEX_KEY, *(name for name in found if name not in index.values())]
    if not found:
        return False
    if len(found) > 1:
        raise NotACheckpointError(
            f"{place.url} holds both {found[0]} and {found[1]}, which are different models; name the file to use, or "
            f"remove the other"
        )
    files = found if index is None else sorted(set(index.values()))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="bcp-index") as pool:
        documents = list(pool.map(lambda file: _read(place, file), files))
    values = TorchValues(builder)
    tensors: dict[str, Any] = {}
    places: dict[str, str] = {}
    for file, document in zip(files, documents):
        tree = values.tree(document)
        if not is_state_dict(tree) and tree != {}:
            raise FormatError(f"{place.backend.url}/{file}: it does not hold a model's tensors by name")
        for name, leaf in tree.items():
            if name in tensors:
                raise FormatError(f"{place.url}: {name!r:.200} is in {places[name]} and in {file}")
            tensors[name], places[name] = leaf, file
    if index is not None:
        check_weight_map(index, places, place.url, BIN_INDEX_KEY)
    builder.add_section(MODEL_SECTION, "module")
    builder.add_tree(MODEL_SECTION, module_names(tensors))
    return True


def _read(place: Place, file: str) -> Any:
    try:
        return read_archive(place.backend, file).value
    except KeyNotFoundError as error:
        raise CorruptionError(
            f"{place.backend.url}/{file}: file is missing, but {BIN_INDEX_KEY} names it; fetch it again"
        ) from error
