"""The names that an export must have, from whatever the user has that knows them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from ..export import Expected
from ..safetensors_folder import SafetensorsFolder

__all__ = ["read_expected"]


def read_expected(source: str) -> Expected:
    """Names, with shapes where ``source`` has them: a JSON list of names, a JSON map of names to shapes (or null), an
    index of safetensors files, a Hugging Face ``config.json``, or a safetensors file or folder.

    Raises ``click.BadParameter`` for anything else, and what ``SafetensorsFolder`` raises.
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
    raise _bad(f"{source} is neither a list of names, a map of names to shapes, an index nor a model's config.json")


def _of_config(path: Path, document: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Parameters and persistent buffers of the model that the configuration describes, built without memory."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise _bad(f"{path}: reading a config.json needs the transformers package; install it, or give names") from None
    import torch

    names = document.get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if kind is None:
        raise _bad(f"{path}: transformers has no architecture {', '.join(map(str, names)) or 'named there'}")
    config = kind.config_class.from_pretrained(str(path.parent))
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    tensors = dict(model.named_parameters())  # tied ones once, under the name that comes first
    stored = model.state_dict()
    tensors |= {name: tensor for name, tensor in model.named_buffers() if name in stored}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _is_shape(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(type(n) is int and n >= 0 for n in value))


def _bad(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint="--expect")
