"""The state of this process's random number generators."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ..errors import StateError
from ..runtime.arguments import check_choice
from ..runtime.modes import default_modes

OnRNGResize = Literal["reseed", "lowest", "error"]

_CPU_GENERATORS = ("python", "numpy", "torch")

_log = logging.getLogger(__name__)

ByteArray = npt.NDArray[np.uint8]


class RNGState:
    """The global generators of Python, numpy and torch, and those of every accelerator that the process has used.

    Each rank saves its own state. At the saved world size, each rank restores exactly that state. The generators are
    process-wide, so no other thread may draw numbers during a save or a load.

    Args:
        on_resize: What a load does at another world size. ``reseed`` derives new streams from rank 0's stored state,
            the rank and the world size: ranks draw different numbers, and a repeated load draws the same numbers again.
            ``lowest`` restores the streams of rank 0 on every rank. ``error`` fails.
        rank: This process's rank; by default, its rank in the default process group.
        world_size: The number of ranks; by default, the size of the default process group.

    Attributes:
        on_resize: The policy, as passed to the constructor.
        resumed: What the last load did with each generator (``python``, ``numpy``, ``torch``, ``cuda:0``, ...).

    Raises:
        UsageError: ``on_resize`` is not a known policy.

    Example:
        >>> bcp.save(path, {"model": model, "rng": bcp.RNGState()})
    """

    def __init__(
        self,
        on_resize: OnRNGResize = "reseed",
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_choice("on_resize", on_resize, OnRNGResize)
        self.on_resize: OnRNGResize = on_resize
        self._rank, self._world_size = rank, world_size
        self.resumed: dict[str, tuple[str, str]] = {}

    @default_modes()
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators as plain values and arrays, without drawing from any of them.

        Returns:
            This rank and the world size, and the states of the generators by library.
        """
        rank, world_size = self._place()
        return {
            "rank": rank,
            "world_size": world_size,
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": _to_array(torch.get_rng_state()),
            "accelerator": _accelerator_states(),
        }

    @default_modes()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the generators from what ``state_dict`` returned.

        The policy applies if the stored rank or world size differs from this process's. If this process has other
        accelerators than the one that saved, ``error`` fails, and the other policies restore those that match and log
        a warning.

        Args:
            state_dict: The stored state.

        Raises:
            StateError: ``state_dict`` is not the state of an ``RNGState``, numpy's global generator is of another type,
                or ``on_resize`` is ``error`` and the rank, the world size or the accelerators differ.
        """
        missing = {"rank", "world_size", "python", "numpy", "torch"} - set(state_dict)
        if missing:
            raise StateError(f"this is not the state of an RNGState: it lacks {', '.join(sorted(missing))}")
        rank, world_size = self._place()
        saved = (state_dict["rank"], state_dict["world_size"])
        if self.on_resize == "error" and saved != (rank, world_size):
            raise StateError(
                f"RNG state of rank {saved[0]} of {saved[1]} loaded on rank {rank} of {world_size}; pass "
                f"RNGState(on_resize='reseed') to derive new streams"
            )
        if self.on_resize == "reseed" and saved != (rank, world_size):
            _reseed(state_dict, rank, world_size)
            new = ("reseeded", f"rank {rank} of {world_size}, from the streams of rank {saved[0]} of {saved[1]}")
            self.resumed = dict.fromkeys((*_CPU_GENERATORS, *_device_names(*_accelerators())), new)
            return
        random.setstate(_python_state(state_dict["python"]))
        _restore_numpy(state_dict["numpy"])
        torch.set_rng_state(torch.as_tensor(state_dict["torch"], dtype=torch.uint8))
        devices = _restore_accelerators(state_dict.get("accelerator") or {}, exact=self.on_resize == "error")
        detail = f"rank {saved[0]} of {saved[1]}"
        self.resumed = dict.fromkeys((*_CPU_GENERATORS, *devices), ("continued", detail))
        others = set(_device_names(*_accelerators())) - set(devices)
        self.resumed.update(dict.fromkeys(sorted(others), ("unchanged", "no state of this device was stored")))

    def _place(self) -> tuple[int, int]:
        """Rank and world size."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = self._rank if self._rank is not None else (torch.distributed.get_rank() if distributed else 0)
        if self._world_size is not None:
            return rank, self._world_size
        return rank, torch.distributed.get_world_size() if distributed else 1


def _python_state(state: Any) -> tuple[Any, ...]:
    version, numbers, gauss = state
    return version, tuple(numbers), gauss


def _restore_numpy(state: Mapping[str, Any]) -> None:
    here = np.random.get_state(legacy=False)["bit_generator"]
    if here != state["bit_generator"]:
        raise StateError(
            f"numpy's global generator was a {state['bit_generator']} when saving and is a {here} now; call "
            f"numpy.random.set_bit_generator(numpy.random.{state['bit_generator']}()) before loading"
        )
    np.random.set_state(dict(state))


def _seed_numpy(seeds: np.random.SeedSequence) -> None:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is np.random.MT19937:
        np.random.seed(seeds.generate_state(8).tolist())
    else:
        # RandomState.seed works for MT19937 only.
        generator.state = type(generator)(seeds).state


def _to_array(state: torch.Tensor) -> ByteArray:
    array: ByteArray = state.cpu().numpy().copy()
    return array


def _accelerators() -> tuple[str, int]:
    """The type and the number of this process's accelerators; empty and 0 if there are none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (device.type, torch.accelerator.device_count()) if device is not None else ("", 0)


def _device_names(kind: str, count: int) -> list[str]:
    return [f"{kind}:{index}" for index in range(count)]


def _accelerator_states() -> dict[str, Any]:
    """The states of all accelerators; empty if the process has not used them."""
    kind, count = _accelerators()
    if not kind:
        return {}
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)() or not hasattr(module, "get_rng_state"):
        return {}
    return {"type": kind, "states": [_to_array(module.get_rng_state(index)) for index in range(count)]}


def _restore_accelerators(stored: Mapping[str, Any], *, exact: bool) -> list[str]:
    """Restore the generators of those devices that this process has. Returns their names."""
    if not stored:
        return []
    kind, count = _accelerators()
    states = stored["states"]
    if kind != stored["type"] or count != len(states):
        here = f"{count} {kind}" if kind else "no accelerator"
        message = f"the generators of {len(states)} {stored['type']} device(s) were stored, but this process has {here}"
        if exact:
            raise StateError(f"{message}; pass RNGState(on_resize='reseed') to load what fits")
        _log.warning("%s; only matching generators are restored", message)
    if kind != stored["type"]:
        return []
    module = torch.get_device_module(kind)
    for index, state in enumerate(states[:count]):
        module.set_rng_state(torch.as_tensor(state, dtype=torch.uint8), index)
    return _device_names(kind, min(count, len(states)))


def _reseed(state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Derive seeds from the next numbers of the stored streams, the rank and the world size."""
    python = random.Random()
    python.setstate(_python_state(state["python"]))
    generator = torch.Generator()
    generator.set_state(torch.as_tensor(state["torch"], dtype=torch.uint8))
    drawn = torch.randint(2**62, (2,), generator=generator).tolist()
    seeds = np.random.SeedSequence([python.getrandbits(64), *drawn, rank, world_size]).generate_state(4, np.uint64)
    random.seed(int(seeds[0]))
    _seed_numpy(np.random.SeedSequence(int(seeds[1])))
    # This also seeds every accelerator, including those that are initialized later.
    torch.manual_seed(int(seeds[2]))
