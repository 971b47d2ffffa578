"""``bcp export`` and ``bcp import``: write and read safetensors files in the layout of Hugging Face libraries."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import click
import torch

from .. import api
from ..convert.export import Expected, export_safetensors
from ..convert.importing import import_checkpoint
from ..foreign.safetensors_folder import SafetensorsFolder
from .options import checked, command, options_for, parse_size, rename_option
from .output import Output, size_text
from .torch_formats import TorchForm, export_for_torch

__all__ = ["export_command", "import_command"]

TiedNames = Literal["drop", "copy"]
"""Whether an export writes only one of several tied names, or all of them."""


@command("export")
@click.argument("source")
@click.argument("target")
@click.option(
    "--format",
    "form",
    type=click.Choice(["safetensors", *get_args(TorchForm)]),
    default="safetensors",
    show_default=True,
    help="Files of safetensors, a folder of torch.distributed.checkpoint, or one file of torch.save.",
)
@click.option("--section", help="The section to export. By default model for safetensors, and all for dcp and torch.")
@click.option("--max-file-size", default="5GB", show_default=True, callback=parse_size, help="Maximum size of a file.")
@click.option(
    "--cast", metavar="DTYPE", help="Convert floating-point tensors to bfloat16, float16, float32 or float64."
)
@click.option(
    "--expect",
    metavar="FILE",
    help="Require exactly these names: a JSON list, a JSON map from names to shapes, an index, a safetensors file or "
    "folder, or a config.json (which needs the transformers package).",
)
@rename_option
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not export names that match. Repeatable.")
@click.option(
    "--tied",
    type=click.Choice(get_args(TiedNames)),
    default="drop",
    show_default=True,
    help="Of tied names (which share their bytes), write only one, or all.",
)
def export_command(
    out: Output,
    options: Mapping[str, Any],
    source: str,
    target: str,
    form: Literal["safetensors"] | TorchForm,
    section: str | None,
    max_file_size: int,
    cast: str | None,
    expect: str | None,
    rename: Callable[[str], str] | None,
    exclude: tuple[str, ...],
    tied: TiedNames,
) -> None:
    """Write the model of checkpoint SOURCE to the folder TARGET, in the layout of Hugging Face libraries.

    With --format dcp or torch, write all sections as torch's own functions do, to a new folder or file TARGET.
    Streams in bounded memory. With --expect, nothing is written (exit code 1) if a name is missing or unexpected, or
    has a different shape.
    """
    found = api.open(source, storage_options=options_for(source, options))
    if form != "safetensors":
        if expect or rename or tied != "drop":
            raise click.UsageError(f"--expect, --rename and --tied do not apply to --format {form}")
        export_for_torch(
            out,
            found,
            target,
            form,
            max_file_size,
            section=section,
            cast=cast,
            exclude=exclude,
            storage_options=options_for(target, options),
        )
        return
    with out.progress("export", found.manifest.nbytes) as progress:
        report = export_safetensors(
            found,
            target,
            section=section or "model",
            max_file_bytes=max_file_size,
            cast=cast,
            expected=None if expect is None else _read_expected(expect),
            rename=rename,
            exclude=exclude,
            tied=tied,
            progress=progress,
            storage_options=options_for(target, options),
        )
    files = [{"name": name, "bytes": size} for name, size in report.files]
    out.document({"source": found.url, **asdict(report), "files": files})
    out.table(("FILE", ">SIZE"), [(name, size_text(size)) for name, size in report.files])
    for name, kept in report.dropped.items():
        out.line(f"{name} is tied to {kept} and was not written")
    out.line(f"{report.url}: {report.tensors} tensors, {size_text(report.total_size)}")


@command("import")
@click.argument("source")
@click.argument("target")
@click.option("--section", help="The name of the section, if SOURCE has a single one, such as the model.")
@click.option("--step", type=int, callback=checked, help="The training step to store.")
@rename_option
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out full names that match. Repeatable.")
def import_command(
    out: Output,
    options: Mapping[str, Any],
    source: str,
    target: str,
    section: str | None,
    step: int | None,
    rename: Callable[[str], str] | None,
    exclude: tuple[str, ...],
) -> None:
    """Create a checkpoint at TARGET from SOURCE, which another system wrote.

    SOURCE is a safetensors file, a folder with one such file or an index, a file of torch.save, or a folder of
    torch.distributed.checkpoint. Streams in bounded memory. Nothing in a pickle is executed.
    """
    found = api.open(source, storage_options=options_for(source, options))
    with out.progress("import", found.manifest.nbytes) as progress:
        report = import_checkpoint(
            found,
            target,
            section=section,
            step=step,
            rename=rename,
            exclude=exclude,
            progress=progress,
            storage_options=options_for(target, options),
        )
    out.document({"source": source, **asdict(report)})
    out.line(
        f"{report.url}: {report.tensors} tensors, {size_text(report.total_size)}, from {len(report.files)} file(s)"
    )


def _read_expected(source: str) -> Expected:
    """Return names, with shapes if ``source`` contains them.

    ``source`` is a JSON list of names, a JSON map from names to shapes (or null), an index of safetensors files, a
    Hugging Face ``config.json``, or a safetensors file or folder. Raises ``click.BadParameter`` for anything else, and
    what ``SafetensorsFolder`` raises.
    """
    path = Path(source)
    if source.endswith(".safetensors") or path.is_dir() or "://" in source:
        return SafetensorsFolder.at(source).shapes
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
