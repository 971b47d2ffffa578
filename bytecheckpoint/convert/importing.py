"""Import another system's checkpoint: write its tensors and plain values as a checkpoint, with checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..checkpoint.attempts import new_attempt
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.selection import Exclusion
from ..errors import UsageError
from ..format.manifest.document import timestamp
from ..frameworks.sections import check_state
from ..runtime.arguments import check_arguments
from ..runtime.modes import default_modes
from .reshard import chosen_part, whole_files
from .rewriter import Progress, Rewriter, refuse_checkpoint


@dataclass(frozen=True)
class ImportReport:
    """The result of ``import_checkpoint``.

    Attributes:
        url: URL of the new checkpoint.
        system: The system that wrote the source.
        sections: Names of the imported sections.
        files: Names of the source's files.
        tensors: Number of tensors.
        total_size: Bytes of all tensors.
    """

    url: str
    system: str
    sections: tuple[str, ...]
    files: tuple[str, ...]
    tensors: int
    total_size: int


@default_modes()
def import_checkpoint(
    source: Checkpoint,
    target: AnyLocation,
    *,
    section: str | None = None,
    step: int | None = None,
    exclude: Sequence[str] = (),
    progress: Progress = lambda nbytes: None,
) -> ImportReport:
    """Commit a checkpoint that holds what another system stored. Holds a few MiB at a time.

    A model's configuration, its tokenizer and so on are kept as companions. The checkpoint appears when all files
    are durable. After a failure nothing remains at the target.

    Args:
        source: The other system's checkpoint, from ``bcp.open``, under the names to store (``Checkpoint.renamed``).
        target: Where to put the checkpoint.
        section: The name of the section, if the source has one only.
        step: The step to store with the checkpoint; by default the source's.
        exclude: Shell patterns; tensors and values whose full names match one are left out.
        progress: Called with the number of bytes imported since the last call.

    Returns:
        A report.

    Raises:
        UsageError: ``step`` is negative, ``section`` is not a valid name, or the source is a checkpoint of this
            library.
        MismatchError: A pattern matches nothing.
        StateError: The source holds an object that this library does not read.
        NameCollisionError: Two tensors would have the same name.
        KeyExistsError: The target already holds a checkpoint.
        CorruptionError: Stored bytes differ from their CRC-32.
        StorageError: A store failed.
    """
    index = source.index
    if index.has_checksums:
        raise UsageError(f"{source.url} is a checkpoint of this library already; use bcp copy or bcp reshard")
    step = check_arguments({"step": step})["step"]
    if section is not None:
        check_state({section: None})
        if len(source.sections) > 1:
            raise UsageError(f"{source.url} has the sections {', '.join(source.sections)}; section= needs a single one")
    store = Location.of(target).open()
    refuse_checkpoint(store, source.url)
    sections = {one.name: section or one.name for one in index.manifest.sections}
    excluded = Exclusion(exclude)
    chosen = chosen_part(index, sections, excluded)
    excluded.require_matches(source.url, source)
    manifest = chosen.manifest
    manifest = replace(manifest, step=manifest.step if step is None else step, created=timestamp())
    attempt = new_attempt()
    outputs = whole_files(chosen, source, attempt)
    Rewriter(replace(chosen, manifest=manifest)).commit(store, attempt, outputs, progress)
    names = tuple(one.name for one in manifest.sections)
    files = tuple(index.manifest.files.name)
    return ImportReport(store.url, index.system, names, files, len(manifest.tensors), manifest.nbytes)
