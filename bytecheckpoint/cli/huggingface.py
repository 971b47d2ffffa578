"""``bcp export`` and ``bcp import``: to and from Hugging Face's safetensors files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import click

from .. import api
from ..export import export_safetensors
from ..importing import import_safetensors
from ..safetensors_folder import SafetensorsFolder
from .expected import read_expected
from .options import command, options_for, parse_size, prefix_renaming
from .output import Output, size_text

__all__ = ["export_command", "import_command"]

_RENAME_HELP = "Replace this prefix of names (module.= takes it away). Repeatable; the first that fits counts."


@command("export")
@click.argument("source")
@click.argument("target")
@click.option("--section", default="model", show_default=True, help="The section that is exported.")
@click.option("--max-file-size", default="5GB", show_default=True, callback=parse_size, help="No file is larger.")
@click.option("--cast", metavar="DTYPE", help="Round floating tensors to bfloat16, float16, float32 or float64.")
@click.option(
    "--expect",
    metavar="FILE",
    help="Export exactly these names: a JSON list (or map of names to shapes), an index, a config.json (needs the "
    "transformers package), or a safetensors file or folder.",
)
@click.option("--rename", multiple=True, metavar="OLD=NEW", help=_RENAME_HELP)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out exported names like this. Repeatable.")
@click.option(
    "--tied",
    type=click.Choice(["drop", "copy"]),
    default="drop",
    show_default=True,
    help="Of names that share their bytes write one, or all.",
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
    tied: Literal["drop", "copy"],
) -> None:
    """Write the model of checkpoint SOURCE to the folder TARGET as Hugging Face's libraries lay it out.

    Streaming, in bounded memory. Complete or not at all: with --expect, a name that is missing, unexpected or of
    another shape is an error (exit code 1), and nothing is written.
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
        out.line(f"{name} is tied to {kept} and was not written again")
    out.line(f"{report.url}: {report.tensors} tensors, {size_text(report.total_size)}")


@command("import")
@click.argument("source")
@click.argument("target")
@click.option("--section", default="model", show_default=True, help="The section that the tensors become.")
@click.option("--step", type=click.IntRange(0), help="The training step to record.")
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
    """Make a checkpoint at TARGET from SOURCE: a safetensors file, or a folder with one, or with an index.

    Streaming, in bounded memory. The index is held against the files, and whatever does not fit is refused.
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
