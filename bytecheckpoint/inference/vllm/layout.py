"""The target layout of any rank of a vLLM engine, worked out in one process: no weights, no peers, no accelerator.

vLLM builds the model as that rank would, with stand-ins for its process groups and parameters that have no memory, and
its own loader takes recorded tensors. Not for a process in which an engine runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from vllm import envs
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import utils as models_utils
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from ..errors import FormatError, StateError, UnsupportedVersionError
from .hub_names import hub_tensors
from .hub_shapes import StoredTensor, hub_shapes
from .recording import Recorder
from .strided import StridedView
from .target_layout import LAYOUT_VERSION, TargetLayout

__all__ = ["EngineRank", "engine_model", "layout_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineRank:
    """One rank of an engine: of ``tp * pp`` ranks, those of one pipeline stage are neighbours. With ``ep`` each rank of
    a stage has whole experts. ``dtype`` is vLLM's ``--dtype``."""

    tp: int = 1
    pp: int = 1
    ep: bool = False
    rank: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1 or not 0 <= self.rank < self.tp * self.pp:
            raise StateError(f"there is no rank {self.rank} in an engine of tp={self.tp} and pp={self.pp}")


def layout_of(
    model: str | os.PathLike[str],
    at: EngineRank,
    *,
    stored: Sequence[StoredTensor] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> TargetLayout:
    """The layout of rank ``at`` for the model whose configuration lies in the directory ``model``.

    ``stored``: name, shape and type of each stored tensor, where they are not those that the model's files have on the
    hub; those that transformers has in memory are as good. ``cache``: a directory; what was worked out is kept there
    under a digest of all that it depends on. Raises ``StateError`` where the configuration cannot be read or no table
    of tensors is known; what vLLM raises of a model or engine that it does not support, it raises here.
    """
    tensors = hub_shapes(_configuration(model)) if stored is None else list(stored)
    config = _engine_config(model, at)  # first: vLLM settles some of its environment variables here
    path = None if cache is None else Path(cache) / f"{_key(model, at, tensors)}.layout"
    if path is not None:
        found = _cached(path)
        if found is not None:
            return found
    with _built(config, at, real=False) as built:
        recorder = Recorder(_no_values)
        recorded: Mapping[str, torch.Tensor] = dict(recorder.tensors(tensors))
        if stored is not None:
            recorded = hub_tensors(config.model_config.hf_config, recorded)
        built.load_weights(recorded.items())  # type: ignore[operator]
        layout = TargetLayout.from_recording(recorder, tensors, built)
    if path is not None:
        _keep(path, layout)
    return layout


@contextmanager
def engine_model(model: str | os.PathLike[str], at: EngineRank, *, real: bool = False) -> Iterator[nn.Module]:
    """The model as rank ``at`` of an engine builds it; what it asks about its peers is answered inside. Its parameters
    have no memory unless they are to be ``real``."""
    with _built(_engine_config(model, at), at, real=real) as built:
        yield built


@contextmanager
def _built(config: Any, at: EngineRank, *, real: bool) -> Iterator[nn.Module]:
    with ExitStack() as stack:
        stack.enter_context(_stand_ins(at, config.model_config.is_moe))
        stack.enter_context(_no_memory_of_others())
        stack.enter_context(set_current_vllm_config(config))
        with set_default_torch_dtype(config.model_config.dtype), ExitStack() as building:
            if not real:
                building.enter_context(_NoMemory())
            built = initialize_model(vllm_config=config)
        yield built


def _engine_config(model: str | os.PathLike[str], at: EngineRank) -> Any:
    return VllmConfig(
        model_config=ModelConfig(model=os.fspath(model), skip_tokenizer_init=True, dtype=at.dtype, enforce_eager=True),
        parallel_config=ParallelConfig(
            tensor_parallel_size=at.tp,
            pipeline_parallel_size=at.pp,
            enable_expert_parallel=at.ep,
            distributed_executor_backend="mp",  # else vLLM looks for as many accelerators
        ),
        load_config=LoadConfig(load_format="dummy"),
        device_config=DeviceConfig("cpu"),
    )


class _NoMemory(TorchFunctionMode):
    """New tensors of fractions have no memory unless they are computed; whole numbers (maps of experts) are real."""

    _filled = frozenset(
        {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty_strided}
    )
    _all = frozenset(_device_constructors())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._filled:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            whole = func is torch.full and kwargs.get("dtype") is None and not isinstance(args[-1], float)
            if dtype.is_floating_point and not whole:
                kwargs["device"] = "meta"
        elif func in self._all:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


@contextmanager
def _no_memory_of_others() -> Iterator[None]:
    """vLLM keeps which layers a model leaves to other stages under the model's id, and an id is soon given again."""
    known: dict[int, Any] = getattr(models_utils, "_model_to_pp_missing_layer_names", {})
    before = dict(known)
    known.clear()
    try:
        yield
    finally:
        known.clear()
        known.update(before)


class _Members:
    """Of a process group, what models ask without communicating."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self._rank = list(ranks), rank

    def rank(self) -> int:
        return self._ranks.index(self._rank)

    def size(self) -> int:
        return len(self._ranks)


def _stand_in(name: str, ranks: Sequence[int], rank: int) -> Any:
    """A group of which this process is one member and that has no others."""
    group = parallel_state.GroupCoordinator.__new__(parallel_state.GroupCoordinator)
    members = _Members(ranks, rank)
    group.unique_name = f"{name}:stand-in"
    group.rank, group.ranks, group.group_ranks = rank, list(ranks), [list(ranks)]
    group.world_size, group.rank_in_group = members.size(), members.rank()
    group.local_rank = group.device_index = 0
    group.device = torch.device("cpu")
    group.cpu_group = group.device_group = members
    group.device_communicator = group.mq_broadcaster = None
    group.use_device_communicator = group.use_custom_op_call = group.use_cpu_custom_send_recv = False
    return group


@contextmanager
def _stand_ins(at: EngineRank, has_experts: bool) -> Iterator[None]:
    """vLLM's groups, as its own start would make them for this rank."""
    if parallel_state.model_parallel_is_initialized():
        raise StateError("an engine runs in this process; layouts are worked out in another one")
    everyone, stage = range(at.tp * at.pp), at.rank // at.tp
    tensor, alone = range(stage * at.tp, (stage + 1) * at.tp), range(at.rank, at.rank + 1)
    members = {"_WORLD": everyone, "_TP": tensor, "_ETP": tensor, "_PP": everyone[at.rank % at.tp :: at.tp]}
    members |= {"_DP": alone, "_DCP": alone, "_PCP": alone} | ({"_EP": tensor} if has_experts else {})
    before = {name: getattr(parallel_state, name) for name in (*members, "_NODE_COUNT")}
    try:
        for name, ranks in members.items():
            setattr(parallel_state, name, _stand_in(name, ranks, at.rank))
        parallel_state._NODE_COUNT = 1
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


def _no_values(name: str, view: StridedView) -> torch.Tensor:
    # The loader goes on with these; what it computes from them is lost with the model, that it did so is noted.
    return torch.zeros(view.shape)


def _configuration(model: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(model) / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read as a model's configuration: {error}") from None
    if not isinstance(found, dict):
        raise StateError(f"{path} is no model's configuration")
    return found


def _key(model: str | os.PathLike[str], at: EngineRank, tensors: Sequence[StoredTensor]) -> str:
    said = hashlib.sha256()
    for path in sorted({*Path(model).glob("*config*.json"), *Path(model).glob("*.py")}):
        said.update(repr((path.name, path.read_bytes())).encode())
    said.update(repr([(name, tuple(shape), str(dtype)) for name, shape, dtype in tensors]).encode())
    facts = [LAYOUT_VERSION, vllm.__version__, torch.__version__, str(current_platform.device_type), asdict(at)]
    said.update(json.dumps([*facts, envs.compile_factors()], sort_keys=True, default=str).encode())
    return said.hexdigest()


def _keep(path: Path, layout: TargetLayout) -> None:
    attempt = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        attempt.write_bytes(layout.pack())
        attempt.replace(path)
    except OSError as error:
        _log.warning("a layout could not be kept for the next time: %s", error)


def _cached(path: Path) -> TargetLayout | None:
    try:
        return TargetLayout.unpack(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, FormatError, UnsupportedVersionError) as error:
        _log.warning("a cached layout is not used and made anew: %s: %s", path, error)
        return None
