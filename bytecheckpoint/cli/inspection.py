"""``bcp inspect``, which reads the manifest only, and ``bcp verify``, which reads everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import click
import numpy as np

from .. import api
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.location import Location
from ..checkpoint.selection import SimilarNames
from ..checkpoint.values import unread_values
from ..codecs import PlainCodec
from ..foreign.opening import CheckpointSource
from ..format.manifest.envelope import FORMAT_VERSION
from ..loading.options import LoadOptions
from ..rules import Rules
from ..runtime.messages import listed
from ..tensors.dtypes import DTYPES
from .options import EXIT_NEGATIVE, Locate, command
from .output import Output, count_text, plain, size_text
from .rules_options import rules_options
from .values import print_values, values_of

_MAX_VALUE_CHARACTERS = 160  # in the table; --json prints values in full


@command("inspect", excludes={"--tensor": ["--no-tensors"], "--shards": ["--no-tensors"]})
@click.argument("checkpoint")
@click.option(
    "-t",
    "--tensor",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Only tensors that match (model.*). Repeatable.",
)
@click.option("--tensors/--no-tensors", "tensors", default=True, help="Show the table of tensors.")
@click.option(
    "--shards",
    is_flag=True,
    help="Show every shard: its box, the location of its bytes, and the rank that wrote it.",
)
@click.option("--files", is_flag=True, help="Show every file: its size, and the rank that wrote it.")
@click.option("--values", is_flag=True, help="Show plain values. Pickled values are listed, but never loaded.")
@rules_options
def inspect_command(
    out: Output,
    at: Locate,
    checkpoint: str,
    patterns: Sequence[str],
    rules: Rules | None,
    *,
    tensors: bool,
    shards: bool,
    files: bool,
    values: bool,
) -> None:
    """Show the contents of CHECKPOINT: tensors, shapes, dtypes, shards, sizes, and which rank wrote what.

    With --rules, show the rule of each stored tensor, and what it makes of it.
    """
    found = api.open(at(checkpoint), options=LoadOptions(rules=rules))
    document = _summary(found)
    if rules is not None:
        document["rules"] = list(_explained(at(checkpoint), rules))
    names = found.manifest.tensors.names
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = SimilarNames(names).nearest(pattern)
            raise click.BadParameter(f"{pattern!r} matches no tensor{hint}", param_hint="--tensor")
    selected = [
        row for row, name in enumerate(names) if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    document["tensors"] = [_tensor(found, row, with_shards=shards) for row in selected] if tensors or shards else []
    if files:
        document["files"] = _files(found)
    if values:
        document["values"] = values_of(found)
    out.document(document)
    _print_summary(out, document)
    _print_rules(out, document.get("rules", []))
    if shards:
        _print_shards(out, document["tensors"])
    elif tensors:
        rows = [
            (t["name"], t["dtype"], t["shape"], t["shard_count"], size_text(t["bytes"])) for t in document["tensors"]
        ]
        out.table(("TENSOR", "DTYPE", "SHAPE", ">SHARDS", ">SIZE"), rows)
    if files:
        _print_files(out, document["files"])
    print_values(out, document.get("values", []), _MAX_VALUE_CHARACTERS)


@command("verify")
@click.argument("checkpoint")
def verify_command(out: Output, at: Locate, checkpoint: str) -> None:
    """Check every byte of CHECKPOINT against its checksum. Prints each damaged file, tensor and byte range.

    Exits with 1 if a data file is damaged, with 4 if the manifest is, because then nothing else can be checked.
    """
    found = api.open(at(checkpoint))
    files = found.manifest.files
    with out.progress("verify", int((files.head_length + files.data_size).sum())) as progress:
        report = found.verify(progress)
    out.document({**asdict(report), "ok": report.ok})
    for problem in report.problems:
        out.line(problem)
    if not report.ok:
        out.line(f"{found.url}: {len(report.problems)} problem(s) in {report.files} file(s)")
        raise click.exceptions.Exit(EXIT_NEGATIVE)
    out.line(f"{found.url}: all {report.files} file(s) are intact ({size_text(report.bytes_checked)})")


def _summary(found: Checkpoint) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "url": found.url,
        "step": found.step,
        "created": found.created,
        "world_size": found.world_size,
        "system": found.index.system,
        "format_version": FORMAT_VERSION,
        "library_version": manifest.library_version,
        "attempt": manifest.attempt,
        "metadata": plain(found.metadata),
        "bytes": manifest.file_bytes,
        "codecs": _codecs(found),
        "shared": _shared(found),
        "file_count": len(manifest.files),
        "tensor_count": len(manifest.tensors),
        "shard_count": len(manifest.shards),
        "sections": [_section(found, index) for index in range(len(manifest.sections))],
        "aliases": dict(found.aliases),
        "not_read": {} if found.index.is_own else unread_values(found.index.values()),
    }


def _codecs(found: Checkpoint) -> list[dict[str, Any]]:
    """The codecs of encoded files, the bytes of their tensors, and what remains of these."""
    files, data_size = found.manifest.flattened().files, found.manifest.files.data_size.tolist()
    encoded = [(codec, row) for row, codec in enumerate(files.codec) if codec not in ("raw", PlainCodec.name)]
    return [
        {
            "codec": name,
            "bytes": sum(int(files.size[row] - files.head_length[row]) for codec, row in encoded if codec == name),
            "tensor_bytes": sum(data_size[row] for codec, row in encoded if codec == name),
        }
        for name in sorted({codec for codec, _ in encoded})
    ]


def _shared(found: Checkpoint) -> list[dict[str, Any]]:
    """The older saves to whose files this checkpoint refers, and the bytes that it does not store itself."""
    frames, nbytes = found.manifest.files.frames, dict[str, int]()
    if frames is not None:
        sums = np.bincount(frames.source, frames.length, minlength=len(frames.references.name) + 1)[1:]
        for name, size in zip(frames.references.name, sums.tolist(), strict=True):
            attempt = name.partition("/")[0]
            nbytes[attempt] = nbytes.get(attempt, 0) + int(size)
    return [{"attempt": attempt, "bytes": size} for attempt, size in sorted(nbytes.items())]


def _section(found: Checkpoint, index: int) -> dict[str, Any]:
    manifest = found.manifest
    section = manifest.sections[index]
    rows = manifest.section_tensors(section.name)
    nbytes = manifest.shard_nbytes[(manifest.tensors.section == index)[manifest.shards.tensor]]
    elements = manifest.tensors.numel()[rows]
    by_dtype = {
        dtype.name: int(elements[manifest.tensors.dtype[rows] == dtype.code].sum()) * dtype.itemsize
        for dtype in DTYPES.values()
    }
    return {
        "name": section.name,
        "kind": section.kind,
        "tensors": len(rows),
        "elements": int(elements.sum()),
        "tensor_bytes": int(nbytes.sum()),
        "dtypes": {name: size for name, size in sorted(by_dtype.items(), key=lambda one: -one[1]) if size},
    }


def _tensor(found: Checkpoint, row: int, *, with_shards: bool) -> dict[str, Any]:
    manifest = found.manifest
    meta, shard_rows = manifest.tensors.meta_of(row), manifest.shards_of(row)
    document: dict[str, Any] = {
        "name": manifest.tensors.names[row],
        "dtype": str(meta.dtype),
        "shape": list(meta.shape),
        "bytes": meta.nbytes,
        "shard_count": shard_rows.stop - shard_rows.start,
        "rank": int(manifest.scope[row]) if manifest.scope[row] >= 0 else None,
    }
    if with_shards:
        document["shards"] = [_shard(found, shard) for shard in range(shard_rows.start, shard_rows.stop)]
    return document


def _shard(found: Checkpoint, shard: int) -> dict[str, Any]:
    at, box = found.manifest.byte_meta(shard), found.manifest.shards.box_of(shard)
    return {
        "offsets": list(box.offsets),
        "lengths": list(box.lengths),
        "file": at.file,
        "rank": int(found.manifest.files.rank[int(found.manifest.shard_file[shard])]),
        "offset": at.offset,
        "bytes": at.length,
    }


def _files(found: Checkpoint) -> list[dict[str, Any]]:
    files = found.manifest.files
    shards = np.bincount(found.manifest.shard_file, minlength=len(files))
    return [
        {
            "name": name,
            "section": found.manifest.section_name(int(files.section[row])),
            "kind": files.kind[row],
            "rank": int(files.rank[row]),
            "bytes": int(files.size[row]),
            "codec": files.codec[row],
            "shard_count": int(shards[row]),
        }
        for row, name in enumerate(files.name)
    ]


def _print_summary(out: Output, document: Mapping[str, Any]) -> None:
    out.line(document["url"])
    models = [one for one in document["sections"] if one["kind"] == "module" or one["name"] == "model"]
    if any(one["elements"] for one in models):
        model = _total(models, "")
        shares = _shares(model)
        out.line(f"  {count_text(model['elements'])} parameters, {size_text(model['tensor_bytes'])}, {shares}")
    size = f"{size_text(document['bytes'])} in {document['file_count']} file(s)"
    if document["library_version"]:
        out.line(f"  step {_text(document['step'])}, saved {document['created']} by {document['world_size']} rank(s)")
        out.line(f"  format {document['format_version']}, bytecheckpoint {document['library_version']}")
        out.line(f"  {size} of {document['attempt']}")
    else:
        out.line(
            f"  step {_text(document['step'])}, written by {document['system']} on {document['world_size']} rank(s)"
        )
        out.line(f"  {size}")
    for one in document["codecs"]:
        ratio = one["bytes"] / max(one["tensor_bytes"], 1)
        out.line(f"  codec {one['codec']}: {ratio:.2f} of {size_text(one['tensor_bytes'])}")
    for one in document["shared"]:
        out.line(f"  shared: {size_text(one['bytes'])} are in files of {one['attempt']}")
    if document["not_read"]:
        out.line(f"  not read: {listed([f'{name} ({what})' for name, what in document['not_read'].items()])}")
    if document["metadata"]:
        out.line(f"  metadata {document['metadata']}")
    out.line()
    sections = [*document["sections"]]
    if len(sections) > 1:
        sections.append(_total(sections, "all"))
    rows = [
        (s["name"], s["kind"], s["tensors"], count_text(s["elements"]), size_text(s["tensor_bytes"]), _shares(s))
        for s in sections
    ]
    out.table(("SECTION", "KIND", ">TENSORS", ">ELEMENTS", ">SIZE", "DTYPES"), rows)
    for alias, name in document["aliases"].items():
        out.line(f"{alias} is tied to {name}")
    out.line()


def _total(sections: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for section in sections:
        dtypes.update(section["dtypes"])
    sums = {key: sum(section[key] for section in sections) for key in ("tensors", "elements", "tensor_bytes")}
    return {"name": name, "kind": "", **sums, "dtypes": dict(dtypes.most_common())}


def _shares(section: Mapping[str, Any]) -> str:
    """``bfloat16 54 %, float32 46 %``, without what rounds to nothing."""
    dtypes: Mapping[str, int] = section["dtypes"]
    shares = {name: round(100 * size / sum(dtypes.values())) for name, size in dtypes.items()}
    return ", ".join(f"{name} {share} %" for name, share in shares.items() if share)


def _print_shards(out: Output, tensors: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (t["name"], s["offsets"], s["lengths"], s["rank"], s["file"].rpartition("/")[2], s["offset"], s["bytes"])
        for t in tensors
        for s in t["shards"]
    ]
    out.table(("TENSOR", "OFFSETS", "LENGTHS", ">RANK", "FILE", ">AT", ">BYTES"), rows)


def _print_files(out: Output, files: Sequence[Mapping[str, Any]]) -> None:
    out.line()
    rows = [
        (f["name"], f["section"], f["kind"], f["codec"], f["rank"], f["shard_count"], size_text(f["bytes"]))
        for f in files
    ]
    out.table(("FILE", "SECTION", "KIND", "CODEC", ">RANK", ">SHARDS", ">SIZE"), rows)


def _explained(location: Location, rules: Rules) -> Iterator[dict[str, Any]]:
    """The rule of each stored tensor, and the boxes of tensors that it is."""
    stored, resolution = CheckpointSource(location, location.open(), rules).explain()
    for source, held in zip(stored.sources, resolution.by_source(), strict=True):
        rule = rules.rule_of(source.name)
        assert rule is not None
        yield {
            "stored": source.name,
            "shape": list(source.shape),
            "rank": source.place,
            "kind": rule.kind,
            "match": rule.match,
            "boxes": [
                {"tensor": name, "offsets": list(region.box.offsets), "lengths": list(region.box.lengths)}
                for name, region in held
            ],
        }


def _print_rules(out: Output, rules: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for one in rules:
        rank = ", ".join(f"{axis}={index}" for axis, index in one["rank"].items()) or "-"
        stored = (one["stored"], one["shape"], rank, f"{one['kind']} {one['match']}")
        rows += [(*stored, box["tensor"], box["offsets"], box["lengths"]) for box in one["boxes"]]
        rows += [] if one["boxes"] else [(*stored, "-", "-", "-")]
    out.table(("STORED", "SHAPE", "RANK", "RULE", "TENSOR", "OFFSETS", "LENGTHS"), rows)
    if rules:
        out.line()


def _text(value: object) -> str:
    return "-" if value is None else str(value)
