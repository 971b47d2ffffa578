"""Save and resume a Trainer of Lightning: strategies that save what they hold, and ``BcpCheckpointIO``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from threading import Event
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ..api import load, save
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location, Tier
from ..checkpoint.nearest import open_tier
from ..checkpointer import Checkpointer
from ..control.base import SingleProcess
from ..convert.copy import remove
from ..errors import BytecheckpointError, CheckpointNotFoundError, NotACheckpointError
from ..frameworks.data_loader import DataLoaderState, OnLoaderResize
from ..frameworks.per_rank import PerRank
from ..frameworks.rng import RNGState
from ..loading.app_state import AppState
from ..loading.options import LoadOptions
from ..runtime.arguments import options_of
from ..saving.handle import SaveHandle, failure_of
from ..saving.options import SaveOptions
from .own import open_own

_MODEL, _OPTIMIZER, _LOADER, _RNG, _REST = "model", "optimizer", "dataloader", "rng", "lightning"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """How a strategy saves and loads. A mapping of these names to values stands for it.

    Args:
        async_save: Whether training goes on once the state is copied.
        save: How to save: ``SaveOptions``, or a mapping of its fields.
        load: How to load: ``LoadOptions``, or a mapping of its fields.
        storage_options: Options for the storage backend.
        tier: A faster place before the store.
        dataloader_on_resize: What a load does with data loaders at another number of data-parallel ranks: ``"error"``,
            ``"skip"``, so that they begin anew, or an object with ``merge`` and ``split`` (``DataLoaderState``).
    """

    async_save: bool = True
    save: SaveOptions | Mapping[str, Any] | None = None
    load: LoadOptions | Mapping[str, Any] | None = None
    storage_options: Mapping[str, Any] | None = None
    tier: Tier | None = None
    dataloader_on_resize: OnLoaderResize = "error"


class BcpStrategyMixin:
    """Makes a strategy of Lightning save its checkpoints with this library, and load them.

    Write it before the class of the strategy; ``BcpDDPStrategy`` and the like are ready-made. ``ModelCheckpoint`` and
    ``Trainer.save_checkpoint`` decide when to save, where, and what to remove; what they remove is deleted after the
    next save is committed. Every rank saves what it holds: nothing is gathered. A training that resumes, from
    ``Trainer.fit(ckpt_path=...)``, continues exactly, with the random states and a ``StatefulDataLoader``; at another
    number of ranks it continues with ``dataloader_on_resize``. Files and folders that Lightning itself wrote are loaded
    by Lightning.

    Args:
        checkpoints: ``StrategyOptions``, or a mapping of its fields.
        *args: Arguments of the strategy.
        **kwargs: Arguments of the strategy.

    Raises:
        UsageError: ``checkpoints`` is invalid.

    Example:
        >>> trainer = Trainer(strategy=BcpDDPStrategy(), callbacks=[ModelCheckpoint("runs/7b", save_top_k=3)])
        >>> newest = bcp.latest("runs/7b")
        >>> trainer.fit(model, ckpt_path=newest and newest.url)
    """

    model: Any
    optimizers: list[Any]
    lightning_module: Any
    is_global_zero: bool
    broadcast: Any

    def __init__(
        self, *args: Any, checkpoints: StrategyOptions | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = options_of(StrategyOptions, checkpoints, "checkpoints")
        self._handle: SaveHandle | None = None
        self._uploads: dict[str, SaveHandle] = {}  # with a tier: what may not be in the store yet
        self._removals: list[Event] = []  # that follow this save
        self._resumed: Checkpoint | None = None
        self._app: AppState | None = None

    # What it saves.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: ``save_checkpoint`` saves the model itself."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: ``save_checkpoint`` saves the optimizers themselves."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Save what Lightning has collected, with the model, the optimizers, the data loaders and the random states."""
        self._finish()
        rest = {name: one for name, one in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        state: dict[str, Any] = {_MODEL: self._module()}
        if "optimizer_states" in checkpoint:
            rest["loops"], loaders = _without_loaders(rest["loops"])
            if loaders and getattr(self.lightning_module.trainer.fit_loop._data_fetcher, "batches", None):
                _log.warning(
                    "the data loader has no length, so Lightning has read a batch ahead: a resumption skips it"
                )
            state |= {_OPTIMIZER: list(self.optimizers), _RNG: RNGState(), _LOADER: self._loaders(_Held(loaders))}
        state[_REST] = PerRank(rest if self.is_global_zero else {})
        self._handle = save(
            self._location(filepath, storage_options),
            state,
            step=checkpoint["global_step"],
            async_save=self._options.async_save,
            options=self._options.save,
        )
        if self._options.tier is not None:
            self._uploads = {path: one for path, one in self._uploads.items() if not one.is_uploaded()}
            self._uploads[str(filepath)] = self._handle

    def remove_checkpoint(self, filepath: str | PathLike[str]) -> None:
        """Delete a checkpoint as soon as the save in progress is committed; if that fails, the checkpoint stays.

        With a tier, its upload has ended before, and that of the save in progress, too.
        """
        if not self.is_global_zero and (self._options.tier is None or getattr(self, "local_rank", 0) != 0):
            return  # each machine has a tier
        current = self._handle
        if current is None:
            self._remove(filepath)
            return
        self._removals.append(finished := Event())

        def remove(handle: SaveHandle) -> None:
            current.add_uploaded_callback(lambda one: self._remove_after(one, filepath, finished))

        self._uploads.get(str(filepath), current).add_uploaded_callback(remove)

    def teardown(self) -> None:
        """Wait for the save in progress, and for uploads from the tier."""
        cause = sys.exc_info()[1]  # what ended the training
        try:
            self._finish()
            for handle in self._uploads.values() if cause is None else ():
                handle.uploaded()
            _wait_all(self._removals)
        except Exception as error:
            if cause is None:
                raise
            _log.error("the last save failed, too: %s", error)
        finally:
            super().teardown()  # type: ignore[misc]

    # What it loads.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether the model is loaded after it was wrapped."""
        return True

    def load_checkpoint(self, checkpoint_path: str | PathLike[str], weights_only: Any = None) -> dict[str, Any]:
        """Return what Lightning restores itself."""
        self._finish()
        location = self._location(checkpoint_path)
        self._resumed, self._app = open_own(location), None
        if self._resumed is None:
            native: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)  # type: ignore[misc]
            return native
        found: dict[str, Any] = {**self._resumed.tree(_REST), "state_dict": {}}
        if _OPTIMIZER in self._resumed.sections:
            found["optimizer_states"] = [{} for _ in self.optimizers]
        is_training = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        held = _Held([])
        sections = {_MODEL: self._module()}
        if is_training and "optimizer_states" in found:
            sections |= {_OPTIMIZER: list(self.optimizers), _RNG: RNGState(), _LOADER: self._loaders(held)}
        self._app = AppState(sections, late=sections.keys() & {_RNG})
        report = load(
            self._resumed,
            self._app,
            strict=self.lightning_module.strict_loading or {_MODEL: False},
            options=self._options.load,
        )
        _log.info("%s", report)
        if held.states:
            found["loops"]["fit_loop"]["state_dict"]["combined_loader"] = held.states
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002
        """Load the model, unless ``load_checkpoint`` has."""
        if self._resumed is None:
            super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, unless ``load_checkpoint`` has."""
        if self._resumed is None:
            super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the random states before the first step, after the data loaders have drawn their seeds."""
        if self._app is not None:
            self._app.load_late()
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    # Parts.

    def _module(self) -> Any:
        return self.lightning_module if self.model is None else self.model

    def _loaders(self, held: _Held) -> DataLoaderState:
        place = getattr(self, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        return DataLoaderState(
            held, self._options.dataloader_on_resize, dp_rank=place["rank"], dp_size=place["num_replicas"]
        )

    def _location(self, path: str | PathLike[str], storage_options: Any = None) -> Location:
        options = storage_options if storage_options is not None else self._options.storage_options
        return Location(self.broadcast(str(path)), tier=self._options.tier, storage_options=options)

    def _remove_after(self, handle: SaveHandle, path: str | PathLike[str], finished: Event) -> None:
        try:
            if failure_of(handle, uploaded=True) is None:
                self._remove(path)
            else:
                _log.warning("%s stays, because the save after it failed", path)
        except (BytecheckpointError, OSError) as error:
            _log.warning("%s could not be removed: %s", path, error)
        finally:
            finished.set()

    def _remove(self, path: str | PathLike[str]) -> None:
        location = Location(str(path), storage_options=self._options.storage_options)
        if self._options.tier is not None:
            with suppress(CheckpointNotFoundError, NotACheckpointError):
                remove(open_tier(self._options.tier.path, location.open()).url)
        if not self.is_global_zero:
            return
        try:
            remove(location)
        except (CheckpointNotFoundError, NotACheckpointError):  # of Lightning itself
            super().remove_checkpoint(path)  # type: ignore[misc]

    def _finish(self) -> None:
        handle, self._handle = self._handle, None
        try:
            if handle is not None:
                handle.result()
        finally:
            if self._options.tier is None:  # those that follow an upload do not delay training
                _wait_all(self._removals)


class BcpSingleDeviceStrategy(BcpStrategyMixin, SingleDeviceStrategy):
    """``SingleDeviceStrategy`` with ``BcpStrategyMixin``."""


class BcpDDPStrategy(BcpStrategyMixin, DDPStrategy):
    """``DDPStrategy`` with ``BcpStrategyMixin``."""


class BcpModelParallelStrategy(BcpStrategyMixin, ModelParallelStrategy):
    """``ModelParallelStrategy`` with ``BcpStrategyMixin``."""


class BcpCheckpointIO(CheckpointIO):
    """For other strategies: stores what they gather on one process, in this library's format.

    ``Trainer(plugins=[BcpCheckpointIO()])``. Prefer ``BcpStrategyMixin``, which gathers nothing.

    Args:
        save: ``SaveOptions``, or a mapping of its fields.
    """

    def __init__(self, save: SaveOptions | Mapping[str, Any] | None = None) -> None:
        self._save_options = options_of(SaveOptions, save, "save")
        self._alone = Checkpointer(communicator=SingleProcess())  # only one rank calls it

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a checkpoint; returns when it is committed."""
        rest = {name: one for name, one in checkpoint.items() if name != "state_dict"}
        self._alone.save(
            str(path),
            {_MODEL: checkpoint["state_dict"], _REST: rest},
            step=checkpoint["global_step"],
            options=self._save_options,
            storage_options=storage_options,
        )

    def load_checkpoint(
        self, path: str | PathLike[str], map_location: Any = None, weights_only: Any = None
    ) -> dict[str, Any]:
        """Return what was saved, with all tensors in host memory."""
        found = self._alone.open(str(path))
        return {**found.tree(_REST), "state_dict": found.state_dict(_MODEL)}

    def remove_checkpoint(self, path: str | PathLike[str]) -> None:
        """Delete a checkpoint."""
        remove(str(path))


class _Held:
    """States of data loaders, for ``DataLoaderState``: Lightning creates the loaders after it loads."""

    def __init__(self, states: list[Any]) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        return {"states": self.states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.states = state["states"]


def _wait_all(removals: list[Event]) -> None:
    while removals:
        removals.pop().wait()


def _without_loaders(loops: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the state of the loops without that of the training's data loaders, and the latter."""
    fit = dict(loops["fit_loop"])
    fit["state_dict"] = dict(fit["state_dict"])
    loaders = fit["state_dict"].pop("combined_loader", [])
    return {**loops, "fit_loop": fit}, loaders
