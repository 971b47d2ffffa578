"""Open a checkpoint store by its URL, and the interface that every store implements.

``open_backend`` returns a ``StorageBackend`` for a path or a URL. Local files, process memory and every fsspec file
system (S3, GCS, HDFS, ...) are built in. Other packages register a backend for a URL scheme under the entry point group
``bytecheckpoint.storage_backends``; ``bytecheckpoint.testing.storage`` contains the conformance suite that such a
backend must pass.
"""

from __future__ import annotations

from .base import Conditions, IncompleteUpload, ObjectReader, ObjectStat, ObjectWriter, PartWriter, StorageBackend
from .buffers import WrittenRanges, byte_view
from .keys import check_children_prefix, check_key, check_prefix
from .registry import absolute_url, folder_name, join, open_backend, open_like, parent_url, url_text
from .writers import BufferedWriter

__all__ = [
    "BufferedWriter",
    "Conditions",
    "IncompleteUpload",
    "ObjectReader",
    "ObjectStat",
    "ObjectWriter",
    "PartWriter",
    "StorageBackend",
    "WrittenRanges",
    "absolute_url",
    "byte_view",
    "check_children_prefix",
    "check_key",
    "check_prefix",
    "folder_name",
    "join",
    "open_backend",
    "open_like",
    "parent_url",
    "url_text",
]
