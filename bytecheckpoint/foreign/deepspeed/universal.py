"""Read the parameters of a universal checkpoint, which has a folder for each of them.

``deepspeed/checkpoint/ds_to_universal.py`` writes ``zero/<name>/<key>.pt`` for the master weight (``fp32``) and each
entry of the optimizer's state, and ``zero/optimizer_state.pt`` for the rest. Those from ZeRO-3 are flat, and their step
is in the rest. There are also folders of tensors that are not trained, which the model files have, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ...errors import CorruptionError, FormatError
from ..pickles import TensorRef
from .folder import DeepSpeedFiles, items_of
from .partitions import Flat, Group, Member, Span, options_of_param, shapes_of

__all__ = ["universal_groups"]

_WEIGHTS, _SUFFIX, _REST = "fp32", ".pt", "zero/optimizer_state.pt"


def universal_groups(files: DeepSpeedFiles) -> tuple[list[Group], Any]:
    """Return one group for each parameter, and the loss scaler. Raises ``FormatError`` and ``CorruptionError``."""
    where = files.where(files.model[0])
    shapes = [shapes_of(group, where) for group in items_of(files.first.get("param_shapes"), "param_shapes", where)]
    params = [(fqn, shape, number) for number, group in enumerate(shapes) for fqn, shape in group.items()]
    folders = [f"zero/{fqn}/" for fqn, _, _ in params]
    if any({"", ".", ".."} & {*fqn.split("/")} for fqn, _, _ in params):
        raise FormatError(f"{where}: param_shapes has names that leave the folder")
    children = files.folder.list_children(folders)
    names = [
        [folder + name for name in found if name.endswith(_SUFFIX)]
        for folder, found in zip(folders, children, strict=True)
    ]
    rest, *found = files.folder.read([_REST, *(name for inside in names for name in inside)])
    if not isinstance(rest, dict):
        raise FormatError(f"{files.where(_REST)}: it is no state of an optimizer")
    entries = iter(found)
    groups = []
    for (fqn, shape, number), folder, inside in zip(params, folders, names, strict=True):
        state = {name[len(folder) : -len(_SUFFIX)]: _content(next(entries)) for name in inside}
        flat = _flat({**_step(rest, number), **state}, shape, files.where(folder))
        spans = [Span(0, 0, 0, flat.weights.numel)] if flat.weights.numel else []
        groups.append(Group([Member(fqn, shape, spans)], {0: flat}, options_of_param(rest, number)))
    return groups, rest.get("loss_scaler")


def _flat(state: dict[str, Any], shape: tuple[int, ...], where: str) -> Flat:
    if _WEIGHTS not in state:
        raise CorruptionError(f"{where}{_WEIGHTS}{_SUFFIX}: file is missing; fetch it again")
    weights = state.pop(_WEIGHTS)
    if type(weights) is not TensorRef or not weights.is_contiguous or weights.numel != prod(shape):
        raise FormatError(f"{where}{_WEIGHTS}{_SUFFIX}: it does not hold a tensor of shape {list(shape)}")
    return Flat(where, weights, frozenset([weights.numel]), state)


def _content(found: Any) -> Any:
    return found["param"] if isinstance(found, dict) and "param" in found else found


def _step(rest: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The step of a group, which is stored once."""
    base = rest.get("optimizer_state_dict")
    states = base.get("state") if isinstance(base, dict) else None
    found = states.get(number) if isinstance(states, dict) else None
    step = found.get("step") if isinstance(found, dict) else None
    return {"step": step} if type(step) in (int, float) or (type(step) is TensorRef and not step.shape) else {}
