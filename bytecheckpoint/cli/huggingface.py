"""``bcp export`` and ``bcp import``: safetensors files in the layout of Hugging Face libraries, and torch's formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import click

from .. import api
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location
from ..checkpoint.selection import Exclusion
from ..convert.export import Expected, ExportedBox, export_safetensors
from ..convert.importing import import_checkpoint
from ..convert.lora import Lora, LoraForm, LoraPlan
from ..convert.related import kept_files, related_files
from ..convert.selection import ExportSelection, Tied
from ..convert.torch_file import export_torch_file
from ..errors import StateError
from ..foreign.naming import MODEL_SECTION
from ..foreign.source_path import parse_json
from ..format.hf_index import ADAPTER_CONFIG_KEY, CONFIG_KEY
from ..loading.options import LoadOptions
from ..rules import Rules
from .configured_model import ConfiguredModel, is_supported
from .options import Locate, checked, command, not_negative, parse_size, rename_option
from .output import Output, size_text
from .rules_options import rules_options

TorchForm = Literal["dcp", "torch"]
"""A folder of ``torch.distributed.checkpoint``, or a file of ``torch.save``."""


@command(
    "export",
    needs={"--adapter-config": "--lora", "--lora-alpha": "--lora", "--adapter": "--lora"},
    excludes={"--partial": ["--expect"]},
)
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
@click.option(
    "--max-file-size", show_default="5GB", callback=parse_size, help="Maximum size of a file, unless --format is torch."
)
@click.option(
    "--cast",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    help="Convert floating-point tensors to this dtype.",
)
@click.option(
    "--expect",
    metavar="FILE",
    help="Require exactly these names: a JSON list, a JSON map from names to shapes, an index, a safetensors file or "
    "folder, or a config.json (which needs the transformers package). By default those of the model's config.json, if "
    "transformers is installed and has the architecture.",
)
@click.option("--partial", is_flag=True, help="Do not compare the names with those of the model's config.json.")
@click.option(
    "--config-from",
    metavar="FOLDER",
    help="Copy config.json, tokenizer and related files from this folder. By default, those that SOURCE has.",
)
@rules_options
@rename_option
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Do not export names that match. Repeatable.")
@click.option(
    "--tied",
    type=click.Choice(get_args(Tied)),
    default="drop",
    show_default=True,
    help="Of tied names (which share their bytes), write only one, or all.",
)
@click.option(
    "--masters",
    is_flag=True,
    help="Write the optimizer's master weights in place of the tensors that are rounded from them.",
)
@click.option(
    "--lora",
    "how",
    type=click.Choice(get_args(LoraForm)),
    help="Merge a LoRA adapter into the model, or write the adapter alone, as PEFT does.",
)
@click.option(
    "--adapter-config",
    metavar="FILE",
    help="PEFT's adapter_config.json, which has the scaling. By default, the one that SOURCE has.",
)
@click.option("--lora-alpha", type=float, callback=not_negative, metavar="N", help="The scaling is N / rank.")
@click.option("--adapter", metavar="NAME", help="The adapter to export, if the model has several.")
def export_command(
    out: Output,
    at: Locate,
    *,
    source: str,
    target: str,
    form: Literal["safetensors"] | TorchForm,
    section: str | None,
    max_file_size: int | None,
    cast: str | None,
    expect: str | None,
    partial: bool,
    config_from: str | None,
    rules: Rules | None,
    rename: Mapping[str, str] | None,
    exclude: tuple[str, ...],
    tied: Tied,
    masters: bool,
    how: LoraForm | None,
    adapter_config: str | None,
    lora_alpha: float | None,
    adapter: str | None,
) -> None:
    """Write the model of checkpoint SOURCE to the folder TARGET, in the layout of Hugging Face libraries.

    With --format dcp or torch, write all sections as torch's own functions do, to a new folder or file TARGET.
    Streams in bounded memory. If a name is missing or unexpected, or has a different shape than in --expect or the
    model's config.json, nothing is written (exit code 1).
    """
    found = api.open(at(source), rename=rename, options=LoadOptions(rules=rules))
    limits: dict[str, Any] = {} if max_file_size is None else {"max_file_bytes": max_file_size}
    if form != "safetensors":
        if expect or partial or config_from or tied != "drop" or how or masters:
            raise click.UsageError(
                f"--expect, --partial, --config-from, --tied, --masters and --lora do not apply to --format {form}"
            )
        if form == "torch" and limits:
            raise click.UsageError("--max-file-size does not apply to --format torch, which is one file")
        _export_for_torch(
            out,
            found,
            at(target),
            form,
            section=section,
            cast=cast,
            exclude=exclude,
            **limits,
        )
        return
    section = section or "model"
    stored = kept_files(found)
    related = dict(stored) if config_from is None else related_files(at(config_from).open())
    if config_from is not None and CONFIG_KEY not in related:
        raise click.BadParameter(f"{config_from} has no {CONFIG_KEY}", param_hint="--config-from")
    own_adapter_config = related.pop(ADAPTER_CONFIG_KEY, stored.get(ADAPTER_CONFIG_KEY))
    lora = None
    if how is not None:
        config = _adapter_config(adapter_config, own_adapter_config)
        lora = Lora(how, config, lora_alpha, adapter)
    gate = _Gate.of(found, section, lora, exclude, related, expect, partial=partial)
    with out.progress("export", found.manifest.nbytes) as progress:
        report = export_safetensors(
            found,
            at(target),
            section=section,
            cast=cast,
            expected=gate.expected,
            exclude=exclude,
            tied=tied,
            parts=gate.parts,
            related=related,
            lora=lora,
            masters=masters,
            progress=progress,
            **limits,
        )
    files = [{"name": name, "bytes": size} for name, size in report.files]
    out.document({"source": found.url, **asdict(report), "files": files, "compared_with": gate.name})
    out.table(("FILE", ">SIZE"), [(name, size_text(size)) for name, size in report.files])
    for name, kept in report.dropped.items():
        out.line(f"{name} is tied to {kept} and was not written")
    compared = f"complete according to {gate.name}" if gate.name else "not compared with a model's names"
    out.line(f"{report.url}: {report.tensors} tensors, {size_text(report.total_size)}, {compared}")


@command("import")
@click.argument("source")
@click.argument("target")
@click.option("--section", help="The name of the section, if SOURCE has a single one, such as the model.")
@click.option("--step", type=int, callback=checked, help="The training step to store.")
@rules_options
@rename_option
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out full names that match. Repeatable.")
def import_command(
    out: Output,
    at: Locate,
    source: str,
    target: str,
    section: str | None,
    step: int | None,
    rules: Rules | None,
    rename: Mapping[str, str] | None,
    exclude: tuple[str, ...],
) -> None:
    """Create a checkpoint at TARGET from SOURCE, which another system wrote.

    SOURCE is a safetensors file, a folder with one such file or an index, a file of torch.save, or a folder of
    torch.distributed.checkpoint. Streams in bounded memory. Nothing in a pickle is executed.
    """
    found = api.open(at(source), rename=rename, options=LoadOptions(rules=rules))
    with out.progress("import", found.manifest.nbytes) as progress:
        report = import_checkpoint(
            found,
            at(target),
            section=section,
            step=step,
            exclude=exclude,
            progress=progress,
        )
    out.document({"source": source, **asdict(report)})
    out.line(
        f"{report.url}: {report.tensors} tensors, {size_text(report.total_size)}, from {len(report.files)} file(s)"
    )


@dataclass(frozen=True)
class _Gate:
    """What an export must have, according to ``name``, and the parts that it writes in place of stored tensors."""

    expected: Expected | None = None
    parts: Mapping[str, ExportedBox] = field(default_factory=dict)
    name: str | None = None

    @classmethod
    def of(
        cls,
        found: Checkpoint,
        section: str,
        lora: Lora | None,
        exclude: Sequence[str],
        related: Mapping[str, bytes],
        expect: str | None,
        *,
        partial: bool,
    ) -> _Gate:
        if lora is not None and lora.how == "peft" and expect is None:
            return cls()
        given = parse_json(related.get(CONFIG_KEY, b"null"), CONFIG_KEY) if expect is None else _document(expect)
        document = _configuration(given)
        if expect is not None and document is None:
            return cls(_read_expected(expect), name=expect)
        if document is None or (expect is None and not is_supported(document)):
            if document is not None and not partial and not document.get("architectures"):
                raise StateError(
                    f"{CONFIG_KEY} names no architecture, so the model's names are unknown; add the architecture, "
                    f"give the names with --expect, or export what is stored with --partial"
                )
            return cls()
        where = expect or CONFIG_KEY
        model = ConfiguredModel.of(document, where)
        if section not in found.sections:
            return cls()  # the export raises
        plan = None if lora is None else LoraPlan(found, section, lora)
        selection = ExportSelection(found, section, Exclusion(exclude), "copy", {}, plan)
        parts = model.parts(selection.stored())
        if partial:
            return cls(None, parts)
        tensors, _ = replace(selection, parts=parts).choose(None, None)
        return cls(model.expected({tensor.name for tensor in tensors}), parts, where)


def _adapter_config(source: str | None, own: bytes | None) -> dict[str, Any]:
    """The content of PEFT's ``adapter_config.json``; empty if there is none."""
    option = "--adapter-config"
    document = _document(source, option) if source is not None else parse_json(own or b"{}", ADAPTER_CONFIG_KEY)
    if not isinstance(document, dict):
        raise _bad(f"{source or ADAPTER_CONFIG_KEY} is not a JSON object in a local file", option)
    return document


