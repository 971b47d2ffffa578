"""Read optimizers that are not partitioned: those of engines without ZeRO, and of universal checkpoints.

An engine without ZeRO numbers its parameters. A mixed-precision optimizer also stores its master weights by number.
Each rounds to the model's tensor of its name, so their first elements identify the names. Among tensors that begin with
the same elements, the model's order decides. Without master weights, the numbers remain, and a load assigns them to the
parameters of the target in order, as ``Optimizer.load_state_dict`` does.

A universal checkpoint has a folder for each parameter: ``deepspeed/checkpoint/ds_to_universal.py`` writes
``zero/<name>/<key>.pt`` for the master weight (``fp32``) and each entry of the optimizer's state, and
``zero/optimizer_state.pt`` for the rest. Those from ZeRO-3 are flat, and their step is in the rest. There are also
folders of tensors that are not trained, which the model files have, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ...errors import CorruptionError, FormatError
from ...storage_backends.base import StorageBackend
from ..building import IndexBuilder
from ..naming import OPTIMIZER_SECTION
from ..pickles.records import TensorRef
from ..source_path import read_all
from ..torch_values import TorchValues, read_small
from .folder import DeepSpeedFiles, items_of
from .partitions import FlatGroup, FlatPartition, FlatSpan, Member, options_of_param, shapes_of

_SAMPLE = 64  # elements that are compared
_NONE = 1 << 62  # above every position


def add_numbered_optimizer(builder: IndexBuilder, values: TorchValues, found: Any) -> bool:
    """Add a state dict of an optimizer as such, with master weights as part of the state. False if there is none."""
    state_dict = _state_dict(found)
    if state_dict is None:
        return False
    state = {number: dict(entries) for number, entries in state_dict["state"].items() if isinstance(entries, dict)}
    for number, weights in _masters(found).items():
        state.setdefault(number, {})["master"] = weights
    builder.add_tree(OPTIMIZER_SECTION, values.tree({**state_dict, "state": state}))
    return True


def replicated_groups(files: DeepSpeedFiles, found: Any, trained: Mapping[str, TensorRef]) -> list[FlatGroup]:
    """Return one group for each parameter of a mixed-precision optimizer; none if names cannot be determined."""
    state_dict, masters = _state_dict(found), _masters(found)
    if state_dict is None or not masters:
        return []
    names = _match(files.folder.backend, [group["params"] for group in state_dict["param_groups"]], masters, trained)
    groups = []
    where = files.where(files.model[0])
    for number, fqn in names.items():
        weights = masters[number]
        spans = [FlatSpan(0, 0, 0, weights.numel)] if weights.numel else []
        flat = FlatPartition(where, weights, frozenset([weights.numel]), state_dict["state"].get(number, {}))
        options = options_of_param(state_dict, number)
        groups.append(FlatGroup([Member(fqn, weights.shape, spans)], {0: flat}, options))
    return groups


def _state_dict(found: Any) -> dict[str, Any] | None:
    """The state dict of the inner optimizer."""
    inner = found.get("optimizer_state_dict", found) if isinstance(found, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        return None
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    numbers = [group.get("params") for group in groups]
    is_plain = all(isinstance(some, list) and all(type(number) is int for number in some) for some in numbers)
    return inner if is_plain else None


def _masters(found: Any) -> dict[int, TensorRef]:
    """The master weights by the number of the parameter; none if the optimizer has none, or flat ones."""
    groups: Sequence[Any] = found.get("fp32_groups") or () if isinstance(found, dict) else ()
    weights = [one for group in groups for one in (group if isinstance(group, list) else [None])]
    numbers = [n for group in (_state_dict(found) or {"param_groups": ()})["param_groups"] for n in group["params"]]
    tensors = [one for one in weights if type(one) is TensorRef and one.is_contiguous]
    is_complete = len(tensors) == len(weights) == len(numbers) == len(set(numbers))
    return dict(zip(numbers, tensors, strict=True)) if is_complete else {}


def _match(
    backend: StorageBackend,
    groups: Sequence[Sequence[int]],
    masters: Mapping[int, TensorRef],
    trained: Mapping[str, TensorRef],
) -> dict[int, str]:
    """The name of each number; none if more than one assignment fits."""
    read = partial(_sample, backend)
    samples = dict(zip(trained, read_all(read, trained.values()), strict=True))
    weights = dict(zip(masters, read_all(read, masters.values()), strict=True))
    positions: dict[tuple[Any, ...], list[int]] = {}
    for position, (name, sample) in enumerate(samples.items()):
        positions.setdefault(_key(trained[name], sample), []).append(position)
    dtypes = {sample.dtype for sample in samples.values()}
    fits = {
        number: sorted(at for dtype in dtypes for at in positions.get(_key(masters[number], sample.to(dtype)), ()))
        for number, sample in weights.items()
    }
    found: dict[int, int] = {}
    for group in groups:
        found.update(_only_ascending({number: fits[number] for number in group}))
    if len(set(found.values())) != len(masters):
        return {}
    names = list(trained)
    return {number: names[position] for number, position in found.items()}


def _only_ascending(fits: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The only choice of positions that ascends in the order of the numbers; none if there is none, or another one."""
    lowest: dict[int, int] = {}
    highest: dict[int, int] = {}
    last = -1
    for number, choices in fits.items():
        last = next((at for at in choices if at > last), _NONE)
        lowest[number] = last
    last = _NONE
    for number, choices in reversed(list(fits.items())):
        last = next((at for at in reversed(choices) if at < last), -1)
        highest[number] = last
    return lowest if lowest == highest else {}


