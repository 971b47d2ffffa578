"""Measure what each codec makes of weights and optimizer state: ratio, and rates of one core.

    python -m benchmarks.codecs [--megabytes 32] [--rounds 5] [--json benchmarks/results/codecs.json]

Chunks have the size that a save uses. Weights are Gaussian, and shrink like trained ones; moments come from steps of
Adam with random gradients. Kinds and codecs take turns; medians are shown. Times are processor times, because nothing
here waits. Every frame is decoded and compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import results
from benchmarks.tables import Grid, show
from bytecheckpoint.codecs import find_codec
from bytecheckpoint.engine.checksums import chunk_size_for

__all__ = ["measure", "table"]

CODECS = ("zstd", "zstd-planes")
_STEPS = 20


def kinds(nbytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and a tensor of ``nbytes`` of each kind."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(nbytes // 4, generator=generator) * 0.02
    yield "weights, bf16", torch.cat([weights, weights * 1.5]).bfloat16()
    yield "weights, fp32", weights
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.Adam([parameter], lr=1e-4)
    scale = torch.rand(nbytes // 4, generator=generator) * 1e-3
    for _ in range(_STEPS):
        parameter.grad = torch.randn(nbytes // 4, generator=generator) * scale
        optimizer.step()
    yield "first moments, fp32", optimizer.state[parameter]["exp_avg"]
    yield "second moments, fp32", optimizer.state[parameter]["exp_avg_sq"]


def measure(megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """Return the ratio, and the MB/s of each round, of every kind and codec."""
    step = chunk_size_for(0)
    samples: dict[tuple[str, str], dict[str, Any]] = {}
    tensors = list(kinds(megabytes * 1_000_000 // step * step))
    for _ in range(rounds):
        for kind, tensor in tensors:
            data = memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
            chunks = [data[at : at + step] for at in range(0, len(data), step)]
            for name in CODECS:
                codec, out = find_codec(name), memoryview(bytearray(step))
                begun = time.thread_time()
                frames = [codec.encode(chunk, tensor.element_size()) for chunk in chunks]
                encoded = time.thread_time()
                decode_s = 0.0
                for chunk, frame in zip(chunks, frames):
                    at = time.thread_time()
                    codec.decode(memoryview(frame), out[: len(chunk)])
                    decode_s += time.thread_time() - at
                    assert out[: len(chunk)] == chunk
                one = samples.setdefault((kind, name), {"kind": kind, "codec": name, "encode": [], "decode": []})
                one["ratio"] = sum(map(len, frames)) / len(data)
                one["encode"].append(round(len(data) / 1e6 / (encoded - begun)))
                one["decode"].append(round(len(data) / 1e6 / decode_s))
    return list(samples.values())


def table(found: list[dict[str, Any]]) -> Grid:
    """Return the table of ``measure``'s results."""
    rows = [
        (
            one["kind"],
            one["codec"],
            f"{one['ratio']:.3f}",
            *(f"{statistics.median(one[name]):.0f}" for name in ("encode", "decode")),
        )
        for one in found
    ]
    return Grid("Codecs, one core", ("", "codec", "ratio", "encode, MB/s", "decode, MB/s"), rows)


def main() -> None:
    """Print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"megabytes": options.megabytes, "rounds": options.rounds, "threads": 1}
    command = f"python -m benchmarks.codecs --megabytes {options.megabytes} --rounds {options.rounds}"
    document = results.header(command, settings, Path(tempfile.gettempdir()))
    document["results"] = measure(options.megabytes, options.rounds)
    show(table(document["results"]), Console(width=120))
    if options.json is not None:
        options.json.write_text(json.dumps(results.publishable(document, []), indent=1) + "\n")


if __name__ == "__main__":
    main()
