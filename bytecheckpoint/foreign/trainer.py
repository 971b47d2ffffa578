"""Read what the Trainer of transformers stores besides the model: optimizer, scheduler, generators, counters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import FormatError
from ..format.values import UnreadObject
from .archives import read_archive
from .building import IndexBuilder
from .naming import EXTRA_SECTION, OPTIMIZER_SECTION
from .pickles import TensorRef
from .place import Place, read_all
from .torch_values import TorchValues

__all__ = ["STATE_KEY", "TrainerState"]

STATE_KEY = "trainer_state.json"
"""The counters, which every checkpoint of a Trainer has."""

_SECTIONS = {
    "optimizer.pt": OPTIMIZER_SECTION,
    "optimizer.bin": OPTIMIZER_SECTION,  # with FSDP
    "scheduler.pt": "lr_scheduler",
    "scaler.pt": "grad_scaler",
}
_RNG_SECTION = "rng"
_RNG = re.compile(r"rng_state(?:_(0|[1-9]\d{0,6}))?\.pth")
_MAX_STATE_BYTES = 256 << 20
_MAX_GENERATOR_BYTES = 1 << 20


class TrainerState:
    """Adds the files of one checkpoint to an index.

    Attributes:
        step: The number of optimizer steps, if it is stored.
        world_size: The number of ranks that stored their random generators.
    """

    def __init__(self, place: Place, builder: IndexBuilder) -> None:
        """Read the files. Raises ``FormatError`` and ``CorruptionError`` for damaged ones."""
        self._place, self._builder = place, builder
        self._values = TorchValues(builder)
        counters = self._read_counters()
        step = counters.get("global_step")
        self.step = step if type(step) is int and step >= 0 else None
        sections = {key: section for key, section in _SECTIONS.items() if key in place.children}
        generators = {int(match[1] or 0): key for key in place.children if (match := _RNG.fullmatch(key))}
        # A node may have only the files of its own ranks.
        if sorted(generators) != list(range(len(generators))):
            generators = {}
        self.world_size = max(len(generators), 1)
        keys = [*sections, *generators.values()]
        found = dict(zip(keys, read_all(lambda key: read_archive(place.backend, key).value, keys), strict=True))
        for key, section in sections.items():
            builder.add_tree(section, self._values.tree(found[key]))
        if generators:
            builder.add_section(_RNG_SECTION, "stateful")
        for rank, key in generators.items():
            builder.add_tree(_RNG_SECTION, self._generators(found[key], rank), rank=rank)
        builder.add_tree(EXTRA_SECTION, counters)

    def _read_counters(self) -> dict[str, Any]:
        where = f"{self._place.backend.url}/{STATE_KEY}"
        try:
            document = json.loads(self._place.backend.get(STATE_KEY, max_size=_MAX_STATE_BYTES))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise FormatError(f"{where} is not a JSON object")
        return document

    def _generators(self, found: Any, rank: int) -> dict[str, Any]:
        """The state of ``bytecheckpoint.RNGState``."""
        found = found if isinstance(found, dict) else {}
        devices = {kind: state for kind, state in found.items() if kind not in ("python", "numpy", "cpu")}
        accelerator: dict[str, Any] = {}
        for kind, state in devices.items():
            states = state if isinstance(state, list) else [state]  # one generator, or those of all devices
            accelerator = {"type": kind, "states": [self._bytes(one) for one in states]}
        return {
            "rank": rank,
            "world_size": self.world_size,
            "python": self._values.tree(found.get("python")),
            "numpy": _numpy_state(found.get("numpy")),
            "torch": self._bytes(found.get("cpu")),
            "accelerator": accelerator,
        }

    def _bytes(self, tensor: Any) -> Any:
        """The contents of a generator's state."""
        is_state = type(tensor) is TensorRef and tensor.is_contiguous and tensor.nbytes <= _MAX_GENERATOR_BYTES
        if not is_state or tensor.dtype.name != "uint8":
            return UnreadObject("no state of a random generator")
        data = bytearray(tensor.nbytes)
        self._place.backend.read_into(tensor.file, tensor.offset, data)
        return np.frombuffer(data, np.uint8)


def _numpy_state(found: Any) -> Mapping[str, Any] | UnreadObject:
    """The named form of what ``numpy.random.get_state()`` returns."""
    if type(found) is not tuple or len(found) != 5 or not isinstance(found[1], np.ndarray):
        return UnreadObject("no state of numpy's random generator")
    kind, key, position, has_gauss, gauss = found
    return {"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": gauss}