def _key(tensor: TensorRef, sample: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, sample.dtype, sample.view(torch.uint8).numpy().tobytes()


def _sample(backend: StorageBackend, tensor: TensorRef) -> torch.Tensor:
    """The first elements."""
    count = min(tensor.numel, _SAMPLE) if tensor.is_contiguous else 0
    return read_small(backend, replace(tensor, shape=(count,), strides=(1,)))


_WEIGHTS, _SUFFIX, _REST = "fp32", ".pt", "zero/optimizer_state.pt"


def universal_groups(files: DeepSpeedFiles) -> tuple[list[FlatGroup], Any]:
    """Return one group for each parameter, and the loss scaler. Raises ``FormatError`` and ``CorruptionError``."""
    where = files.where(files.model[0])
    shapes = [shapes_of(group, where) for group in items_of(files.first.get("param_shapes"), "param_shapes", where)]
    params = [(fqn, shape, number) for number, group in enumerate(shapes) for fqn, shape in group.items()]
    folders = [f"zero/{fqn}/" for fqn, _, _ in params]
    if any({"", ".", ".."} & {*fqn.split("/")} for fqn, _, _ in params):
        raise FormatError(f"{where}: param_shapes has names that leave the folder")
    children = read_all(lambda name: files.folder.backend.list_children(files.folder.prefix + name), folders)
    names = [
        [folder + name for name in found if name.endswith(_SUFFIX)]
        for folder, found in zip(folders, children, strict=True)
    ]
    rest, *found = files.folder.objects([_REST, *(name for inside in names for name in inside)])
    if not isinstance(rest, dict):
        raise FormatError(f"{files.where(_REST)}: it is no state of an optimizer")
    entries = iter(found)
    groups = []
    for (fqn, shape, number), folder, inside in zip(params, folders, names, strict=True):
        state = {name[len(folder) : -len(_SUFFIX)]: _content(next(entries)) for name in inside}
        flat = _flat({**_step(rest, number), **state}, shape, files.where(folder))
        spans = [FlatSpan(0, 0, 0, flat.weights.numel)] if flat.weights.numel else []
        groups.append(FlatGroup([Member(fqn, shape, spans)], {0: flat}, options_of_param(rest, number)))
    return groups, rest.get("loss_scaler")


def _flat(state: dict[str, Any], shape: tuple[int, ...], where: str) -> FlatPartition:
    if _WEIGHTS not in state:
        raise CorruptionError(f"{where}{_WEIGHTS}{_SUFFIX}: file is missing; fetch it again")
    weights = state.pop(_WEIGHTS)
    if type(weights) is not TensorRef or not weights.is_contiguous or weights.numel != prod(shape):
        raise FormatError(f"{where}{_WEIGHTS}{_SUFFIX}: it does not hold a tensor of shape {list(shape)}")
    return FlatPartition(where, weights, frozenset([weights.numel]), state)


def _content(found: Any) -> Any:
    return found["param"] if isinstance(found, dict) and "param" in found else found


def _step(rest: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The step of a group, which is stored once."""
    base = rest.get("optimizer_state_dict")
    states = base.get("state") if isinstance(base, dict) else None
    found = states.get(number) if isinstance(states, dict) else None
    step = found.get("step") if isinstance(found, dict) else None
    return {"step": step} if type(step) in (int, float) or (type(step) is TensorRef and not step.shape) else {}
