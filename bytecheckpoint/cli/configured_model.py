"""What the model of a ``config.json`` stores, as the transformers package defines it. It is built without memory."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from ..convert.export import ExportedBox
from ..errors import StateError
from ..inference.layouts.hub_names import configuration_of, hub_tensors
from ..inference.layouts.parts import StridedView, box_of
from ..inference.layouts.recording import Recorder
from ..tensors.metadata import BasicMeta
from ..tensors.shards import torch_dtype

Shapes = dict[str, tuple[int, ...]]


def is_supported(config: Mapping[str, Any]) -> bool:
    """Whether the transformers package is installed and has the architecture."""
    return find_spec("transformers") is not None and _architecture(config) is not None


@dataclass
class ConfiguredModel:
    """The names that a model of transformers has in memory and on the hub.

    Attributes:
        memory: Shape of each tensor in memory; tied ones once, under their first names.
        hub: Shape of each tensor as ``save_pretrained`` stores it. Some are parts of those in memory, such as experts.
        config: The model's configuration.
    """

    memory: Shapes
    hub: Shapes
    config: Any
    _missing: list[re.Pattern[str]] = field(default_factory=list)
    _unexpected: list[re.Pattern[str]] = field(default_factory=list)

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> ConfiguredModel:
        """Build the model on the meta device. Code of the model's folder is never run.

        Raises ``StateError`` if transformers is not installed or does not have the architecture.
        """
        if find_spec("transformers") is None:
            raise StateError(
                f"{where}: reading a config.json needs the transformers package; install it, or pass a list of names"
            )
        kind = _architecture(config)
        if kind is None:
            names = ", ".join(map(str, config.get("architectures") or [])) or "(none given)"
            raise StateError(f"{where}: transformers does not support the architecture {names}")
        configuration = configuration_of(kind.config_class, json.dumps(config))
        with torch.device("meta"):
            model = kind(configuration)
        model.tie_weights()
        tensors = dict(model.named_parameters())  # tied parameters once, under their first name
        stored = model.state_dict()
        tensors |= {name: tensor for name, tensor in model.named_buffers() if name in stored}
        memory = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(
            memory,
            _hub_shapes(model, tensors) or memory,
            configuration,
            _patterns(model, "_keys_to_ignore_on_load_missing"),
            _patterns(model, "_keys_to_ignore_on_load_unexpected"),
        )

    def parts(self, stored: Mapping[str, BasicMeta]) -> dict[str, ExportedBox]:
        """Return the tensors of the hub that are parts of stored ones, if ``stored`` has the names in memory.

        Empty if nothing has to be converted, or if a part is no box of a stored tensor.
        """
        metas = [(name, meta.shape, torch_dtype(meta)) for name, meta in stored.items()]
        recorded = dict(Recorder(_no_values).tensors(metas))
        found: Mapping[str, Any] = hub_tensors(self.config, recorded)
        parts: dict[str, ExportedBox] = {}
        for name, tensor in found.items():
            if tensor is recorded.get(name):
                continue
            view: StridedView = tensor.strided
            box = box_of(stored[tensor.fqn].shape, view)
            if box is None or box.order != tuple(range(len(view.shape))):
                return {}
            parts[name] = ExportedBox(tensor.fqn, box.box, view.shape)
        return parts

    def expected(self, names: Set[str]) -> dict[str, tuple[int, ...] | None]:
        """Return what an export with these names must have, in the form (memory or hub) that is closer to them.

        The lists of names that the model may lack or ignores apply.
        """
        form = max((self.hub, self.memory), key=lambda form: len(form.keys() & names))
        optional = {name for name in form.keys() - names if _matches(self._missing, name)}
        ignored = {name for name in names - form.keys() if _matches(self._unexpected, name)}
        required: dict[str, tuple[int, ...] | None] = {k: shape for k, shape in form.items() if k not in optional}
        return required | dict.fromkeys(ignored)


def _architecture(config: Mapping[str, Any]) -> Any:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names:
        return None
    found = getattr(importlib.import_module("transformers"), str(names[0]), None)
    return found if hasattr(found, "config_class") else None


def _hub_shapes(model: Any, tensors: Mapping[str, torch.Tensor]) -> Shapes | None:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, the names in memory are those of the hub
        return None
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def _patterns(model: Any, attribute: str) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in getattr(model, attribute, None) or ()]


def _matches(patterns: list[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _no_values(name: str, view: object) -> torch.Tensor:
    raise StateError(f"the conversion of {name} to the hub's form computes with its values")
