"""The state of an ``Accelerator``: ``state_of``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper

from ..frameworks.rng import RNGState
from ..loading.app_state import AppState


def state_of(accelerator: Accelerator) -> AppState:
    """Return the state of everything that an ``Accelerator`` has prepared or registered, also later than this.

    It takes the place of ``save_state`` and ``load_state``, for any sharding and any number of processes: pass it to
    ``save``, ``load`` or a ``CheckpointManager``. The sections are ``model``, ``optimizer`` and ``lr_scheduler``
    (further ones ``model_1`` and so on), ``scaler``, the registered objects (``custom``, ``custom_1``), the position in
    gradient accumulation (``accelerator``), and the random states, which are late: a loader draws numbers until it
    returns its first batch.

    Data loaders are not part of it: those that Accelerate prepares read one batch ahead of what was consumed. Skip
    batches with ``accelerator.skip_first_batches``, or see ``docs/data-loaders.md``.

    Args:
        accelerator: The accelerator; ``prepare`` may be called before or after this.

    Returns:
        The state.

    Example:
        >>> app = state_of(accelerator)
        >>> manager.resume(app)
        >>> for batch in accelerator.skip_first_batches(loader, consumed):
        ...     app.load_late()  # does nothing from the second time on
        ...     train_step(batch)
    """
    return AppState(lambda: _sections(accelerator), late=["rng"], optional=["scaler"])


class _Accumulation:
    """How many batches of the current accumulation were consumed."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._accelerator.step = state["step"]


def _sections(accelerator: Accelerator) -> dict[str, Any]:
    schedulers = [one for one in accelerator._schedulers if not isinstance(one, DeepSpeedSchedulerWrapper)]
    if len(schedulers) < len(accelerator._schedulers):  # a wrapper has no state; DeepSpeed's engine has the scheduler
        schedulers += [engine.lr_scheduler for engine in accelerator._models]
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    return {
        **_named("model", accelerator._models),
        **_named("optimizer", accelerator._optimizers),
        **_named("lr_scheduler", schedulers),
        **_named("custom", accelerator._custom_objects),
        **_named("scaler", scaler),
        "accelerator": _Accumulation(accelerator),
        "rng": RNGState(),
    }


def _named(name: str, objects: Iterable[Any]) -> dict[str, Any]:
    return {name if number == 0 else f"{name}_{number}": one for number, one in enumerate(objects)}
