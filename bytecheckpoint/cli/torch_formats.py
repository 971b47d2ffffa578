"""``bcp export --format dcp`` and ``--format torch``: write what torch reads without this library."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location
from ..convert.torch_file import export_torch_file
from .output import Output, size_text

__all__ = ["TorchForm", "export_for_torch"]

TorchForm = Literal["dcp", "torch"]
"""A folder of ``torch.distributed.checkpoint``, or a file of ``torch.save``."""


def export_for_torch(
    out: Output, source: Checkpoint, target: Location, form: TorchForm, max_file_bytes: int, **chosen: Any
) -> None:
    """Write a checkpoint in one of torch's formats and print the report. ``chosen`` goes to the export."""
    from ..dcp.export import export_dcp  # importing torch.distributed.checkpoint takes long

    with out.progress("export", source.manifest.nbytes) as progress:
        if form == "torch":
            report = asdict(export_torch_file(source, target, progress=progress, **chosen))
            nbytes = report["nbytes"]
        else:
            report = asdict(export_dcp(source, target, max_file_bytes=max_file_bytes, progress=progress, **chosen))
            report["files"] = [{"name": name, "bytes": size} for name, size in report["files"]]
            nbytes = sum(file["bytes"] for file in report["files"])
    out.document({"source": source.url, **report})
    if report["left_out"]:
        out.line(f"left out, because only ranks other than 0 saved it: {', '.join(report['left_out'])}")
    out.line(f"{report['url']}: {report['tensors']} tensors, {size_text(nbytes)}")
