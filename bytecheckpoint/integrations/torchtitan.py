"""Save and resume the trainer of torchtitan: ``BcpCheckpointManager``."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
import tyro
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem

from ..api import latest, load, save
from ..api import open as open_checkpoint
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location
from ..errors import FormatError, UsageError
from ..foreign.dcp import METADATA_KEY
from ..foreign.pickles.interpreter import interpret
from ..format.manifest.envelope import MANIFEST_KEY
from ..frameworks.data_loader import DataLoaderState
from ..frameworks.rng import RNGState
from ..loading.app_state import AppState
from ..loading.options import LoadOptions
from ..manager import CheckpointManager, JobOptions
from ..runtime.arguments import options_of
from ..saving.handle import SaveHandle
from ..saving.options import SaveOptions

OPTIONS = (
    *("create_seed_checkpoint", "enable", "enable_first_step_checkpoint", "exclude_from_loading", "export_dtype"),
    *("folder", "initial_load_in_hf", "initial_load_in_hf_quantized", "initial_load_model_only", "initial_load_path"),
    *("interval", "keep_latest_k", "last_save_in_hf", "last_save_model_only", "load_only", "load_step"),
)
"""The options of ``BaseCheckpointManager.Config``; a release with others has some that this manager ignores."""

_RNG = "rng"
_NAME = "step-{step}"
_FOLDER = re.compile(r"step-(\d+)/")

_log = logging.getLogger(__name__)


class BcpCheckpointManager(BaseCheckpointManager):
    """The checkpoint manager of a torchtitan trainer: ``config.checkpoint = BcpCheckpointManager.Config(...)``.

    All options of torchtitan mean what they mean for its own manager; ``initial_load_in_hf_quantized`` is refused.
    Checkpoints are ``step-N`` below the job's ``folder``, or below ``checkpoints["root"]``. The sections are ``model``,
    ``optimizer``, ``lr_scheduler``, ``dataloader``, ``train_state``, and ``rng``, the random states, which torchtitan
    does not store. On SIGTERM, all ranks save and exit.

    A job resumes from its newest checkpoint, with any parallelism. A ``step-N`` that torchtitan's own manager wrote
    into the folder is resumed in place. At another number of data-parallel ranks, the data loader cannot continue:
    ``dataloader_on_resize="skip"`` lets it begin anew.

    Raises:
        UsageError: ``checkpoints`` is invalid.

    Example:
        >>> config.checkpoint = BcpCheckpointManager.Config(enable=True, interval=500)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The options of torchtitan, and three more."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Training waits for the whole save, for the copy of the state, or not even for all of the copy (``gate``)."""

        dataloader_on_resize: Literal["error", "skip"] = "error"
        """At another number of data-parallel ranks, refuse to load the data loader, or let it begin anew."""

        checkpoints: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Arguments of ``CheckpointManager``, such as ``root``, ``storage_options``, ``save``, ``load`` and ``job``,
        whose options may be mappings; ``allow_fresh`` also begins if saves were made but none of them is valid."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.initial_load_in_hf_quantized:
                raise UsageError("initial_load_in_hf_quantized: quantized blocks are not read; dequantize them first")

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise UsageError("last_save_in_hf: the model has no state_dict_adapter")
        self.save_future: SaveHandle | None = None
        self._config, self._adapter, self._parts, self._loader = config, sd_adapter, list(model_parts), dataloader
        # One list, because several optimizers may belong to one model part.
        self._objects = {MODEL: self._parts, OPTIMIZER: list(optimizers), LR_SCHEDULER: lr_schedulers, **states}
        unknown = {*config.exclude_from_loading} - {*self._sections()}
        if unknown:
            raise UsageError(f"exclude_from_loading names states that do not exist: {sorted(unknown)}")
        given = dict(config.checkpoints)
        root = given.pop("root", None) or filesystem.join(base_folder, config.folder)
        self._root = Location.of(root, given.pop("storage_options", None))
        self._allow_fresh = bool(given.pop("allow_fresh", False))
        self._load_options = options_of(LoadOptions, given.get("load"), "load")
        self._save_options = options_of(SaveOptions, given.pop("save", None), "save")
        if config.async_mode == "async_with_pinned_mem":
            self._save_options = replace(self._save_options, gate=True)
        given["job"] = replace(options_of(JobOptions, given.get("job"), "job"), name_template=_NAME)
        self._manager = CheckpointManager(
            self._root,
            **{
                "cadence": config.interval,
                "keep": config.keep_latest_k or None,
                "async_save": config.async_mode != "disabled",
                "save": self._save_options,
                **given,
            },
        )

    def _sections(self) -> dict[str, Any]:
        sections = {**self._objects, _RNG: RNGState()}
        if self._loader is not None:
            loader, on_resize = self._loader, self._config.dataloader_on_resize
            place = {}
            if isinstance(loader, ParallelAwareDataloader):
                place = {"dp_rank": loader.dp_rank, "dp_size": loader.dp_world_size}
                loader = _PlainLoader(loader)
            sections[DATALOADER] = DataLoaderState(loader, on_resize, **place)
        return sections

    # What it saves.

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - as in the base class
        config = self._config
        if config.load_only:
            return False
        is_model_only = last_step and config.last_save_model_only
        if is_model_only and config.last_save_in_hf:
            self._manager.wait()
            options = replace(self._save_options, layout="whole", gate=False)
            save(self._root.join(_NAME.format(step=curr_step)), self._exported(), step=curr_step, options=options)
            return True
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        state = self._exported if is_model_only else self._sections
        handle = self._manager.save(curr_step, state, force=last_step or is_first)
        self.save_future = handle or self.save_future
        if last_step:
            self._manager.wait()
        return handle is not None

    def _exported(self) -> dict[str, Any]:
        """Return the model as the last save stores it: in another dtype, and for Hugging Face under other names."""
        dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
        model = {
            name: one.to(dtype) if isinstance(one, torch.Tensor) and one.is_floating_point() else one
            for name, one in ModelWrapper(self._parts).state_dict().items()
        }
        return {MODEL: self._adapter.to_hf(model) if self._config.last_save_in_hf else model}

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is not None:
            self.save_future.wait_staged()

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        self.save_future.result()
        self.save_future = None

    def _close(self) -> None:
        if self._config.load_only:
            return  # it has not begun, and another job may save below the root
        # If an exception ends the training, the other ranks are not waited for.
        self._manager.__exit__(*sys.exc_info())

    # What it loads.

    def _load(self, step: int = -1) -> bool:
        found = self._newest() if step == -1 else open_checkpoint(self._root.join(_NAME.format(step=step)))
        if found is None:
            return self._load_initial()
        is_seed = found.url.rstrip("/").endswith(f"/{_NAME.format(step=0)}")
        self._fill(found, model_only=is_seed, can_fall_back=step == -1 and not self._config.load_only)
        return True

    def _newest(self) -> Checkpoint | None:
        native = self._newest_native()
        allow_fresh = self._allow_fresh or native is not None
        if self._config.load_only:
            newest = latest(self._root, allow_fresh=allow_fresh)
        else:
            newest = self._manager.latest(allow_fresh=allow_fresh)
        if native is None or (newest is not None and (newest.step or 0) >= native):
            return newest
        return open_checkpoint(self._root.join(_NAME.format(step=native)))

    def _newest_native(self) -> int | None:
        """Return the step of the newest checkpoint that torchtitan's own manager wrote, in an earlier job."""
        with closing(self._root.open()) as store:
            matches = [match for name in store.list_children("") if (match := _FOLDER.fullmatch(name))]
            for match in sorted(matches, key=lambda one: int(one[1]), reverse=True):
                children = store.list_children(match[0])
                if METADATA_KEY in children and MANIFEST_KEY not in children:
                    return int(match[1])
        return None

    def _load_initial(self) -> bool:
        config = self._config
        path = config.initial_load_path
        if config.initial_load_in_hf:
            if self._adapter is None:
                raise UsageError("initial_load_in_hf: the model has no state_dict_adapter")
            model = ModelWrapper(self._parts)
            state = self._adapter.to_hf(model.state_dict())
            load(path or self._adapter.hf_assets_path, {MODEL: state}, options=self._load_options)
            model.load_state_dict(self._adapter.from_hf(state))
        elif path:
            source = Location.of(path, self._root.storage_options if filesystem.is_remote(path) else None)
            self._fill(open_checkpoint(source), model_only=config.initial_load_model_only)
        else:
            return False
        return True

    def _fill(self, found: Checkpoint, *, model_only: bool, can_fall_back: bool = False) -> None:
        if model_only:
            _log.info("%s", load(found, {MODEL: self._parts}, options=self._load_options))
            return
        excluded, pickled = {*self._config.exclude_from_loading}, None
        is_native = not found.index.is_own and isinstance(self._loader, ParallelAwareDataloader)
        if is_native and DATALOADER not in excluded:
            excluded.add(DATALOADER)
            pickled = _pickled_state(found, self._loader, self._config.dataloader_on_resize)
        app = AppState(
            lambda: {name: one for name, one in self._sections().items() if name not in excluded},
            late=[_RNG],
            optional=[_RNG],
        )
        if can_fall_back and found.index.is_own:
            _log.info("%s", self._manager.resume(app, allow_fresh=self._allow_fresh))
        else:
            _log.info("%s", load(found, app, options=self._load_options))
        if pickled is not None:
            StatefulDataLoader.load_state_dict(self._loader, pickled)
        if isinstance(self._loader, StatefulDataLoader):
            self._loader.state_dict()  # makes the iterator, which draws a seed: before the random states are restored
        app.load_late()


class _PlainLoader:
    """The state of torchtitan's data loader without the pickle that it makes of it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = StatefulDataLoader.state_dict(self._loader)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        StatefulDataLoader.load_state_dict(self._loader, state)


def _pickled_state(found: Checkpoint, loader: Any, on_resize: str) -> Any:
    """Return the state of a data loader that torchtitan's own manager pickled; None if it begins anew."""
    stored = found.tree(DATALOADER)
    if stored.get("world_size") == loader.dp_world_size and loader._rank_id in stored:
        return interpret(stored[loader._rank_id], f"{found.url}: {DATALOADER}")
    if on_resize == "skip":
        return None
    raise FormatError(
        f"{found.url} has the data loaders of {stored.get('world_size')} ranks, not of {loader.dp_world_size}; "
        'with dataloader_on_resize="skip", they begin anew'
    )
