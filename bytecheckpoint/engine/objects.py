"""Where the data files of a checkpoint are: in its own folder, or among the shared objects of its root.

What incremental saves write is in ``objects/<attempt>/``, next to the folders of the checkpoints, whose own folders
hold only manifests (``checkpoint.sweep`` explains why).
"""

from __future__ import annotations

import os

from ..format.manifest.document import Manifest
from ..storage_backends import folder_name, join, open_like, parent_url
from ..storage_backends.base import StorageBackend
from ..storage_backends.local.backend import LocalBackend

OBJECTS = "objects"
"""The folder of a root with the files that its incremental checkpoints share."""


def objects_next_to(checkpoint: StorageBackend) -> StorageBackend | None:
    """Return the shared objects of the root that a checkpoint's folder is in; None if the folder has no parent."""
    return open_like(checkpoint, join(parent_url(checkpoint), OBJECTS)) if folder_name(checkpoint) else None


def data_of(checkpoint: StorageBackend, manifest: Manifest) -> StorageBackend:
    """Return the backend whose keys are the names of the data files of a checkpoint, and of those it refers to.

    A link to a checkpoint may be in its root, if the folder was moved away, or elsewhere.
    """
    if not manifest.is_shared:
        return checkpoint
    if isinstance(checkpoint, LocalBackend):
        objects = LocalBackend(os.path.join(os.path.dirname(checkpoint.url), OBJECTS))
        if os.path.isdir(os.path.join(objects.url, manifest.attempt)):
            objects.deadline_s = checkpoint.deadline_s
            return objects
    return objects_next_to(checkpoint) or checkpoint


def files_of(manifest: Manifest) -> dict[str, int]:
    """Return the names and sizes of all files with bytes of a checkpoint, also those that it refers to."""
    names = (*manifest.files.name, *manifest.references.name)
    return dict(zip(names, (*manifest.files.size.tolist(), *manifest.references.size.tolist()), strict=True))


def attempts_of(manifest: Manifest) -> set[str]:
    """Return the attempts that wrote the files of a checkpoint, and those that it refers to."""
    return {manifest.attempt, *(name.partition("/")[0] for name in manifest.references.name)}
