"""The toy of an engine's model with matrices in 8 bits and a scale for each block, and how such weights are made."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from toy_engine import EXPERTS, HIDDEN, ToyModel, ToyTrainee

QUANTIZED = ("q.weight", "k.weight", "v.weight", "out.weight", "experts")


class BlockToyModel(ToyModel):
    """``blocks`` must cut no worker's part of a matrix."""

    def __init__(self, tp: int, rank: int, dtype: torch.dtype, blocks: tuple[int, int]) -> None:
        super().__init__(tp, rank, dtype)
        del self.turned
        rows, columns = blocks

        def matrix(name: str, *shape: int) -> None:
            quantized = torch.zeros(shape, dtype=torch.float8_e4m3fn)
            setattr(self, name, nn.Parameter(quantized, requires_grad=False))
            grid = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
            setattr(self, f"{name}_scale_inv", nn.Parameter(torch.zeros(grid), requires_grad=False))

        matrix("qkv", 3 * self.part, HIDDEN)
        matrix("out", HIDDEN, self.part)
        matrix("gate_up", EXPERTS, 2 * self.part, HIDDEN)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for full, tensor in weights:
            name = full.removesuffix("_scale_inv")
            suffix = full.removeprefix(name)
            if name not in QUANTIZED:
                loaded |= super().load_weights(iter([(full, tensor)]))
            elif name == "out.weight":
                self._fill("out" + suffix, 0, 1, 1, tensor)
            elif name == "experts":
                for expert in range(EXPERTS):
                    for number, half in enumerate(tensor[expert].chunk(2)):
                        target = getattr(self, "gate_up" + suffix).data[expert]
                        self._narrow(target, number, 2, 0).copy_(self._narrow(half, self.rank, self.tp, 0))
            else:
                self._fill("qkv" + suffix, "qkv".index(name[0]), 3, 0, tensor)
        return loaded

    def _fill(self, name: str, number: int, of: int, dim: int, tensor: torch.Tensor) -> None:
        target = getattr(self, name).data
        self._narrow(target, number, of, dim).copy_(self._narrow(tensor, self.rank, self.tp, dim))

    @staticmethod
    def _narrow(tensor: torch.Tensor, number: int, of: int, dim: int) -> torch.Tensor:
        size = tensor.shape[dim] // of
        return tensor.narrow(dim, number * size, size)


def reference(tensor: torch.Tensor, blocks: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantised block by block, in the words of vLLM's ``per_block_cast_to_fp8``."""
    if tensor.ndim > 2:
        pairs = [reference(one, blocks) for one in tensor]
        return torch.stack([q.view(torch.uint8) for q, _ in pairs]).view(torch.float8_e4m3fn), torch.stack(
            [scales for _, scales in pairs]
        )
    rows, columns = (-(-size // block) for size, block in zip(tensor.shape, blocks, strict=True))
    quantized, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = (
                slice(row * blocks[0], (row + 1) * blocks[0]),
                slice(column * blocks[1], (column + 1) * blocks[1]),
            )
            scale = tensor[at].abs().float().amax().clamp(1e-4) / 448.0
            scales[row, column] = scale
            quantized[at] = (tensor[at].float() * (1.0 / scale)).to(torch.float8_e4m3fn)
    return quantized, scales


def quantized_state(trainee: ToyTrainee, blocks: tuple[int, int]) -> dict[str, torch.Tensor]:
    """As a checkpoint of the quantised model has it."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in trainee.state_dict().items():
        if name in QUANTIZED:
            state[name], state[f"{name}_scale_inv"] = reference(tensor.detach(), blocks)
        else:
            state[name] = tensor.detach()
    return state


def block_digests(trainee: ToyTrainee, tp: int, blocks: tuple[int, int]) -> list[str]:
    """What the workers hold that serve it."""
    found = []
    for rank in range(tp):
        model = BlockToyModel(tp, rank, torch.float32, blocks)
        model.load_weights(iter(quantized_state(trainee, blocks).items()))
        found.append(model.digest())
    return found
