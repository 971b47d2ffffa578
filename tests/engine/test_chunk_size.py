"""The default number of bytes per checksum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sorted_arguments import saving

import bytecheckpoint as bcp
from bytecheckpoint.engine.checksums import chunk_size_for


@pytest.mark.parametrize(
    ("nbytes", "chunk_size"),
    [(0, 256 << 10), (1 << 40, 256 << 10), ((1 << 40) + 1, 512 << 10), (14 * 10**12, 4 << 20)],
)
def test_chunks_are_small_and_not_too_many(nbytes: int, chunk_size: int) -> None:
    assert chunk_size_for(nbytes) == chunk_size


def test_a_save_uses_the_given_or_the_default_chunk_size(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.arange(200_000.0)}}
    for name, options, expected in (("a", {}, 256 << 10), ("b", {"chunk_size": 1000}, 1000), ("c", {}, 256 << 10)):
        bcp.save(tmp_path / name, state, **saving(**options))
        manifest = bcp.open(tmp_path / name).manifest
        assert manifest.files.chunk_size.tolist() == [expected]
        assert len(manifest.checksums) == -(-800_000 // expected)
