"""Export a checkpoint as one file that ``torch.load`` reads without this library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.selection import Exclusion
from ..checkpoint.values import refuse_unread
from ..errors import KeyExistsError, KeyNotFoundError, StateError, UsageError
from ..foreign.source_path import open_parent
from ..frameworks.tree_paths import find_all, replace_all
from ..runtime.modes import default_modes
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from .rewriter import OutputTensor, Progress, Rewriter
from .selection import output_dtype, parse_cast
from .state_dicts import Refused, options_by_name, section_state
from .torch_layout import TorchLayout


@dataclass(frozen=True)
class TorchFileReport:
    """The result of ``export_torch_file``.

    Attributes:
        url: URL of the file.
        nbytes: Its size.
        tensors: Number of tensors in it.
        left_out: Full names of what only ranks other than 0 saved, which is not in the file.
        bytes_read: Bytes read from the checkpoint.
    """

    url: str
    nbytes: int
    tensors: int
    left_out: tuple[str, ...]
    bytes_read: int


@default_modes()
def export_torch_file(
    checkpoint: Checkpoint,
    target: AnyLocation,
    *,
    section: str | None = None,
    cast: str | torch.dtype | None = None,
    exclude: Sequence[str] = (),
    progress: Progress = lambda nbytes: None,
) -> TorchFileReport:
    """Write one file as ``torch.save`` does. Holds a few MiB of tensors at a time.

    The file holds a dict with the state of each section: a module's ``state_dict()``, and trees as they were. An
    optimizer's is the flattened dict, by names of parameters, that ``set_optimizer_state_dict`` of
    ``torch.distributed.checkpoint.state_dict`` takes with ``flatten_optimizer_state_dict=True``. The numbers that
    ``Optimizer.load_state_dict`` needs depend on the order of the parameters, which a checkpoint does not record.
    Arrays and numbers of numpy, as in its random state, become lists and numbers: ``torch.load`` with
    ``weights_only=True``, its default, refuses numpy's.

    Args:
        checkpoint: The checkpoint to export, from ``bcp.open``.
        target: The new file.
        section: Write the state of this section alone.
        cast: A floating-point dtype. Floating-point tensors of 16 bits or more are cast to it; others are not.
        exclude: Shell patterns; tensors and values whose full names match one are left out.
        progress: Called with the number of bytes of tensors written since the last call.

    Returns:
        A report.

    Raises:
        NameNotFoundError: The checkpoint has no such section.
        MismatchError: A pattern matches nothing.
        StateError: A value cannot be decoded, for example because it is stored as a pickle, or is not read.
        KeyExistsError: The file exists.
        CorruptionError: Stored bytes are damaged or missing.
        StorageError: A store failed.
    """
    location = Location.of(target)
    name = location.url.rpartition("/")[2]
    if not name:
        raise UsageError(f"{location} is a folder; give the name of the file to write")
    dtype = parse_cast(cast)
    folder = open_parent(location)
    try:
        folder.stat(name)
    except KeyNotFoundError:
        pass
    else:
        raise KeyExistsError(f"{location} exists already and was not changed; give another target")
    sections = {name: _flattened(tree) for name, tree in exportable_state(checkpoint, section, exclude).items()}
    state: Any = sections if section is None else sections[section]
    state = replace_all(state, (np.ndarray, np.generic), lambda found: found.tolist())
    layout = TorchLayout.of(state, lambda row: whole_tensor(checkpoint, row, dtype))
    with folder.create(name, layout.size) as writer:
        with Rewriter(checkpoint.index) as rewriter:
            layout.write(writer, 0, rewriter.pieces(layout.tensors), progress)
        writer.complete()
    return TorchFileReport(
        location.url, layout.size, len(layout.tensors), left_out_of(checkpoint, sections), rewriter.bytes_read
    )


def _flattened(tree: Any) -> Any:
    """Return an optimizer's state dict by names in its flattened form, and any other tree as it is."""
    options = options_by_name(tree)
    if options is None or tree.keys() != {"state", "param_groups"}:
        return tree
    state = {f"state.{fqn}.{key}": found for fqn, entries in tree["state"].items() for key, found in entries.items()}
    return {**state, **options}


def exportable_state(checkpoint: Checkpoint, section: str | None, exclude: Sequence[str]) -> dict[str, Any]:
    """Return the state of all sections, or of one, with ``StoredTensorRef``s. Raises as ``export_torch_file``."""
    if section is not None:
        checkpoint.require_section(section)
    excluded = Exclusion(exclude)
    chosen = checkpoint.sections if section is None else [section]
    values = (value for value in checkpoint.index.values() if value.section in chosen and not excluded(value.name))
    refuse_unread(values, checkpoint.url)
    state = {one: section_state(checkpoint, one, keep=lambda name: not excluded(name)) for one in chosen}
    excluded.require_matches(checkpoint.url, checkpoint)
    refused = find_all(state, Refused)
    if refused:
        rest = f" ({len(refused)} such values)" if len(refused) > 1 else ""
        raise StateError(f"{refused[0].error}{rest}; leave out what the export need not have with exclude")
    return state


def left_out_of(checkpoint: Checkpoint, sections: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the full names in these sections that only ranks other than 0 have saved."""
    manifest = checkpoint.manifest
    names = [name for row, name in enumerate(manifest.tensors.names) if manifest.scope[row] > 0]
    names += [value.name for value in checkpoint.index.values() if value.rank]
    return tuple(sorted({name for name in names if name.partition(".")[0] in sections}))


def whole_tensor(checkpoint: Checkpoint, row: int, cast: DType | None) -> OutputTensor:
    """Return a whole tensor as what is written."""
    meta = checkpoint.manifest.tensors.meta_of(row)
    return OutputTensor("", row, Box.whole(meta.shape), output_dtype(meta.dtype, cast))
