"""``bcp export`` and ``bcp import``: write and read safetensors files in the layout of Hugging Face libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import click

from .. import api
from ..convert.export import export_safetensors
from ..convert.importing import import_safetensors
from ..foreign.safetensors_folder import SafetensorsFolder
from .expected_names import read_expected
from .options import command, options_for, parse_size, prefix_renaming
from .output import Output, size_text

__all__ = ["export_command", "import_command"]

TiedNames = Literal["drop", "copy"]
"""Whether an export writes only one of several tied names, or all of them."""

_RENAME_HELP = "Replace a prefix of names (module.= removes it). Repeatable; the first matching one is used."


@command("export")
@click.argument("source")
@click.argument("target")
@click.option("--section", default="model", show_default=True, help="The section to export.")
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
@click.option("--rename", multiple=True, metavar="OLD=NEW", help=_RENAME_HELP)
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
    section: str,
    max_file_size: int,
    cast: str | None,
    expect: str | None,
    rename: Sequence[str],
    exclude: Sequence[str],
    tied: TiedNames,
) -> None:
    """Write the model of checkpoint SOURCE to the folder TARGET, in the layout of Hugging Face libraries.

    Streams in bounded memory. With --expect, nothing is written (exit code 1) if a name is missing or unexpected, or
    has a different shape.
    """
    found = api.open(source, storage_options=options_for(source, options))
    with out.progress("export", found.manifest.nbytes) as progress:
        report = export_safetensors(
            found,
            target,
            section=section,
            max_file_bytes=max_file_size,
            cast=cast,
            expected=None if expect is None else read_expected(expect),
            rename=prefix_renaming(tuple(rename)),
            exclude=tuple(exclude),
            tied=tied,
            progress=progress,
            storage_options=options_for(target, options),
        )
    out.document(
        {
            "source": found.url,
            "url": report.url,
            "files": [{"name": name, "bytes": size} for name, size in report.files],
            "tensors": report.tensors,
            "total_size": report.total_size,
            "dropped": dict(report.dropped),
            "cast": report.cast,
            "bytes_read": report.bytes_read,
        }
    )
    out.table(("FILE", ">SIZE"), [(name, size_text(size)) for name, size in report.files])
    for name, kept in report.dropped.items():
        out.line(f"{name} is tied to {kept} and was not written")
    out.line(f"{report.url}: {report.tensors} tensors, {size_text(report.total_size)}")


@command("import")
@click.argument("source")
@click.argument("target")
@click.option("--section", default="model", show_default=True, help="The section in which to store the tensors.")
@click.option("--step", type=click.IntRange(0), help="The training step to store.")
@click.option("--rename", multiple=True, metavar="OLD=NEW", help=_RENAME_HELP)
def import_command(
    out: Output,
    options: Mapping[str, Any],
    source: str,
    target: str,
    section: str,
    step: int | None,
    rename: Sequence[str],
) -> None:
    """Create a checkpoint at TARGET from SOURCE: a safetensors file, or a folder with one such file or an index.

    Streams in bounded memory. An index must match its files exactly.
    """
    total = SafetensorsFolder(source, storage_options=options_for(source, options)).nbytes
    with out.progress("import", total) as progress:
        report = import_safetensors(
            source,
            target,
            section=section,
            step=step,
            rename=prefix_renaming(tuple(rename)),
            progress=progress,
            source_options=options_for(source, options),
            storage_options=options_for(target, options),
        )
    out.document(
        {
            "source": source,
            "url": report.url,
            "section": report.section,
            "files": list(report.files),
            "tensors": report.tensors,
            "total_size": report.total_size,
        }
    )
    out.line(
        f"{report.url}: {report.tensors} tensors, {size_text(report.total_size)}, from {len(report.files)} file(s)"
    )
