"""Read folders of safetensors files in Hugging Face's layout. Their files have no checksums."""

from __future__ import annotations

from ..checkpoint.index import Index
from ..format.hf_index import INDEX_KEY
from .building import IndexBuilder, StoredLeaf
from .naming import MODEL_SECTION
from .place import Place
from .safetensors_folder import SafetensorsFolder, meta_of

__all__ = ["read_safetensors"]


def read_safetensors(place: Place) -> Index | None:
    """Return the index of safetensors files, whose tensors form the section ``model``; None if there are none.

    Raises what ``SafetensorsFolder`` raises for damaged files and for a folder with several models, and
    ``UnsupportedTensorError`` for a dtype that torch does not have.
    """
    names = [place.name] if place.name else place.children
    if not any(name.endswith((".safetensors", INDEX_KEY)) for name in names):
        return None
    folder = SafetensorsFolder(place)
    builder = IndexBuilder(folder.backend, "safetensors")
    builder.add_section(MODEL_SECTION, "module")
    for key, header in folder.headers.items():
        size = header.data_start + max((record.end for record in header.entries), default=0)
        file = builder.add_file(key, size)
        for record in header.entries:
            meta = meta_of(record, f"{folder.backend.url}/{key}")
            leaf = StoredLeaf.whole(meta, file, header.data_start + record.begin)
            builder.add_tensor(MODEL_SECTION, record.name, leaf)
    return builder.build(name=folder.name)
