"""What the Trainer of transformers and ``Accelerator.save_state`` write, apart from a model in one piece."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import FormatError
from ..format.values.types import UnreadObject
from .building import IndexBuilder
from .dcp import DcpFolder
from .naming import EXTRA_SECTION, MODEL_SECTION, OPTIMIZER_SECTION, sections_of
from .pickles.records import TensorRef
from .source_path import SourcePath, read_json
from .torch_values import TorchValues, read_small

_STATE = "trainer_state.json"
"""The counters, which every checkpoint of a Trainer has."""

_TRAINER_FILES = {
    "optimizer.pt": OPTIMIZER_SECTION,
    "optimizer.bin": OPTIMIZER_SECTION,  # with FSDP
    "scheduler.pt": "lr_scheduler",
    "scaler.pt": "grad_scaler",
}
_TRAINER_RNG = re.compile(r"rng_state(?:_(0|[1-9]\d{0,6}))?\.pth")

# The names of the sections are those of ``integrations.accelerate.state_of``.
_ACCELERATE_SECTIONS = {
    "optimizer": OPTIMIZER_SECTION,
    "scheduler": "lr_scheduler",
    "scaler": "scaler",
    "dl_state_dict": "dataloader",
    "custom_checkpoint": "custom",
}
_ACCELERATE_FILE = re.compile(
    r"(optimizer|scheduler|dl_state_dict|custom_checkpoint|scaler)(?:_(0|[1-9]\d{0,6}))?\.(?:bin|pkl|pt)"
)
_ACCELERATE_RNG = re.compile(r"random_states_(0|[1-9]\d{0,6})\.pkl")
_ACCELERATE_DEVICE = re.compile(r"torch_(\w+)_manual_seed")

SHARDED_MODEL = "pytorch_model_fsdp_0/"
"""The folder of DCP in which accelerate stores a sharded model."""

_SHARDED = re.compile(r"(pytorch_model_fsdp|optimizer)_(0|[1-9]\d{0,6})/")
_SHARDED_SECTIONS = {"pytorch_model_fsdp": MODEL_SECTION, "optimizer": OPTIMIZER_SECTION}
_RNG_SECTION = "rng"
_MAX_STATE_BYTES = 256 << 20
_MAX_GENERATOR_BYTES = 1 << 20


class TrainingFiles:
    """Adds the files of a training to an index: none, if the folder holds only a model.

    Attributes:
        system: What wrote them; None if there are none.
        step: The number of optimizer steps, if it is stored.
        world_size: The number of ranks that stored their random generators.
    """

    system: str | None = None
    step: int | None = None
    world_size = 1

    def __init__(self, source: SourcePath, builder: IndexBuilder) -> None:
        """Read the files. Raises ``FormatError`` and ``CorruptionError`` for damaged ones."""
        self._source, self._builder, self._values = source, builder, TorchValues(builder)
        for match in filter(None, map(_SHARDED.fullmatch, source.children)):
            self._add_sharded(match[0].rstrip("/"), _SHARDED_SECTIONS[match[1]], int(match[2]))
        if _STATE in source.children:
            self.system = "transformers"
            self._add_trainer()
        elif any(map(_ACCELERATE_RNG.fullmatch, source.children)):
            self.system = "accelerate"
            self._add_accelerate()

    def _add_sharded(self, folder: str, section: str, number: int) -> None:
        if not self._builder.has_section(_numbered(section, number)):
            tree = DcpFolder(self._source.below(folder)).tree(self._builder)
            self._builder.add_tree(_numbered(section, number), sections_of(tree)[section])

    def _add_trainer(self) -> None:
        counters = read_json(self._source.backend, _STATE, _MAX_STATE_BYTES)
        if not isinstance(counters, dict):
            raise FormatError(f"{self._source.backend.url}/{_STATE} is not a JSON object")
        step = counters.get("global_step")
        self.step = step if type(step) is int and step >= 0 else None
        self._add({key: section for key, section in _TRAINER_FILES.items() if key in self._source.children})
        for rank, found in enumerate(self._of_ranks(_TRAINER_RNG)):
            devices = {kind: state for kind, state in found.items() if kind not in ("python", "numpy", "cpu")}
            self._add_generators(rank, found.get("python"), found.get("numpy"), found.get("cpu"), devices)
        self._builder.add_tree(EXTRA_SECTION, counters)

    def _add_accelerate(self) -> None:
        self._add(
            {
                file[0]: _numbered(_ACCELERATE_SECTIONS[file[1]], int(file[2] or 0))
                for file in filter(None, map(_ACCELERATE_FILE.fullmatch, self._source.children))
            }
        )
        for rank, found in enumerate(self._of_ranks(_ACCELERATE_RNG)):
            devices = {match[1]: found[key] for key in found if (match := _ACCELERATE_DEVICE.fullmatch(str(key)))}
            numpy, torch = found.get("numpy_random_seed"), found.get("torch_manual_seed")
            self._add_generators(rank, found.get("random_state"), numpy, torch, devices)
            if rank == 0 and type(found.get("step")) is int:
                self._builder.add_tree("accelerator", {"step": found["step"]})

    def _add(self, files: Mapping[str, str]) -> None:
        # DeepSpeed's own files may have the same section.
        files = {key: section for key, section in files.items() if not self._builder.has_section(section)}
        for section, found in zip(files.values(), self._source.objects(files), strict=True):
            self._builder.add_tree(section, self._values.tree(found))

    def _of_ranks(self, name: re.Pattern[str]) -> list[dict[Any, Any]]:
        """The objects of all ranks; none if a node has only the files of its own ranks."""
        files = {int(match[1] or 0): key for key in self._source.children if (match := name.fullmatch(key))}
        if sorted(files) != list(range(len(files))):
            return []
        self.world_size = max(len(files), 1)
        if files:
            self._builder.add_section(_RNG_SECTION, "stateful")
        found = self._source.objects([files[rank] for rank in range(len(files))])
        return [one if isinstance(one, dict) else {} for one in found]

    def _add_generators(self, rank: int, python: Any, numpy: Any, torch: Any, devices: Mapping[str, Any]) -> None:
        """Add the state of ``bytecheckpoint.RNGState``."""
        accelerator: dict[str, Any] = {}
        for kind, state in devices.items():
            states = state if isinstance(state, list) else [state]  # one generator, or those of all devices
            accelerator = {"type": kind, "states": [self._bytes(one) for one in states]}
        state = {
            "rank": rank,
            "world_size": self.world_size,
            "python": self._values.tree(python),
            "numpy": _numpy_state(numpy),
            "torch": self._bytes(torch),
            "accelerator": accelerator,
        }
        self._builder.add_tree(_RNG_SECTION, state, rank=rank)

    def _bytes(self, tensor: Any) -> Any:
        """The contents of a generator's state."""
        is_state = type(tensor) is TensorRef and tensor.is_contiguous and tensor.nbytes <= _MAX_GENERATOR_BYTES
        if not is_state or tensor.dtype.name != "uint8":
            return UnreadObject("no state of a random generator")
        return read_small(self._source.backend, tensor).numpy()


def _numbered(section: str, number: int) -> str:
    return f"{section}_{number}" if number else section


def _numpy_state(found: Any) -> Mapping[str, Any] | UnreadObject:
    """The named form of what ``numpy.random.get_state()`` returns."""
    if type(found) is not tuple or len(found) != 5 or not isinstance(found[1], np.ndarray):
        return UnreadObject("no state of numpy's random generator")
    kind, key, position, has_gauss, gauss = found
    return {"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": gauss}
