"""What makes the model part of a checkpoint, stored whole, a directory that Hugging Face's libraries and vLLM load.

Beside the data files of an attempt stand an index, which says what tensor is in which file, and the model's
configuration where it has one. Both are of the file kind ``companion``: part of the checkpoint, read by no load.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from .engine.file_layout import data_key
from .engine.files import FileImage
from .manifest import COMPANION, Manifest
from .planners import SavePlan

__all__ = ["CONFIG_KEY", "INDEX_KEY", "SINGLE_KEY", "StoredModel", "companions", "index_document", "model_directory"]
__all__ += ["stored_models"]

INDEX_KEY = "model.safetensors.index.json"
SINGLE_KEY = "model.safetensors"
CONFIG_KEY = "config.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredModel:
    """A section that is a model. ``config`` is its configuration as JSON, where it has one."""

    section: str
    config: bytes | None


def stored_models(state: Mapping[str, Any]) -> list[StoredModel]:
    """The sections of a state that are modules (or lists of them), and whatever is called ``model``."""
    found = []
    for name, obj in sorted(state.items()):
        parts = obj if isinstance(obj, (list, tuple)) else [obj]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        if name == "model" or (modules and len(modules) == len(parts)):
            found.append(StoredModel(name, next((c for m in modules if (c := _config(m)) is not None), None)))
    return found


def companions(plan: SavePlan, models: Sequence[StoredModel], attempt: str) -> list[FileImage]:
    """The files to be written beside those of ``plan``, in which every tensor is whole.

    The usual names belong to the section ``model``, or to the only model there is; the index of any other is
    ``<section>.safetensors.index.json``.
    """
    images = []
    for model in models:
        usual = model.section == "model" or len(models) == 1
        key = f"{attempt}/{INDEX_KEY if usual else f'{model.section}.safetensors.index.json'}"
        images.append(FileImage(key, model.section, COMPANION, _index(plan, model.section)))
        if usual and model.config is not None:
            images.append(FileImage(f"{attempt}/{CONFIG_KEY}", model.section, COMPANION, model.config))
    return images


def index_document(file_of: Mapping[str, str], total_size: int) -> bytes:
    """An index: the file of each tensor by name, and the bytes of all tensors."""
    document = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(file_of.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def model_directory(manifest: Manifest) -> str | None:
    """The directory, relative to the checkpoint, that other libraries load as a model; None where there is none."""
    key = f"{manifest.attempt}/{INDEX_KEY}"
    row = manifest.files.name.index(key) if key in manifest.files.name else None
    return None if row is None or manifest.files.kind[row] != COMPANION else manifest.attempt


def _index(plan: SavePlan, section: str) -> bytes:
    """Names that tied weights also go by are left out, as the files hold one copy: who loads the model ties them."""
    tensors, shards = plan.tensors, plan.shards
    number = tensors.sections.index(section) if section in tensors.sections else -1
    wanted = (tensors.section == number) & (plan.scope < 0)
    rows = np.flatnonzero(wanted[shards.tensor])
    file_of = {}
    for tensor, owner in zip(shards.tensor[rows].tolist(), plan.owner[rows].tolist()):
        file_of[tensors.fqn_of(tensor)] = posixpath.basename(data_key("", section, owner, "tensors"))
    return index_document(file_of, int(shards.nbytes(tensors)[rows].sum()))


def _config(module: nn.Module) -> bytes | None:
    """The configuration as the model's own library writes it, with the name of the architecture."""
    for part in _unwrapped(module):
        to_json = getattr(getattr(part, "config", None), "to_json_string", None)
        if callable(to_json):
            try:
                document = dict(json.loads(to_json()))
            except Exception:  # noqa: BLE001 - foreign code; without it the checkpoint is complete all the same
                _log.warning(
                    "the configuration of %s is no JSON object, and left out", type(part).__name__, exc_info=True
                )
                return None
            if not document.get("architectures"):
                # FSDP-2 gives a module a class of its own, named after the one it had.
                document["architectures"] = [type(part).__name__.removeprefix("FSDP")]
            return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
    return None


def _unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """The innermost module first: what wrappers hand through may be theirs."""
    inner = next((m for n in ("module", "_orig_mod") if isinstance(m := module._modules.get(n), nn.Module)), None)
    inner = inner or module._modules.get("_fsdp_wrapped_module")
    if inner is not None:
        yield from _unwrapped(inner)
    yield module
