"""The files besides a model's tensors: its configuration, its tokenizer and so on.

An import keeps them as companions of the checkpoint, and an export writes them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase

from ..checkpoint.checkpoint import Checkpoint
from ..engine.reading.stored_files import read_stored_file
from ..errors import KeyExistsError
from ..foreign.source_path import parse_json
from ..format.hf_index import ADAPTER_CONFIG_KEY, CONFIG_KEY
from ..format.manifest.files import COMPANION
from ..storage_backends.base import StorageBackend
from ..tensors.dtypes import DType

_PATTERNS = (
    *(CONFIG_KEY, "generation_config.json", ADAPTER_CONFIG_KEY),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken"),
    *("spiece.model", "sentencepiece*.model", "chat_template*"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""What transformers and PEFT store in addition to the tensors. Code of custom models is not among it."""

_MAX_BYTES = 1 << 28  # of one file


def related_files(backend: StorageBackend) -> dict[str, bytes]:
    """Return the related files of a folder by name. Raises ``StorageError``."""
    names = [name for name in backend.list_children("") if _is_related(name)]
    return {name: backend.get(name, max_size=_MAX_BYTES) for name in names}


def kept_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the related files that a checkpoint has, whichever system wrote it.

    Raises ``CorruptionError`` and ``StorageError``.
    """
    index = checkpoint.index
    if not index.is_own:
        return {} if index.name else related_files(index.backend)
    files = index.manifest.files
    rows = [row for row, kind in enumerate(files.kind) if kind == COMPANION]
    return {
        name: read_stored_file(index.data, index.manifest, row, head_only=False)
        for row in rows
        if _is_related(name := files.name[row].rpartition("/")[2])
    }


def put_files(target: StorageBackend, files: Mapping[str, bytes]) -> list[str]:
    """Write files that are not there; return their names. Raises ``KeyExistsError`` if one has other contents."""
    there = set(target.list_children(""))
    for name in sorted(there.intersection(files)):
        if target.get(name, max_size=_MAX_BYTES) != files[name]:
            raise KeyExistsError(
                f"{target.url}/{name} exists with other contents and was not changed; remove it, or export elsewhere"
            )
    added = [name for name in files if name not in there]
    for name in added:
        target.put(name, files[name])
    return added


def with_dtype(files: Mapping[str, bytes], dtype: DType) -> dict[str, bytes]:
    """Return the files with ``dtype`` as the one in which the configured model is loaded. Raises ``FormatError``."""
    if CONFIG_KEY not in files:
        return dict(files)
    document = parse_json(files[CONFIG_KEY], CONFIG_KEY)
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(document, dict) and document.get(key)]
    if not keys:
        return dict(files)
    document.update(dict.fromkeys(keys, dtype.name))
    return {**files, CONFIG_KEY: (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()}


def _is_related(name: str) -> bool:
    return not name.endswith("/") and any(fnmatchcase(name, pattern) for pattern in _PATTERNS)
