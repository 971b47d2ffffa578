"""Read folders of safetensors files in Hugging Face's layout. Their files have no checksums."""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint.index import Index
from ..errors import CheckpointNotFoundError, NotACheckpointError
from .building import IndexBuilder, StoredLeaf
from .naming import MODEL_SECTION
from .place import Place
from .safetensors_folder import SafetensorsFolder, meta_of

__all__ = ["index_folder", "read_safetensors"]


def read_safetensors(place: Place) -> Index | None:
    """Return the index of safetensors files, whose tensors form the section ``model``; None if there are none.

    Raises what ``SafetensorsFolder`` raises for damaged files.
    """
    try:
        folder = SafetensorsFolder(place)
    except (CheckpointNotFoundError, NotACheckpointError):
        return None
    return index_folder(folder, MODEL_SECTION)


def index_folder(folder: SafetensorsFolder, section: str, names: Mapping[str, str] | None = None) -> Index:
    """Return the index of a folder's files, with their tensors in ``section``.

    ``names`` gives each tensor's name inside the section, if that is not its name in the files. Raises
    ``UnsupportedTensorError`` for a dtype that torch does not have.
    """
    builder = IndexBuilder(folder.backend, "safetensors")
    builder.add_section(section, "module")
    for key, header in folder.headers.items():
        size = header.data_start + max((record.end for record in header.entries), default=0)
        file = builder.add_file(key, size)
        for record in header.entries:
            meta = meta_of(record, f"{folder.backend.url}/{key}")
            leaf = StoredLeaf.whole(meta, file, header.data_start + record.begin)
            builder.add_tensor(section, names[record.name] if names else record.name, leaf)
    return builder.build(name=folder.name)
