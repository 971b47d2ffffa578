"""Save and resume a Trainer of transformers or TRL: ``BcpTrainer`` and ``BcpTrainerMixin``."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper

from ..api import load
from ..api import open as open_checkpoint
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.discovery import BestMode
from ..checkpoint.location import Location
from ..errors import FormatError, UsageError
from ..format.hf_index import ADAPTER_SECTION
from ..frameworks.per_rank import PerRank
from ..frameworks.rng import RNGState
from ..loading.app_state import AppState
from ..manager import CheckpointManager, JobOptions, Retention
from ..runtime.arguments import options_of
from ..saving.companions import has_adapter
from ..saving.options import SaveOptions
from .own import open_own

_TRAINER = "trainer"
_BEST = "best"
_NAME = "checkpoint-{step}"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_INCOMPLETE = "checkpoint-is-incomplete.txt"
_STATE = "trainer_state.json"

_log = logging.getLogger(__name__)


class BcpTrainerMixin:
    """Makes a Trainer save its checkpoints with this library, and resume from them.

    Write it before the class of the Trainer: ``class MyTrainer(BcpTrainerMixin, SFTTrainer): ...``. The Trainer decides
    when to save, and ``save_total_limit``, ``load_best_model_at_end`` and ``save_only_model`` mean what they mean
    there. Its own state, and whatever files a subclass writes next to it, are stored with the model. On SIGTERM, all
    processes save and exit.

    ``train(resume_from_checkpoint=True)`` resumes from the newest checkpoint, at any number of processes, or begins if
    nothing was ever saved. Folders that the Trainer itself wrote are resumed by the Trainer.

    Args:
        checkpoints: Arguments of ``CheckpointManager``, among them the ``root``, which by default is
            ``args.output_dir``, and ``save`` and ``load``, whose options may be mappings, as in a file of settings.
            ``allow_fresh=True`` also begins if saves were made but none of them is valid.
        *args: Arguments of the Trainer.
        **kwargs: Arguments of the Trainer.

    Raises:
        UsageError: ``checkpoints`` is invalid, or the Trainer would push checkpoints to a hub while it trains.

    Example:
        >>> trainer = BcpTrainer(model, args, train_dataset=data, checkpoints={"root": "s3://runs/7b"})
        >>> trainer.train(resume_from_checkpoint=True)
    """

    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    is_deepspeed_enabled: bool

    def __init__(self, *args: Any, checkpoints: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._manager: CheckpointManager | None = None
        self._resumed: Checkpoint | None = None
        self._app: AppState | None = None
        self._folder: str | None = None  # where the Trainer writes and looks for its folders while it trains
        self._saved_step: int | None = None
        self._is_collecting = False
        super().__init__(*args, **kwargs)
        given = dict(checkpoints or {})
        self._root = Location.of(given.pop("root", None) or self.args.output_dir, given.pop("storage_options", None))
        self._allow_fresh = bool(given.pop("allow_fresh", False))
        save = options_of(SaveOptions, given.get("save"), "save")
        self._writes_adapter = save.layout == "whole" and has_adapter(self.model)
        if self._writes_adapter:  # what the Trainer itself saves of such a model
            given["save"] = replace(save, trainable_only=True)
        given["job"] = replace(options_of(JobOptions, given.get("job"), "job"), name_template=_NAME)
        self._options = given
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise UsageError(
                f"hub_strategy={self.args.hub_strategy} pushes checkpoint folders, which are no model folders here; "
                "use hub_strategy='end', or export a checkpoint with bcp export"
            )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, as ``Trainer.train``."""
        with self._new_manager() as self._manager, TemporaryDirectory() as folder, TemporaryDirectory() as resumed:
            try:
                path = self._resume_path(resume_from_checkpoint, resumed)
                self._folder = folder
                return super().train(path, *args, **kwargs)  # type: ignore[misc]
            finally:
                self._resumed = self._app = self._manager = self._folder = None

    def _new_manager(self) -> CheckpointManager:
        given = dict(self._options)
        limit = self.args.save_total_limit
        if "keep" not in given and limit and self.args.metric_for_best_model:
            mode: BestMode = "max" if self.args.greater_is_better else "min"
            given["keep"] = Retention(last=limit, best=1, metric=_BEST, mode=mode)
        elif "keep" not in given:
            given["keep"] = limit
        return CheckpointManager(self._root, **given)

    def _resume_path(self, requested: Any, folder: str) -> str | None:
        """Return the folder that the Trainer reads; one below ``folder`` for a checkpoint of this library."""
        assert self._manager is not None
        native = _newest_native(self.args.output_dir) if requested is True else None
        # Also where nothing is resumed: the manager begins to handle signals.
        newest = self._manager.latest(allow_fresh=self._allow_fresh or native is not None or not requested)
        if not requested:
            return None
        if requested is True and (newest is None or (native is not None and native[0] > (newest.step or 0))):
            if native is None:
                _log.warning("there is no checkpoint below %s: training begins", self._root)
            return None if native is None else native[1]
        self._resumed = newest if requested is True else open_own(Location.of(requested, self._root.storage_options))
        if self._resumed is None:
            return str(requested)
        path = Path(folder, _NAME.format(step=self._resumed.step))
        path.mkdir()
        for name, data in self._resumed.tree(_TRAINER).items():
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise FormatError(
                    f"{self._resumed.url}: {name!r} in its section {_TRAINER!r} is not the name of a file"
                )
            Path(path, name).write_bytes(data)
        return str(path)

    # What the Trainer saves.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None or self._manager is None:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        self._saved_step = self.state.global_step
        is_best = self.state.best_global_step == self.state.global_step and self.state.best_metric is not None
        self._manager.save(
            self.state.global_step,
            lambda: self._saved_state(model),
            metrics={_BEST: float(self.state.best_metric)} if is_best else None,
            force=True,
        )

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)  # type: ignore[misc]
        # After a signal, it saves. A second call for one step would wait until the first one's save is committed.
        if self._manager is not None and self._saved_step != self.state.global_step:
            self._manager.save(self.state.global_step, lambda: self._saved_state(model))

    def _saved_state(self, model: Any) -> Mapping[str, Any]:
        return {**self._sections(), _TRAINER: PerRank(self._trainer_files(model))}  # only rank 0 has some

    def _sections(self, stored: Checkpoint | None = None) -> dict[str, Any]:
        sections: dict[str, Any] = {self._model_section(stored): self.model_wrapped}
        if self.args.save_only_model:
            return sections
        scheduler, scaler = self.lr_scheduler, getattr(self.accelerator, "scaler", None)
        if isinstance(scheduler, DeepSpeedSchedulerWrapper):
            scheduler = self.model_wrapped.lr_scheduler
        sections |= {"optimizer": self.optimizer, "rng": RNGState()}
        return sections | {
            name: one for name, one in (("lr_scheduler", scheduler), ("scaler", scaler)) if one is not None
        }

    def _model_section(self, stored: Checkpoint | None) -> str:
        """Return the name of the model's section in a checkpoint, or in the next one."""
        is_adapter = self._writes_adapter if stored is None else ADAPTER_SECTION in stored.sections
        return ADAPTER_SECTION if is_adapter else "model"

    def _trainer_files(self, model: Any) -> dict[str, bytes]:
        """Let the Trainer and its subclasses write their own files into an empty folder, and return them."""
        assert self._folder is not None
        path = Path(self._folder, _NAME.format(step=self.state.global_step))
        path.mkdir()
        self._is_collecting = True
        try:
            super()._save_checkpoint(model, None)  # type: ignore[misc]
            self._name_best()  # the Trainer has looked for it in the folder
            if self.args.should_save:
                self.state.save_to_json(str(path / _STATE))
            return {one.name: one.read_bytes() for one in path.iterdir() if one.is_file()}
        finally:
            self._is_collecting = False
            shutil.rmtree(path)

    def _get_output_dir(self, trial: Any) -> str:
        if trial is None and self._folder is not None:
            return self._folder
        directory: str = super()._get_output_dir(trial)  # type: ignore[misc]
        return directory

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model for ``from_pretrained``, as ``Trainer.save_model``."""
        if not self._is_collecting:
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_collecting:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        if not self._is_collecting:
            super()._save_scaler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        if not self._is_collecting:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    # What the Trainer loads.

    def _prepare_for_training(self, max_steps: Any, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        path = None if self._resumed is not None else resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, path)  # type: ignore[misc]
        if self._resumed is not None:
            self._app = AppState(lambda: self._sections(self._resumed), late=["rng"], optional=["rng", "scaler"])
            _log.info("%s", load(self._resumed, self._app, options=self._options.get("load")))
            # For the files of subclasses; the Trainer itself finds nothing in the folder, and expects no file there
            # unless DeepSpeed is enabled.
            is_enabled, self.is_deepspeed_enabled = self.is_deepspeed_enabled, False
            try:
                self._load_optimizer_and_scheduler(resume_from_checkpoint)  # type: ignore[attr-defined]
            finally:
                self.is_deepspeed_enabled = is_enabled
            self._name_best()
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._app is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            self._app.load_late()

    def _load_best_model(self) -> None:
        assert self._manager is not None
        self._manager.wait()
        best = open_checkpoint(self._best())
        load(best, {self._model_section(best): self.model_wrapped}, options=self._options.get("load"))

    def _name_best(self) -> None:
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(self._best())

    def _best(self) -> Location:
        return self._root.join(_NAME.format(step=self.state.best_global_step))


class BcpTrainer(BcpTrainerMixin, transformers.Trainer):
    """The Trainer of transformers with ``BcpTrainerMixin``."""


def _newest_native(folder: str) -> tuple[int, str] | None:
    """Return the step and the path of the newest checkpoint that the Trainer itself wrote completely."""
    found: list[tuple[int, str]] = []
    for path in Path(folder).glob("checkpoint-*"):
        match = _FOLDER.fullmatch(path.name)
        if match and (path / _STATE).is_file() and not (path / _INCOMPLETE).exists():
            found.append((int(match[1]), str(path)))
    return max(found, default=None)
