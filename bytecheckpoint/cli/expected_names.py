"""Read the tensor names that an export must contain (``bcp export --expect``)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from ..convert.export import Expected
from ..foreign.safetensors_folder import SafetensorsFolder

__all__ = ["read_expected"]


def read_expected(source: str) -> Expected:
    """Return names, with shapes if ``source`` contains them.

    ``source`` is a JSON list of names, a JSON map from names to shapes (or null), an index of safetensors files, a
    Hugging Face ``config.json``, or a safetensors file or folder. Raises ``click.BadParameter`` for anything else, and
    what ``SafetensorsFolder`` raises.
    """
    path = Path(source)
    if source.endswith(".safetensors") or path.is_dir() or "://" in source:
        return SafetensorsFolder(source).shapes
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(f"{source} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(f"{source} is not JSON: {error}") from None
    if isinstance(document, list) and all(isinstance(name, str) for name in document):
        return document
    if isinstance(document, dict) and isinstance(document.get("weight_map"), dict):
        return list(document["weight_map"])
    if isinstance(document, dict) and ("architectures" in document or "model_type" in document):
        return _of_config(path, document)
    if isinstance(document, dict) and all(map(_is_shape, document.values())):
        return document
    raise _bad(f"{source} is not a list of names, a map from names to shapes, an index, or a config.json")


def _of_config(path: Path, document: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return parameters and persistent buffers of the configured model, which is built on the meta device."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise _bad(
            f"{path}: reading a config.json needs the transformers package; install it, or pass a list of names"
        ) from None
    import torch

    names = document.get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if kind is None:
        raise _bad(
            f"{path}: transformers does not support the architecture {', '.join(map(str, names)) or '(none given)'}"
        )
    config = kind.config_class.from_pretrained(str(path.parent))
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    tensors = dict(model.named_parameters())  # tied parameters once, under their first name
    stored = model.state_dict()
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in stored}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _is_shape(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(type(n) is int and n >= 0 for n in value))


def _bad(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="--expect")
