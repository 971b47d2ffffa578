"""``Writer``: the storage writer for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..checkpoint.attempts import ATTEMPT_PREFIX, new_attempt, remove_attempt
from ..checkpoint.location import AnyLocation, Location
from ..checkpoint.manifest_file import check_replaceable, commit, remove_files
from ..checkpoint.sweep import remove_files_of
from ..checkpointer import session_of
from ..convert.rewriter import refuse_checkpoint
from ..engine.writing import check_space
from ..errors import (
    CommitUnknownError,
    DisagreementError,
    FormatError,
    PlanError,
    UsageError,
)
from ..format.manifest.envelope import encode
from ..frameworks.tree import CapturedSection
from ..runtime.arguments import check_arguments, options_of
from ..saving.options import SaveOptions, SaveRequest
from ..storage_backends import StorageBackend, url_text
from ..telemetry.trace import Timings
from .items import METADATA_KEY, describe_containers, is_served, resolve_items, top_level_section
from .record import RankRecord, Share, assemble, write_items

_NOTE = "dcp-attempt"
"""Names the attempt while ranks write that use a cached plan, which names an earlier one."""

_ATTEMPT = re.compile(re.escape(ATTEMPT_PREFIX) + r"[A-Za-z0-9-]{1,80}")


class Writer(StorageWriter):
    """Writes what ``torch.distributed.checkpoint`` saves as a checkpoint of this library.

    Pass it as ``storage_writer`` to ``save`` and ``async_save`` of ``torch.distributed.checkpoint``, on every rank with
    the same path. DCP's planner decides which rank writes what. The first key of the nested state dict is the section:
    ``{"model": ..., "optim": ...}`` is loaded with ``bytecheckpoint.load(path, {"model": model, "optim": optimizer})``.
    Tensors at the top level of the state dict are the section ``model``, as if they were below that key.

    The checkpoint appears atomically at the end of the save. If any rank fails, the path holds what it held before;
    files of the attempt are removed at once by the rank that failed, and by the coordinator when its writer is used
    again or is no longer referenced. An existing checkpoint is replaced. With ``use_collectives=False``, the ranks save
    together as in ``bytecheckpoint.save``, over this library's own connections, and DCP plans nothing.

    One instance may serve several saves, one after the other. It can be pickled, for
    ``AsyncCheckpointerType.PROCESS``. All errors are those of ``bytecheckpoint.errors``; DCP raises them inside a
    ``CheckpointException``, whose ``failures`` has them by rank.

    Attributes:
        step: Training step to store with the next checkpoint.
        metadata: Plain values to store with the next checkpoint.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.save({"model": model.state_dict()}, storage_writer=bcp.dcp.Writer("runs/7b/step-1000", step=1000))
    """

    def __init__(
        self,
        path: AnyLocation,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        options: SaveOptions | Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a writer. It does no I/O.

        Args:
            path: Local path, URL of any fsspec filesystem, or ``Location`` without a tier. ``checkpoint_id`` of DCP's
                functions replaces it.
            step: Training step to store with the checkpoint.
            metadata: Plain values to store with the checkpoint. The key ``dcp`` is reserved.
            overwrite: Replace a checkpoint that exists at the path. If False, the save fails.
            options: How to save: ``SaveOptions``, or a mapping of its fields. DCP plans the save, so ``allow_pickle``,
                ``chunk_size`` and ``deadline_s`` have an effect, and others are refused.
            storage_options: Options for the storage backend of a path; a ``Location`` has its own.

        Raises:
            UsageError: An argument is invalid.
        """
        self._location = Location.of(path, storage_options)
        if self._location.tier is not None:
            raise UsageError("bytecheckpoint.dcp.Writer writes to the path itself; pass a Location without a tier")
        self._options = options_of(SaveOptions, options, used=("allow_pickle", "chunk_size", "deadline_s"))
        self._overwrite = overwrite
        self.step, self.metadata = step, check_arguments({"metadata": metadata})["metadata"]
        self._fix_request()
        self._remove: weakref.finalize[[StorageBackend, str, int], Writer] | None = None
        self._unsaved: tuple[SavePlan, SavePlanner] | None = None
        self._begin()

    # -- the calls of DCP, in their order ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another checkpoint.

        Args:
            checkpoint_id: Its path or URL; None for the one of the last save.
        """
        if checkpoint_id is not None:
            self._location = dataclasses.replace(self._location, url=url_text(checkpoint_id))
        self._begin()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's
        """Begin a save on this rank; the coordinator checks the path.

        Args:
            is_coordinator: Whether this rank coordinates the save.
            *args: Not used.
            **kwargs: DCP passes ``rank`` and ``use_collectives``.

        Raises:
            UsageError: The save would overwrite a file of another program.
            KeyExistsError: There is a checkpoint, and the writer does not overwrite it.
            StorageError: The store failed.
        """
        self._begin()
        self._fix_request()
        self._rank = int(kwargs.get("rank") or 0)
        self._uses_collectives = bool(kwargs.get("use_collectives", True))
        if is_coordinator and self._uses_collectives:
            check_replaceable(self._backend())
            if not self._overwrite:
                refuse_checkpoint(self._backend())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Args:
            plan: The plan of this rank.

        Returns:
            The same plan.
        """
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: check that there is space, and name the attempt into which all write.

        Args:
            plans: The plans of all ranks.

        Returns:
            The plans, with what each rank needs to know in ``storage_data``.

        Raises:
            StorageError: The store failed, or has too little space.
        """
        if not self._uses_collectives:
            return plans
        backend = self._backend()
        nbytes = sum(_nbytes(item) for plan in plans for item in plan.items)
        check_space(backend, nbytes)
        attempt = new_attempt()
        self._attempt = attempt
        self._remove = weakref.finalize(self, _remove_attempt, backend, attempt, os.getpid())
        if not all(plan.usable for plan in plans):
            backend.put(_NOTE, attempt.encode())
        share = Share(backend.url, attempt, top_level_section(plans), self._request().chunk_size_for(nbytes))
        return [dataclasses.replace(plan, storage_data=dataclasses.replace(share)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Without collectives, only keep them for ``finish``.

        Args:
            plan: The plan of this rank.
            planner: The planner, which has the data.

        Returns:
            A future that is done: a result for each item.

        Raises:
            StateError: An item cannot be stored.
            PlanError: The planner has lost what ``prepare_global_plan`` added to the plan.
            DisagreementError: The coordinator's writer has another path.
            StorageError: The store failed.
        """
        done: Future[list[WriteResult]] = Future()
        record: RankRecord | None = None
        if self._uses_collectives:
            backend = self._backend()
            share = self._share_of(plan, backend)
            sections = resolve_items(plan, planner, share.top_level)
            engine, request = session_of().engine, self._request()
            engine.check_usable()
            with engine.track_call():
                record = write_items(
                    backend,
                    engine,
                    sections,
                    share,
                    Timings("save", self._rank, backend.url),
                    allow_pickle=request.allow_pickle,
                    deadline_s=request.deadline_s,
                )
        else:
            self._unsaved = (plan, planner)
        # The record of the rank travels with its first item.
        results = [WriteResult(item.index, _nbytes(item), None) for item in plan.items]
        if results:
            results[0] = dataclasses.replace(results[0], storage_data=record)
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint. DCP calls it on the coordinator, or without collectives on every rank.

        Args:
            metadata: The metadata that the planner made; gets ``storage_meta``.
            results: What ``write_data`` has returned, by rank.

        Raises:
            PlanError: The ranks did not write into one attempt, or their items overlap, leave a hole, exceed their
                tensor or describe it differently.
            StorageError: The store failed, and nothing was committed.
            CommitUnknownError: The checkpoint may or may not exist.
            ControlError: Without collectives, the ranks could not work together.
        """
        is_flattened = metadata.planner_data is not None
        if not self._uses_collectives:
            self._save_together(is_flattened=is_flattened)
        else:
            self._commit(results, is_flattened=is_flattened)
        metadata.storage_meta = self.storage_meta()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a storage backend serves a path or URL.

        Args:
            checkpoint_id: The path or URL.

        Returns:
            False if the URL has a scheme that no backend serves.
        """
        return is_served(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return what planners may know of the save.

        Returns:
            The path, and an id that no other save has.
        """
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint."""
        return self._location.url

    # -- internals -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_remove": None, "_unsaved": None}

    def _begin(self) -> None:
        """Forget the last save. The coordinator removes what it wrote, unless it was committed."""
        if self._remove is not None:
            self._remove()
        self._remove, self._unsaved, self._attempt = None, None, ""
        self._rank, self._uses_collectives = 0, True
        self._save_id = str(uuid.uuid4())

    def _backend(self) -> StorageBackend:
        return self._location.open()

    def _fix_request(self) -> None:
        """Keep what the attributes state now: those of the next save may be set before this one ends."""
        self._stated = self.step, check_arguments({"metadata": self.metadata})["metadata"]
        if METADATA_KEY in self.metadata:
            raise UsageError(f"the key {METADATA_KEY!r} of metadata is reserved; use another one")
        self._request()

    def _request(self, top_level: str = "", *, is_flattened: bool = True) -> SaveRequest:
        """Return the save, validated."""
        step, metadata = self._stated
        metadata = {**metadata, METADATA_KEY: {"top_level": top_level, "flattened": is_flattened}}
        return SaveRequest.of(self._options, location=self._location, step=step, metadata=metadata)

    def _share_of(self, plan: SavePlan, backend: StorageBackend) -> Share:
        share = plan.storage_data
        if not isinstance(share, Share):
            raise PlanError(
                f"the planner returned a plan without the storage_data that the Writer had added, but with {share!r}; "
                f"let finish_plan keep it (dataclasses.replace)"
            )
        if share.used:
            attempt = backend.get(_NOTE).decode()
            if not _ATTEMPT.fullmatch(attempt):
                raise PlanError(f"{self._location}/{_NOTE} does not name an attempt: {attempt!r:.80}; remove it")
            return dataclasses.replace(share, attempt=attempt)
        if share.url != backend.url:
            raise DisagreementError(
                f"the Writer of the coordinator has the path {share.url}, that of rank {self._rank} {backend.url}; "
                f"pass the same path on all ranks"
            )
        share.used = True
        return share

    def _commit(self, results: Sequence[Sequence[WriteResult]], *, is_flattened: bool) -> None:
        assert self._remove is not None
        backend = self._backend()
        records = [(rank, of_rank[0].storage_data) for rank, of_rank in enumerate(results) if of_rank]
        for rank, record in records:
            if not isinstance(record, RankRecord):
                raise PlanError(f"rank {rank} did not write with a bytecheckpoint.dcp.Writer, but returned {record!r}")
        top_level = next((record.top_level for _, record in records if record.top_level in record.leaves), "")
        options = self._request(top_level, is_flattened=is_flattened)
        timings = Timings("save", self._rank, backend.url)
        with timings.step("commit"):
            manifest = assemble(backend, self._attempt, records, options, timings, world_size=len(results))
            try:
                data = encode(manifest)
            except FormatError as error:
                self._remove()
                raise PlanError(
                    f"the items of all ranks are not those of whole tensors: {error}; let create_global_plan remove "
                    f"replicas and check the plans, as DefaultSavePlanner does"
                ) from error
            try:
                replaced = commit(backend, data, may_replace=self._overwrite)
            except CommitUnknownError:
                self._remove.detach()
                raise
        self._remove.detach()
        with timings.step("clean"):
            remove_files(backend, [_NOTE])
            if replaced is not None:
                remove_files_of(backend, replaced)

    def _save_together(self, *, is_flattened: bool) -> None:
        """Save the items of all ranks as ``bytecheckpoint.save`` does: it plans, writes and commits."""
        assert self._unsaved is not None
        (plan, planner), self._unsaved = self._unsaved, None
        top_level = top_level_section([plan])

        def make_state() -> dict[str, Any]:
            if self._rank == 0 and not self._overwrite:
                refuse_checkpoint(self._backend())
            sections = resolve_items(plan, planner, top_level, compare=True)
            for section, items in sections.items():
                items.source.values.update(describe_containers(section, items.leaves))
            return {section: CapturedSection(items.source) for section, items in sections.items()}

        request = self._request(top_level, is_flattened=is_flattened)
        session_of().save(lambda: request, make_state, is_async=False, deadline_s=request.deadline_s)


def _remove_attempt(backend: StorageBackend, attempt: str, pid: int) -> None:
    if os.getpid() == pid:  # and not a forked child that drops its copy of the writer
        remove_attempt(backend, attempt)
        remove_files(backend, [_NOTE])


def _nbytes(item: WriteItem) -> int:
    """Bytes of a tensor item; 0 for another one, whose size is not known before it is encoded."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
