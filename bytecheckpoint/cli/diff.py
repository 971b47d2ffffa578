"""``bcp diff``: the differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from .. import api
from ..convert.diff import DiffReport, diff
from .options import EXIT_NEGATIVE, command, options_for
from .output import Output, size_text

__all__ = ["diff_command"]


@command("diff")
@click.argument("a")
@click.argument("b")
@click.option(
    "--values/--no-values",
    "values",
    default=True,
    help="Compare elements and plain values, or only names, shapes and dtypes.",
)
@click.option("--rtol", type=float, default=0.0, help="Tolerance, relative to the value in B.")
@click.option("--atol", type=float, default=0.0, help="Absolute tolerance.")
def diff_command(
    out: Output, options: Mapping[str, Any], a: str, b: str, values: bool, rtol: float, atol: float
) -> None:
    """Compare the checkpoints A and B, whatever their layouts: names, shapes, dtypes, elements and plain values.

    Elements are equal if their bits are equal or their difference is within the tolerances. Shards with equal checksums
    are not read; run verify to check the files against the checksums. Exits with 1 if there is a difference.
    """
    left = api.open(a, storage_options=options_for(a, options))
    right = api.open(b, storage_options=options_for(b, options))
    with out.progress("diff", left.manifest.nbytes) as progress:
        report = diff(left, right, values=values, rtol=rtol, atol=atol, progress=progress)
    out.document(_document(report))
    _print(out, report)
    if not report.same:
        raise click.exceptions.Exit(EXIT_NEGATIVE)


def _document(report: DiffReport) -> dict[str, Any]:
    return {
        "a": report.a,
        "b": report.b,
        "same": report.same,
        "only_a": list(report.only_a),
        "only_b": list(report.only_b),
        "tensors": [
            {
                "name": one.name,
                "kind": one.kind,
                "a": one.a,
                "b": one.b,
                "differing": one.differing,
                "elements": one.elements,
                "max_abs": one.max_abs,
            }
            for one in report.tensors
        ],
        "values": [{"name": one.name, "a": one.a, "b": one.b} for one in report.values],
        "compared": report.compared,
        "skipped": report.skipped,
        "bytes_read": report.bytes_read,
    }


def _print(out: Output, report: DiffReport) -> None:
    for url, names in ((report.a, report.only_a), (report.b, report.only_b)):
        for name in names:
            out.line(f"{name}: only in {url}")
    for one in report.tensors:
        metas = one.a if one.a == one.b else f"{one.a} and {one.b}"
        counted = "" if one.differing is None else f", {one.differing} of {one.elements} elements differ"
        largest = "" if not one.differing else f", by at most {one.max_abs:.6g}"
        out.line(f"{one.name}: {one.kind}: {metas}{counted}{largest}")
    for value in report.values:
        out.line(f"{value.name}: value: {value.a} and {value.b}")
    read = f"{report.compared} compared, {report.skipped} of them by checksum, {size_text(report.bytes_read)} read"
    out.line(f"{'identical' if report.same else 'different'}: {read}")
