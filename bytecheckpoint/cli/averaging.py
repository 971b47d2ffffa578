"""``bcp average``: average the weights of several checkpoints."""

from __future__ import annotations

from dataclasses import asdict

import click

from .. import api
from ..convert.average import average
from .options import Locate, checked, command
from .output import Output, size_text

__all__ = ["average_command"]


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    try:
        return None if value is None else [float(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0.5,0.3,0.2") from None


@command("average")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE SOURCE...")
@click.option("--output", "target", required=True, metavar="TARGET", help="Where to put the new checkpoint.")
@click.option("--weights", callback=_numbers, metavar="N,N,...", help="A weight for each SOURCE. By default all equal.")
@click.option(
    "--section", "sections", multiple=True, default=("model",), show_default=True, help="What to average. Repeatable."
)
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out full names that match. Repeatable.")
@click.option("--step", type=int, callback=checked, help="The training step to store.")
def average_command(
    out: Output,
    at: Locate,
    sources: tuple[str, ...],
    target: str,
    weights: list[float] | None,
    sections: tuple[str, ...],
    exclude: tuple[str, ...],
    step: int | None,
) -> None:
    """Create a checkpoint with the average of the tensors of two or more checkpoints, in bounded memory.

    Sums in float32 or float64 and rounds once to the stored dtype. Names, shapes, dtypes, plain values and integers
    must be equal; otherwise all differences are listed (exit code 1) and nothing is written.
    """
    found = [api.open(at(source)) for source in sources]
    with out.progress("average", found[0].manifest.nbytes) as progress:
        report = average(
            found,
            at(target),
            weights=weights,
            sections=sections,
            exclude=exclude,
            step=step,
            progress=progress,
        )
    out.document({"sources": [one.url for one in found], **asdict(report)})
    copied = f", {report.copied} equal and copied" if report.copied else ""
    out.line(f"{report.url}: {report.averaged} tensors averaged{copied}, {size_text(report.bytes_read)} read")
