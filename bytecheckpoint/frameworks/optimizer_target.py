"""Make room for stored optimizer state: fill existing tensors in place, and create missing ones in ``apply``."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from ..errors import MismatchError
from ..tensors.metadata import BasicMeta
from ..tensors.shards import Path, SectionTarget, torch_dtype
from .dtensor import empty_like_dtensor, is_dtensor
from .optimizer_class import counts_in_numbers, is_elementwise
from .optimizer_groups import same_value
from .optimizer_params import NamedParam
from .optimizer_state import (
    MASTER,
    TENSOR_LEAF,
    StateEntry,
    StoredParam,
    StoredState,
    add_together,
    empty_state_path,
    is_whole,
    lay_out,
    lay_out_wrapper,
    map_leaves,
    state_name,
    state_path,
)
from .tensors import tensor_kind, tensor_shards
from .wrapper_tensors import WRAPPER, HeldWrapper, make_wrapper, require_same_wrapper

_Values = Mapping[Path, Any]


def _is_same(state: Mapping[Any, Any], stored: StoredParam) -> bool:
    """Whether a state has the tensors that are stored, and nothing else, so that each is filled as it is."""
    if not state or state.keys() != stored.tensors.keys() or stored.values or stored.expected:
        return False
    pairs = ((state[key], meta) for key, meta in stored.tensors.items())
    return all(
        type(held) is torch.Tensor and (held.ndim or (not meta.shape and torch_dtype(meta) == held.dtype))
        for held, meta in pairs
    )


class StateFiller:
    """Adds destinations for the state of parameters to ``target``, whose ``apply`` calls ``finish``.

    Call ``add`` for each parameter, and then ``add_found``.
    """

    def __init__(self, target: SectionTarget, stored: StoredState, device: torch.device | None) -> None:
        self.target = target
        self.stored = stored
        self.device = device
        self.unknown: list[str] = []  # names of parameters that the saved optimizer did not have
        self._found: list[StateEntry] = []  # tensors that are filled where they are
        self._steps: list[Callable[[_Values], None]] = []

    def add_found(self) -> None:
        """Add the tensors that the parameters have, or get, to ``target``."""
        for entry in add_together(self._found, self.target)[2]:
            self.target.add(*lay_out(*entry))

    def finish(self, values: _Values) -> None:
        """Put numbers, and tensors created for the load, into the optimizers."""
        with torch.no_grad():
            for step in self._steps:
                step(values)

    def add(self, named: NamedParam) -> None:
        """Add destinations for everything stored for this parameter."""
        existing = named.state
        if named.whole_name is not None and _is_same(existing, self.stored[named.whole_name]) and named.master is None:
            self._found.extend((named, key, tensor) for key, tensor in existing.items())
            return
        stored = {fqn: self.stored[fqn] for fqn in named.names}
        self._add_master(named, stored)
        keys = dict.fromkeys(key for one in stored.values() for key in (*one.keys, *one.expected))
        stateless = [empty_state_path(fqn) for fqn, one in stored.items() if one.is_stateless]
        self.target.requested_values.update(stateless)
        if named.is_remote:
            for fqn, one in stored.items():
                self.target.metas.update({state_name(fqn, key): meta for key, meta in one.tensors.items()})
                self.target.requested_values.update(state_path(fqn, key) for key in one.values)
        elif keys:
            for key in dict.fromkeys((*keys, *existing)):
                self._add_entry(named, stored, key, existing.get(key))
        elif len(stateless) == len(stored):
            # The saved optimizer had no state for this parameter, so the loaded one has none either.
            self._steps.append(lambda values: named.holder.state.pop(named.key, None) and None)
        else:
            self._keep(named, existing)

    def _add_master(self, named: NamedParam, stored: Mapping[str, StoredParam]) -> None:
        """A master weight that is not stored is filled from the model's tensor, which is computed from it."""
        names = {fqn: state_name(fqn, MASTER) for fqn in named.names}
        if named.master is None:
            self.target.ignorable.update(names[fqn] for fqn, one in stored.items() if one.has_master)
            return
        self._found.append((named, MASTER, named.master))
        self.target.fallbacks.update({names[fqn]: origin for fqn, origin in named.origins.items()})
        self.target.derived.update(named.origins.values())

    def _keep(self, named: NamedParam, existing: Mapping[Any, Any]) -> None:
        """Nothing is stored for the parameter, so its state may stay."""
        if self.stored.keys().isdisjoint(named.names):
            self.unknown.append(named.names[0])
        for key, value in existing.items():
            if tensor_kind(value).is_wrapper:
                held = self._add_wrapper(named, key, value)
                self.target.optional.update((*held.metas, state_path(named.names[0], key)))
            elif isinstance(value, torch.Tensor):
                self._found.append((named, key, value))
                self.target.optional.update(state_name(fqn, key) for fqn in named.names)
            else:
                paths = [state_path(fqn, key) for fqn in named.names]
                self.target.requested_values.update(paths)
                self.target.optional.update(paths)

    def _add_entry(self, named: NamedParam, stored: Mapping[str, StoredParam], key: str, existing: Any) -> None:
        values = [one.values[key] for one in stored.values() if key in one.values]
        if values and isinstance(values[0], dict) and WRAPPER in values[0]:
            self._fill_wrapper(named, key, values[0][WRAPPER], existing)
            return
        if tensor_kind(existing).is_wrapper:
            existing = None  # stored plain, as torchao keeps small parts
        metas = {fqn: meta for fqn, one in stored.items() if (meta := one.tensors.get(key))}
        expected = {fqn: meta for fqn, one in stored.items() if (meta := one.expected.get(key))}
        requested = {**expected, **metas}
        if values and isinstance(values[0], (dict, list, tuple)):
            self._add_nested(named, key, existing, values[0])
        elif values or (requested and self._is_scalar(named, key, requested, existing)):
            self._add_scalar(named, key, existing, requested, metas.keys())
        elif isinstance(existing, torch.Tensor):
            self._found.append((named, key, existing))
        elif requested:
            tensor = self._make(named, key, next(iter(requested.values())))
            self._found.append((named, key, tensor))
            if metas:
                self._steps.append(lambda loaded: named.own_state().__setitem__(key, tensor))
        else:
            self.target.requested_values.update(state_path(fqn, key) for fqn in named.names)

    def _add_wrapper(self, named: NamedParam, key: str, tensor: torch.Tensor) -> HeldWrapper:
        held = lay_out_wrapper(named, key, tensor)
        self.target.add(held.metas, held.shards)
        self.target.requested_values.add(state_path(named.names[0], key))
        return held

    def _fill_wrapper(self, named: NamedParam, key: str, record: Any, existing: Any) -> None:
        """Fill a tensor that consists of others in place, or create it: of the stored kind, also where it was plain."""
        name = state_name(named.names[0], key)
        tensor = existing
        if not tensor_kind(existing).is_wrapper:
            tensor = make_wrapper(name, record, named.param, self._device_of(named))
            self._steps.append(lambda loaded: named.own_state().__setitem__(key, tensor))
        if not tensor_kind(tensor).is_wrapper:  # an empty part; other ranks request the stored tensors
            self.target.requested_values.add(state_path(named.names[0], key))
            return
        require_same_wrapper(name, record, self._add_wrapper(named, key, tensor))

    @staticmethod
    def _is_scalar(named: NamedParam, key: str, requested: Mapping[str, BasicMeta], existing: Any) -> bool:
        if isinstance(existing, torch.Tensor) and (existing.ndim or is_dtensor(existing)):
            return False
        # An entry of a 0-d parameter has its shape; only the step count certainly is a scalar.
        return all(not meta.shape for meta in requested.values()) and (key == "step" or named.param.ndim > 0)

    # -------------------------------------------------------------------------------------------- numbers and 0-d

    def _add_scalar(
        self, named: NamedParam, key: str, existing: Any, requested: Mapping[str, BasicMeta], stored: Container[str]
    ) -> None:
        """Load a number or 0-d tensor stored under each name of the parameter. All must be equal and fit the entry.

        Of the names ``requested``, only those in ``stored`` count, since a lenient load continues without the others.
        """
        loaded: dict[str, torch.Tensor] = {}
        for fqn, meta in requested.items():
            name = state_name(fqn, key)
            room = torch.zeros(meta.shape, dtype=torch_dtype(meta))
            self.target.add(*tensor_shards(name, room))
            if fqn in stored:
                loaded[name] = room
        paths = [state_path(fqn, key) for fqn in named.names if fqn not in requested]
        self.target.requested_values.update(paths)
        where = state_name(named.names[0], key)

        def put(arrived: _Values) -> None:
            found: dict[str, Any] = {name: tensor.item() for name, tensor in loaded.items()}
            found.update({".".join(map(str, path)): arrived[path] for path in paths if path in arrived})
            if not found:
                return
            number = next(iter(found.values()))
            if any(not same_value(number, other) for other in found.values()):
                listed = "\n".join(f"  {name}: {value!r}" for name, value in found.items())
                raise MismatchError(
                    f"{where}: parameters that one flat parameter now combines were saved with different values; load "
                    f"with use_orig_params=True or wrap them separately:\n{listed}",
                    [("value", name, repr(value)) for name, value in found.items()],
                )
            named.own_state()[key] = self._scalar(
                named, key, where, number, existing, next(iter(loaded.values()), None)
            )

        self._steps.append(put)

    def _scalar(
        self, named: NamedParam, key: str, where: str, number: Any, existing: Any, loaded: torch.Tensor | None
    ) -> Any:
        if isinstance(existing, torch.Tensor) and isinstance(number, (bool, int, float, complex)):
            return _fill(existing, number, where)
        as_number = counts_in_numbers(named.holder.optimizer) if key == "step" and existing is None else None
        if as_number:
            return _as_number(number, int, where)
        if loaded is None and as_number is False and isinstance(number, (int, float)):
            loaded = torch.tensor(float(number), dtype=torch.float32)  # another library counted it
        if loaded is None:
            return number
        if isinstance(existing, (int, float)) and not isinstance(existing, bool):
            return _as_number(number, type(existing), where)
        fast = bool(named.group.get("fused") or named.group.get("capturable"))
        if key != "step":
            return loaded.to(self._device_of(named))
        # Fused kernels need float32 steps on the parameter's device; other code reads steps on the host.
        narrow = bool(named.group.get("fused")) and loaded.dtype == torch.float64
        made = torch.zeros((), dtype=torch.float32) if narrow else loaded
        return _fill(made, number, where).to(self._device_of(named) if fast else "cpu")

    # --------------------------------------------------------------------------------------------------- new tensors

    def _device_of(self, named: NamedParam) -> torch.device:
        if named.param.is_meta:
            return self.device or torch.device("cpu")
        return named.param.device

    def _make(self, named: NamedParam, key: str, meta: BasicMeta) -> torch.Tensor:
        """Zeros (for padding) with the parameter's layout if the shape is the parameter's, and complete otherwise.

        Where the state must have the parameter's shape, another stored shape becomes a fault of the load.
        """
        dtype, device = torch_dtype(meta), self._device_of(named)
        if key in named.entry_layouts:
            return torch.zeros(named.entry_layouts[key].local_shape, dtype=dtype, device=device)
        fqn, shape = next(iter(named.layout.fqns.items()))
        like_param = is_elementwise(named.holder.optimizer) or meta.shape in named.layout.fqns.values()
        if is_dtensor(named.param):
            if like_param:
                return empty_like_dtensor(named.param, dtype, device).zero_()
            if not is_whole(named.layout) and self._is_quantized(fqn, shape):
                detail = f"stored with shape {list(meta.shape)} next to 8-bit codes of a parameter that is sharded here"
                raise MismatchError(
                    f"{state_name(fqn, key)}: {detail}; which blocks it describes is unknown. Load the state into an "
                    "optimizer of complete parameters (one rank or DDP)",
                    [("shape", state_name(fqn, key), detail)],
                )
            return _replicated(named.param, torch.zeros(meta.shape, dtype=dtype, device=device))
        if like_param:
            layout = named.local_layout
            if layout.local_shape == tuple(named.param.shape) and not named.param.is_meta:
                return torch.zeros_like(named.param, dtype=dtype, device=device, requires_grad=False)
            return torch.zeros(layout.local_shape, dtype=dtype, device=device)
        if is_whole(named.layout):
            return torch.zeros(meta.shape, dtype=dtype, device=device)
        detail = f"stored with shape {list(meta.shape)} for a parameter of shape {list(shape)} that is sharded"
        raise MismatchError(
            f"{state_name(fqn, key)}: {detail}; how to shard it is unknown. It was saved from a layout whose "
            "optimizer steps complete parameters: load it into such a layout (DDP or FSDP-2)",
            [("shape", state_name(fqn, key), detail)],
        )

    def _is_quantized(self, fqn: str, shape: tuple[int, ...]) -> bool:
        """Whether the state has 8-bit codes like those of bitsandbytes, and other tensors describe blocks of them."""
        return any(
            meta.dtype.name in ("uint8", "int8") and meta.shape == shape for meta in self.stored[fqn].tensors.values()
        )

    # -------------------------------------------------------------------------------------------------------- nested

    def _add_nested(self, named: NamedParam, key: str, existing: Any, stored: Any) -> None:
        """Lists and dicts get the stored structure. Existing tensors of the stored shape are filled in place."""
        held: dict[str, Any] = {}
        made: dict[str, torch.Tensor] = {}
        where = f"state.{named.names[0]}"

        def place(dotted: str, leaf: Any) -> Any:
            if leaf == TENSOR_LEAF:
                meta = self.stored[named.names[0]].tensors.get(dotted)
                if meta is None:
                    raise MismatchError(
                        f"{where}.{dotted}: the checkpoint lists this tensor in a list or dict but does not contain it",
                        [("missing", f"{where}.{dotted}", "tensor of a nested state")],
                    )
                old: Any = held.get(dotted)
                keep = isinstance(old, torch.Tensor) and tuple(old.shape) == meta.shape
                made[dotted] = old if keep else self._make(named, dotted, meta)
                self._found.append((named, dotted, made[dotted]))
            return leaf

        map_leaves(existing, held.setdefault, key, where)
        map_leaves(stored, place, key, where)
        paths = [state_path(fqn, key) for fqn in named.names]
        self.target.requested_values.update(paths)

        def put(arrived: _Values) -> None:
            tree = next((arrived[path] for path in paths if path in arrived), None)
            if tree is not None:
                named.own_state()[key] = map_leaves(tree, lambda dotted, leaf: made.get(dotted, leaf), key, where)

        self._steps.append(put)


def _replicated(like: Any, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _fill(tensor: torch.Tensor, number: Any, where: str) -> torch.Tensor:
    exact = torch.float64 if isinstance(number, float) else torch.complex128 if isinstance(number, complex) else None
    cast = torch.tensor(number, dtype=exact).to(tensor.dtype)
    if not same_value(cast.item(), number):
        raise _misfit(where, number, str(tensor.dtype))
    return tensor.copy_(cast.reshape(tensor.shape))


def _as_number(number: Any, kind: type[Any], where: str) -> Any:
    try:
        cast = kind(number)
    except (ValueError, OverflowError, TypeError):
        cast = None
    if cast is None or not same_value(cast, number):
        raise _misfit(where, number, kind.__name__)
    return cast


def _misfit(where: str, number: Any, kind: str) -> MismatchError:
    detail = f"{number!r} does not fit into {kind}"
    return MismatchError(f"{where}: the stored {detail}", [("value", where, detail)])
