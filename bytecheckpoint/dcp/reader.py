"""``Reader``: the storage reader for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import AnyLocation, Location
from ..checkpointer import session_of
from ..convert.state_dicts import StoredTensorRef
from ..errors import MismatchError
from ..frameworks.tree_paths import value_like
from ..loading.matching import refuse_cast
from ..loading.options import Cast, LoadOptions, LoadRequest
from ..runtime.arguments import options_of
from ..runtime.modes import default_modes
from ..storage_backends import url_text
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from ..tensors.shards import basic_meta, torch_dtype
from .items import is_served
from .stored_items import StoredItems


class Reader(StorageReader):
    """Reads checkpoints of this library for ``torch.distributed.checkpoint``, and verifies every byte.

    Pass it as ``storage_reader`` to ``load`` of ``torch.distributed.checkpoint``. It reads what ``Writer`` and
    ``bytecheckpoint.save`` stored, and everything else that ``bytecheckpoint.open`` opens, at any number of ranks.
    Items have the names that DCP gives the saved state: ``{"model": model, "optim": optimizer}`` is read as
    ``{"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}``. Only requested bytes are read.

    All errors are those of ``bytecheckpoint.errors``; DCP raises them inside a ``CheckpointException``, whose
    ``failures`` has them by rank.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.load(state, storage_reader=bcp.dcp.Reader("runs/7b/step-1000"))
    """

    def __init__(
        self,
        path: AnyLocation,
        *,
        cast: Cast = "widen",
        options: LoadOptions | Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Create a reader. It does no I/O.

        Args:
            path: Local path, URL of any fsspec filesystem, or ``Location``. ``checkpoint_id`` of DCP's functions
                replaces it.
            cast: Which dtype conversions are allowed. "exact": none. "widen": those that keep every value. "any": also
                those that round, as DCP's own reader does.
            options: How to read: ``LoadOptions``, or a mapping of its fields. DCP fills the state, so ``verify``,
                ``allow_pickle`` and ``deadline_s`` have an effect, and others are refused.
            storage_options: Options for the storage backend of a path; a ``Location`` has its own.

        Raises:
            UsageError: An argument is invalid.
        """
        self._request = LoadRequest.of(
            options_of(LoadOptions, options, used=("verify", "allow_pickle", "deadline_s")),
            source=Location.of(path, storage_options),
            cast=cast,
        )
        self.reset()

    # -- the calls of DCP, in their order ------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare to read another checkpoint.

        Args:
            checkpoint_id: Its path or URL; None for the one of the last load.
        """
        if checkpoint_id is not None:
            self._request = replace(self._request, source=replace(self._request.location, url=url_text(checkpoint_id)))
        self._failure: Exception | None = None
        self._opened: tuple[Checkpoint, StoredItems] | None = None
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and describe its items.

        DCP calls it again, with ``rank``, if it has raised, and replaces the second error by an ``AssertionError``.
        So the second call returns no items, and ``set_up_storage_reader`` raises the first error.

        Args:
            *args: Not used.
            **kwargs: DCP passes ``rank`` in its second call.

        Returns:
            The items, with a chunk for each stored box.

        Raises:
            CheckpointError: There is no checkpoint, or it cannot be read.
            StorageError: The store failed.
        """
        if kwargs.get("rank") is not None and self._failure is not None:
            return Metadata({})
        try:
            return self._describe()
        except Exception as error:
            self._failure = error
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's
        """Raise the error of ``read_metadata``, if it failed.

        Args:
            metadata: What ``read_metadata`` has returned.
            is_coordinator: Not used.
            *args: Not used.
            **kwargs: Not used.

        Raises:
            CheckpointError: There is no checkpoint, or it cannot be read.
            StorageError: The store failed.
        """
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is.

        Args:
            plan: The plan of this rank.

        Returns:
            The same plan.
        """
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are.

        Args:
            plans: The plans of all ranks.

        Returns:
            The same plans.
        """
        return plans

    @default_modes()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of this rank, and hand them to the planner after all bytes have been verified.

        Args:
            plan: The plan of this rank.
            planner: The planner, which has the tensors to fill and takes the values.

        Returns:
            A future that is done.

        Raises:
            MismatchError: A tensor of the state has another shape, or a dtype that ``cast`` does not allow.
            CorruptionError: Stored bytes are damaged or missing. Names the file, tensor and byte range.
            StorageError: The store failed.
        """
        checkpoint, stored = self._open()
        tensors = [(item, planner.resolve_tensor(item).detach()) for item in plan.items if not _is_bytes(item)]
        parts = [self._part(checkpoint, stored, item, tensor) for item, tensor in tensors]
        values = [item for item in plan.items if _is_bytes(item)]
        inside: dict[int, torch.Tensor] = {}
        for item in values:
            for row in stored.rows_inside(item.storage_index.fqn):
                meta = checkpoint.manifest.tensors.meta_of(row)
                inside[row] = torch.empty(meta.shape, dtype=torch_dtype(meta))
        parts += [(row, Box.whole(tuple(tensor.shape)), tensor) for row, tensor in inside.items()]
        found = [(item, stored.value(item.storage_index.fqn, inside)) for item in values]
        checkpoint.read(parts)
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        for item, value in found:
            planner.load_bytes(item, _saved(_like_target(planner, item, value)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a storage backend serves a path or URL.

        Args:
            checkpoint_id: The path or URL.

        Returns:
            False if the URL has a scheme that no backend serves.
        """
        return is_served(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path of the checkpoint."""
        return self._request.location.url

    # -- internals -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_failure": None, "_opened": None}

    def _open(self) -> tuple[Checkpoint, StoredItems]:
        if self._opened is None:
            request = self._request
            checkpoint = session_of().open(request.location, verify=request.verify, deadline_s=request.deadline_s)
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._opened = checkpoint, StoredItems.of(checkpoint, rank=rank, allow_pickle=request.allow_pickle)
        return self._opened

    def _describe(self) -> Metadata:
        self._opened = None  # the path may hold another checkpoint than in the last load
        checkpoint, stored = self._open()
        described = {name: _describe_item(checkpoint, item) for name, item in stored.items.items()}
        return Metadata(
            _Described(described, stored),
            stored.paths,
            storage_data={},
            storage_meta=StorageMeta(self.checkpoint_id, load_id=self._load_id),
        )

    def _part(
        self, checkpoint: Checkpoint, stored: StoredItems, item: ReadItem, tensor: torch.Tensor
    ) -> tuple[int, Box, torch.Tensor]:
        fqn, index = item.storage_index.fqn, item.storage_index
        row = stored[fqn].row
        meta = checkpoint.manifest.tensors.meta_of(row)
        origin = index.offset if index.offset is not None else (0,) * len(item.storage_offsets)
        box = Box(tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True)), tuple(item.lengths))
        if tuple(tensor.shape) != box.lengths:
            detail = f"the planner returned a tensor of shape {tuple(tensor.shape)} for the box {box}"
            raise MismatchError(f"{fqn}: {detail}", [("shape", fqn, detail)])
        refusal = refuse_cast(meta, basic_meta(tensor.dtype, meta.shape), self._request.cast)
        if refusal is not None:
            raise MismatchError(f"{fqn} is {refusal} in bytecheckpoint.dcp.Reader", [("dtype", fqn, refusal)])
        return row, box, tensor


class _Described(dict[str, TensorStorageMetadata | BytesStorageMetadata]):
    """The items of a checkpoint, which also has further names of some values, without listing them."""

    def __init__(self, items: Mapping[str, TensorStorageMetadata | BytesStorageMetadata], stored: StoredItems) -> None:
        super().__init__(items)
        self._stored = stored

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name in self._stored)

    def __missing__(self, name: str) -> BytesStorageMetadata:
        if name not in self._stored:
            raise KeyError(name)
        return BytesStorageMetadata()


def _is_bytes(item: ReadItem) -> bool:
    return item.type == LoadItemType.BYTE_IO


def _describe_item(checkpoint: Checkpoint, item: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(item, StoredTensorRef):
        return BytesStorageMetadata()
    manifest = checkpoint.manifest
    meta: BasicMeta = manifest.tensors.meta_of(item.row)
    return TensorStorageMetadata(
        TensorProperties(dtype=torch_dtype(meta)),
        torch.Size(meta.shape),
        [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in manifest.boxes_of(item.row)],
    )


def _saved(value: Any) -> io.BytesIO:
    """Serialize a value in the way in which DCP's planner expects it. The bytes of the checkpoint never get there."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _like_target(planner: LoadPlanner, item: ReadItem, value: Any) -> Any:
    """Give the value the type of the one that it replaces, if DCP's own planner holds it."""
    state = getattr(planner, "state_dict", None)
    name = item.dest_index.fqn
    return value_like(state[name], value, name) if isinstance(state, Mapping) and name in state else value
