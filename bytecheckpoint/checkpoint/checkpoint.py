"""The read-only handle on a checkpoint: names, shapes, slices, values, and verification.

It needs neither ``torch.distributed`` nor a model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, overload

import numpy as np
import torch

from ..engine.reading.reader import ReadStats
from ..engine.reading.verify import verify_crcs, verify_files
from ..engine.resources import IOEngine
from ..errors import CheckpointError, NameNotFoundError, StateError, UsageError, without_userinfo
from ..format.hf_index import model_directory
from ..format.manifest.document import Manifest
from ..format.values.decoding import decode_value
from ..format.values.types import Container, is_left_out
from ..frameworks.sections import split_rank_name
from ..runtime.arguments import check_arguments
from ..runtime.modes import default_modes
from ..storage_backends import join
from ..storage_backends.base import StorageBackend
from ..telemetry.trace import html_table
from ..tensors.geometry import Box
from ..tensors.shards import Path
from .index import Index
from .renaming import Rename
from .selection import SimilarNames
from .stored_tensor import StoredTensor
from .values import decoded_values, section_tree


@dataclass(frozen=True)
class VerifyReport:
    """The result of ``Checkpoint.verify``.

    Attributes:
        url: URL of the checkpoint.
        files: Number of files that were checked.
        bytes_checked: Number of bytes that were checked.
        problems: A message for each fault. If there are none, all stored bytes equal the saved ones.
    """

    url: str = field(repr=False)  # it may contain a password
    files: int
    bytes_checked: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return not self.problems


class Checkpoint(Mapping[str, StoredTensor]):
    """A read-only checkpoint: maps full tensor names (``model.wte.weight``, tied names too) to ``StoredTensor``.

    ``bcp.open`` returns it. Thread-safe. Reads only the bytes that are requested, in whole checksum chunks. It can be
    pickled and used in forked processes, such as the workers of a data loader: there, it opens the path again. A pickle
    contains the path and the storage options.

    Attributes:
        index: What the path stores, and which system wrote it.
        reader: The reader that ``read`` uses.

    Example:
        >>> checkpoint = bcp.open("s3://runs/7b/step-1000")
        >>> checkpoint.step, sorted(checkpoint)[:2]
        (1000, ['model.h.0.attn.bias', 'model.h.0.attn.weight'])
        >>> rows = checkpoint["model.wte.weight"][0:128]     # reads only these rows
        >>> checkpoint.verify().ok
        True
    """

    def __init__(
        self,
        index: Index,
        engine: IOEngine,
        *,
        verify: bool = True,
        reopen: Callable[[], Checkpoint] | None = None,
    ) -> None:
        """Create a handle on what an index describes. Use ``bcp.open`` instead.

        Args:
            index: What the path stores.
            engine: Threads and memory for reads.
            verify: Check all bytes that are read against their checksums.
            reopen: Opens the same path in another process; picklable. Without it, the handle works in one process only.
        """
        self._reopen = reopen
        self.index = index
        self._engine, self._verifies = engine, verify
        self.reader = index.reader(engine, verify=verify)
        self._aliases = dict(index.manifest.aliases)

    @property
    def backend(self) -> StorageBackend:
        """Storage backend whose root is the checkpoint."""
        return self.index.backend

    @property
    def manifest(self) -> Manifest:
        """The tables of sections, files, tensors and boxes."""
        return self.index.manifest

    @property
    def stats(self) -> ReadStats:
        """Bytes read through this handle and bytes requested, without plain values and ``verify``."""
        return self.reader.stats

    @property
    def url(self) -> str:
        """URL of the checkpoint."""
        return self.index.url

    @property
    def model_directory(self) -> str | None:
        """URL of the directory, inside the checkpoint, from which Hugging Face libraries and vLLM load the model.

        None unless the checkpoint was saved with ``layout="whole"``.
        """
        directory = model_directory(self.manifest)
        return None if directory is None else join(self.url, directory)

    @property
    def step(self) -> int | None:
        """The step that was passed to ``save``."""
        return self.manifest.step

    @property
    def created(self) -> str:
        """When it was saved, in UTC, as in RFC 3339."""
        return self.manifest.created

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The ``metadata`` that was passed to ``save``."""
        return self.manifest.metadata

    @property
    def world_size(self) -> int:
        """Number of ranks that saved the checkpoint."""
        return self.manifest.world_size

    @property
    def sections(self) -> Sequence[str]:
        """Names of the sections, such as "model" and "optimizer"."""
        return [section.name for section in self.manifest.sections]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Maps each tied name to the name under which its bytes are stored."""
        return self._aliases

    @cached_property
    def left_out(self) -> Sequence[str]:
        """Full names that the save was asked to leave out (``include``, ``exclude``, ``trainable_only``), sorted.

        Reads the plain values of all sections.
        """
        values = self.index.values()
        return sorted({value.name for value in values if is_left_out(value.decode())})

    def renamed(self, rename: Rename) -> Checkpoint:
        """Return a handle on the same checkpoint under other names. Nothing is copied or read again.

        Args:
            rename: Mapping from the full names of this handle to new ones, or a function that maps one to the other, as
                in ``bytecheckpoint.load``. In a mapping, a key that ends in a dot is the beginning of names. What
                enters a section takes the place of what has the name already; that is not in the new handle.

        Returns:
            The new handle.

        Raises:
            UsageError: ``rename`` is invalid.
            MismatchError: A key matches nothing that is stored, or the function changes no name. Lists all.
            NameCollisionError: Two names of one section become one.

        Example:
            >>> bcp.load(bcp.open("runs/7b/step-1000").renamed({"ema.module.": "model."}), {"model": model})
        """
        checked = check_arguments({"rename": rename})["rename"]
        index = self.index.renamed(checked)
        if index.names is not None:
            index.names.require_matches(self.url, self)
        reopen = None if self._reopen is None else partial(_renamed, self._reopen, checked)
        return Checkpoint(index, self._engine, verify=self._verifies, reopen=reopen)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a tensor of this full name, or a tied name."""
        return isinstance(name, str) and self._row(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor without reading it, or ``default`` if there is none.

        Args:
            name: Full name of the tensor, or a tied name.
            default: What to return for any other name.

        Returns:
            The tensor or ``default``.
        """
        row = self._row(name)
        return default if row is None else StoredTensor(self, name, row)

    def _row(self, name: str) -> int | None:
        return self.manifest.tensor_row(self._aliases.get(name, name)) if isinstance(name, str) else None

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a tensor without reading it.

        Args:
            name: Full name of the tensor, or a tied name.

        Returns:
            The tensor.

        Raises:
            NameNotFoundError: The checkpoint has no tensor of this name; the message contains similar names. Also a
                ``KeyError``.
        """
        row = self._row(name)
        if row is None:
            raise NameNotFoundError(f"no tensor {name!r} in {self.url}{SimilarNames(self).nearest(str(name))}")
        return StoredTensor(self, name, row)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, tied names last."""
        yield from filter(None, self.manifest.tensors.names)  # without those that others have replaced in a rename
        yield from self._aliases

    def __len__(self) -> int:
        """Return the number of names, with tied names."""
        row_of = self.manifest.row_of
        return len(self.manifest.tensors if row_of is None else row_of) + len(self._aliases)

    def section_values(self, section: str, rank: int = 0) -> dict[Path, Any]:
        """Read a section's plain values.

        Args:
            section: Name of the section.
            rank: Rank of the save whose own values are included, in addition to those that all ranks share.

        Returns:
            The values by path, the sequence of keys that leads to each of them.

        Raises:
            NameNotFoundError: The section is not stored.
            StateError: A value was stored as a pickle.
            CorruptionError: Stored bytes are damaged or missing.
            StorageError: The store failed.
        """
        found = self._entries(section, rank)
        return {path: value for path, value in found.items() if type(value) is not Container}

    def _entries(self, section: str, rank: int) -> dict[Path, Any]:
        """The section's values, and what describes the containers around values and tensors."""
        self.require_section(section)
        values = self.index.values(section=section, ranks=(rank,))
        return decoded_values(values, lambda value: decode_value(value.encoded, where=value.name))

    def require_section(self, section: str) -> None:
        """Check that a section is stored.

        Args:
            section: Name of the section.

        Raises:
            NameNotFoundError: It is not stored.
        """
        if self.manifest.section_index(section) is None:
            raise NameNotFoundError(f"{self.url} has no section {section!r}; it has {', '.join(self.sections)}")

    @overload
    def state_dict(
        self, section: str = "model", *, lazy: Literal[False] = False, rank: int = 0, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]: ...

    @overload
    def state_dict(
        self, section: str = "model", *, lazy: Literal[True], rank: int = 0, device: torch.device | str = "cpu"
    ) -> dict[str, StoredTensor]: ...

    def state_dict(
        self, section: str = "model", *, lazy: bool = False, rank: int = 0, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor] | dict[str, StoredTensor]:
        """Return a section's tensors under their names in the section, as a module's ``state_dict()`` has them.

        Args:
            section: Name of the section.
            lazy: Return ``StoredTensor`` objects, which read when they are indexed or loaded.
            rank: Rank of the save whose own tensors are included, in addition to those that all ranks share.
            device: Device of the tensors that are read.

        Returns:
            A new dict with whole tensors. Tied names have the same tensor. Plain values are not included; see ``tree``.

        Raises:
            NameNotFoundError: The section is not stored.
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.

        Example:
            >>> model.load_state_dict(bcp.open("runs/7b/step-1000").state_dict("model"))
        """
        rows = self.section_rows(section, rank)
        names = self.manifest.tensors.names
        by_row = {row: StoredTensor(self, names[row], row) for row in rows.values()}
        if lazy:
            return {name: by_row[row] for name, row in rows.items()}
        read = {row: torch.empty(one.shape, dtype=one.dtype, device=device) for row, one in by_row.items()}
        self.read([(row, Box.whole(by_row[row].shape), tensor) for row, tensor in read.items()])
        return {name: read[row] for name, row in rows.items()}

    def tree(self, section: str, *, rank: int = 0, device: torch.device | str = "cpu") -> Any:
        """Return a section that was saved as a tree (``extra_state``, a scheduler, a data loader) as it was saved.

        Args:
            section: Name of the section.
            rank: Rank of the save whose own values and tensors are included, in addition to those that all ranks share.
            device: Device of the tensors in the tree.

        Returns:
            New dicts, lists, tuples, plain values and tensors. Of a module or an optimizer, tensors have flat names.

        Raises:
            NameNotFoundError: The section is not stored.
            StateError: A value was stored as a pickle.
            MismatchError: An item of a list or tuple was left out of the save.
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.

        Example:
            >>> bcp.open("runs/7b/step-1000").tree("extra_state")
            {'step': 1000, 'table': tensor([0., 1., 2.])}
        """
        values = self._entries(section, rank)
        return section_tree(section, values, self.state_dict(section, rank=rank, device=device))

    def section_rows(self, section: str, rank: int) -> dict[str, int]:
        """Return the manifest's rows of a section's tensors.

        Args:
            section: Name of the section.
            rank: Rank of the save whose own tensors are included, in addition to those that all ranks share; -1 for
                none.

        Returns:
            The rows by name in the section; tied names come last.

        Raises:
            NameNotFoundError: The section is not stored.
        """
        self.require_section(section)
        tensors, rows = self.manifest.tensors, dict[str, int]()
        for row in self.manifest.section_tensors(section).tolist():
            owner, fqn = int(self.manifest.scope[row]), tensors.fqn_of(row)
            if owner in (-1, rank):
                rows[fqn if owner < 0 else split_rank_name(fqn)[0]] = row
        prefix = f"{section}."
        for alias, name in self._aliases.items():
            tied = self.manifest.tensor_row(name) if alias.startswith(prefix) else None
            if tied is not None:
                rows[alias[len(prefix) :]] = tied
        return rows

    @default_modes()
    def read(self, parts: Sequence[tuple[int, Box, torch.Tensor]]) -> None:
        """Fill tensors with boxes of stored tensors, and check the bytes.

        Args:
            parts: For each tensor to fill: the manifest row of the stored tensor, the box of it to read, and the tensor
                of this shape. It may be on any device, and have another dtype: then the values are cast.

        Raises:
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.
        """
        self._enter_process()
        self._engine.check_usable()
        self.reader.read(self.reader.parts_of(parts))

    def require_checksums(self) -> None:
        """Check that the stored bytes can be verified.

        Raises:
            StateError: Another library wrote the files, which have no checksums.
        """
        if not self.index.is_own:
            raise StateError(
                f"{self.url} holds files of another library ({self.index.system}), which have no checksums to check; "
                f"convert them into a checkpoint first: bcp import"
            )

    def verify(self, progress: Callable[[int], None] = lambda nbytes: None) -> VerifyReport:
        """Read every byte of every file and compare it with the manifest. Uses bounded memory.

        What a load would read again, from the store instead of the tier or from a remote store, is no fault if it is
        right then. Of another system's files, the ranges that have a CRC-32 are checked.

        Args:
            progress: Called in the calling thread with the number of bytes checked since the last call.

        Returns:
            A report that lists all faults. They are not raised.

        Raises:
            StateError: Another library wrote the files, which have no checksums.
        """
        problems: list[str] = []
        checked = 0
        for nbytes, problem in self._verified():
            if problem:
                problems.append(problem)
            checked += nbytes
            progress(nbytes)
        return VerifyReport(self.url, len(self.manifest.files), checked, tuple(problems))

    def _verified(self) -> Iterator[tuple[int, str]]:
        has_crcs = not self.index.is_own and self.index.crcs is not None
        if not has_crcs:
            self.require_checksums()
        self._enter_process()
        self._engine.check_usable()
        reader = self.index.reader(self._engine, verify=True)
        return verify_crcs(reader) if has_crcs else verify_files(reader, self._engine.io)

    def _enter_process(self) -> None:
        """Open the path again in a forked process, which has no threads of its parent."""
        if self._engine.pid != os.getpid():
            here = _reopened(self._reopen, self.manifest.attempt, self.url)
            self.index, self._engine, self.reader = here.index, here._engine, here.reader

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle how to open the path again."""
        if self._reopen is None:
            raise UsageError(f"{self!r} was not opened with bcp.open and cannot be pickled")
        return _reopened, (self._reopen, self.manifest.attempt, self.url)

    def __repr__(self) -> str:
        """Show the URL, step, number of tensors and size."""
        size = f"{len(self.manifest.tensors)} tensors, {self.manifest.nbytes} bytes"
        return f"<Checkpoint {without_userinfo(self.url)} step={self.step} {size}>"

    def _repr_html_(self) -> str:
        tensors, shards, count = self.manifest.tensors, self.manifest.shards, len(self.manifest.sections)
        of_tensor = np.bincount(tensors.section, minlength=count)
        nbytes = np.bincount(tensors.section[shards.tensor], self.manifest.shard_nbytes, count)
        rows = [
            (section.name, section.kind, int(of_tensor[row]), f"{nbytes[row] / 1e6:,.1f}")
            for row, section in enumerate(self.manifest.sections)
        ]
        title = f"{self.url}: step {self.step}, saved {self.created[:16]} UTC by {self.world_size} rank(s)"
        return html_table(title, ("section", "kind", "tensors", "MB"), rows)


def _renamed(reopen: Callable[[], Checkpoint], rename: Rename) -> Checkpoint:
    return reopen().renamed(rename)


def _reopened(reopen: Callable[[], Checkpoint] | None, attempt: str, url: str) -> Checkpoint:
    """Open a checkpoint in another process. Raises ``CheckpointError`` if the path now holds another one."""
    if reopen is None:
        raise UsageError(f"{url} was opened in another process; open it in this one")
    checkpoint = reopen()
    if checkpoint.manifest.attempt != attempt:
        raise CheckpointError(f"{url} was overwritten after this handle was opened; open it again")
    return checkpoint
