"""Loads into tensors on a CUDA device, through pinned bounce buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp

pytestmark = pytest.mark.gpu


def _content() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(3000, 1111, generator=generator),
        "half": torch.randn(513, 77, generator=generator).to(torch.bfloat16),
        "small": torch.randn(5, generator=generator),
        "scalar": torch.tensor(3.0),
        "whole": torch.arange(1000),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "checkpoint"
    bcp.save(path, {"model": _content()})
    return path


@pytest.mark.parametrize("verify", [True, False])
def test_bit_for_bit(saved: Path, device: torch.device, verify: bool) -> None:
    state = {"model": {name: torch.zeros_like(tensor, device=device) for name, tensor in _content().items()}}
    for _ in range(3):  # buffers are used again
        bcp.load(saved, state, options=bcp.LoadOptions(verify=verify))
        for name, tensor in _content().items():
            assert torch.equal(state["model"][name].cpu(), tensor), name
            state["model"][name].zero_()


def test_casts_strides_and_slices(saved: Path, device: torch.device) -> None:
    content = _content()
    checkpoint = bcp.open(saved)
    large = checkpoint["model.large"]
    for box in ((slice(None), slice(100, 107)), (slice(2, 2999),), (slice(None), 5)):
        picked = large[box]
        assert torch.equal(picked, content["large"][box])
    state = {
        "model": {
            "large": torch.zeros(1111, 3000, device=device).t(),
            "half": torch.zeros(513, 77, device=device, dtype=torch.float32),
            "small": torch.zeros(10, device=device)[::2],
            "scalar": torch.zeros((), device=device),
            "whole": torch.zeros(1000, dtype=torch.int64, device=device),
        }
    }
    bcp.load(saved, state)
    for name, tensor in content.items():
        assert torch.equal(state["model"][name].cpu().to(tensor.dtype), tensor), name


def test_kernels_given_before_see_the_old_values(saved: Path) -> None:
    """A load on a side stream waits for what that stream was given."""
    content = _content()
    target = torch.full((3000, 1111), 7.0, device="cuda")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        before = target.clone()
        bcp.load(saved, {"model": {**{n: torch.zeros_like(t) for n, t in content.items()}, "large": target}})
    torch.cuda.synchronize()
    assert torch.equal(before.cpu(), torch.full((3000, 1111), 7.0))
    assert torch.equal(target.cpu(), content["large"])