def _configuration(document: object) -> dict[str, Any] | None:
    """The document, if it is a model's configuration."""
    is_config = isinstance(document, dict) and ("architectures" in document or "model_type" in document)
    return document if is_config and isinstance(document, dict) else None


def _read_expected(source: str) -> Expected:
    """Return names, with shapes if ``source`` contains them.

    ``source`` is a JSON list of names, a JSON map from names to shapes (or null), an index of safetensors files, or a
    safetensors file or folder. Raises ``click.BadParameter`` for anything else, and what ``api.open`` raises.
    """
    document = _document(source)
    if document is None:
        manifest = api.open(source).manifest
        rows = manifest.section_tensors(MODEL_SECTION).tolist()
        return {manifest.tensors.fqn_of(row): manifest.tensors.shape_of(row) for row in rows}
    if isinstance(document, list) and all(isinstance(name, str) for name in document):
        return document
    if isinstance(document, dict) and isinstance(document.get("weight_map"), dict):
        return list(document["weight_map"])
    if isinstance(document, dict) and all(map(_is_shape, document.values())):
        return document
    raise _bad(f"{source} is not a list of names, a map from names to shapes, an index, or a config.json")


def _document(source: str, option: str = "--expect") -> Any:
    """The JSON document in a local file; None for a safetensors file, a folder or a URL."""
    path = Path(source)
    if source.endswith(".safetensors") or path.is_dir() or "://" in source:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(f"{source} cannot be read: {error.strerror}", option) from None
    except (ValueError, RecursionError) as error:
        raise _bad(f"{source} is not JSON: {error}", option) from None


def _is_shape(value: object) -> bool:
    return value is None or (isinstance(value, list) and all(type(n) is int and n >= 0 for n in value))


def _bad(message: str, option: str = "--expect") -> click.BadParameter:
    return click.BadParameter(message, param_hint=option)


def _export_for_torch(out: Output, source: Checkpoint, target: Location, form: TorchForm, **chosen: Any) -> None:
    """Write a checkpoint in one of torch's formats and print the report. ``chosen`` goes to the export."""
    from ..dcp.export import export_dcp  # importing torch.distributed.checkpoint takes long

    with out.progress("export", source.manifest.nbytes) as progress:
        if form == "torch":
            report = asdict(export_torch_file(source, target, progress=progress, **chosen))
            nbytes = report["nbytes"]
        else:
            report = asdict(export_dcp(source, target, progress=progress, **chosen))
            report["files"] = [{"name": name, "bytes": size} for name, size in report["files"]]
            nbytes = sum(file["bytes"] for file in report["files"])
    out.document({"source": source.url, **report})
    if report["left_out"]:
        out.line(f"left out, because only ranks other than 0 saved it: {', '.join(report['left_out'])}")
    out.line(f"{report['url']}: {report['tensors']} tensors, {size_text(nbytes)}")
