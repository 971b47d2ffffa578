"""The states that are saved and loaded: tensors made from shapes, in memory like a trainer's.

Every 8-byte word of the memory is a function of its position, so a worker in any environment can fill the state and
check a load bit by bit without a second copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

__all__ = ["WORKLOADS", "Memory", "State", "TensorSpec", "Workload", "gpt2", "make"]

_ALIGNMENT = 64  # as torch's allocator: tensors do not start on page boundaries
_ODD = 0x61C8864680B583EB  # odd, so the product with every word's number is unique
_CHUNK = 1 << 18  # words processed at once; they fit into the processor's cache
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14
_SCRAMBLED = 0x5A
_MIN_DEEP_SCALE = 0.01  # smaller workloads only check that everything runs
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its section, its name in it, dtype and shape."""

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return torch.Size(self.shape).numel() * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Workload:
    """A state described by shapes."""

    name: str
    title: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)


Shapes = list[tuple[str, tuple[int, ...]]]


def gpt2(scale: float = 1.0) -> Shapes:
    """Return names and shapes of the parameters of GPT-2 small (124M)."""
    width = 768
    layers = 12 if scale >= _MIN_DEEP_SCALE else 2
    shapes: Shapes = [("transformer.wte.weight", (50257, width)), ("transformer.wpe.weight", (1024, width))]
    for layer in range(layers):
        at = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes += [(f"{at}.{norm}.weight", (width,)), (f"{at}.{norm}.bias", (width,))]
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes += [(f"{at}.{name}.weight", (rows, columns)), (f"{at}.{name}.bias", (columns,))]
    shapes += [("transformer.ln_f.weight", (width,)), ("transformer.ln_f.bias", (width,))]
    return [(name, _scaled(shape, scale)) for name, shape in shapes]


def _llama(scale: float) -> Shapes:
    """Return names and shapes of a 135M Llama: 30 layers, grouped-query attention, tied embeddings."""
    width, inner, keys = 576, 1536, 192
    shapes: Shapes = [("model.embed_tokens.weight", (49152, width))]
    for layer in range(30):
        at = f"model.layers.{layer}"
        shapes += [
            (f"{at}.self_attn.q_proj.weight", (width, width)),
            (f"{at}.self_attn.k_proj.weight", (keys, width)),
            (f"{at}.self_attn.v_proj.weight", (keys, width)),
            (f"{at}.self_attn.o_proj.weight", (width, width)),
            (f"{at}.mlp.gate_proj.weight", (inner, width)),
            (f"{at}.mlp.up_proj.weight", (inner, width)),
            (f"{at}.mlp.down_proj.weight", (width, inner)),
            (f"{at}.input_layernorm.weight", (width,)),
            (f"{at}.post_attention_layernorm.weight", (width,)),
        ]
    shapes.append(("model.norm.weight", (width,)))
    return [(name, _scaled(shape, scale)) for name, shape in shapes]


def _gpt2_adam(scale: float) -> Iterator[TensorSpec]:
    for name, shape in gpt2(scale):
        yield TensorSpec("model", name, "float32", shape)
    for name, shape in gpt2(scale):
        yield TensorSpec("optimizer", f"state.{name}.exp_avg", "float32", shape)
        yield TensorSpec("optimizer", f"state.{name}.exp_avg_sq", "float32", shape)
        yield TensorSpec("optimizer", f"state.{name}.step", "float32", ())


def _bf16_master(scale: float) -> Iterator[TensorSpec]:
    for name, shape in _llama(scale):
        yield TensorSpec("model", name, "bfloat16", shape)
    for name, shape in _llama(scale):
        for key in ("master", "exp_avg", "exp_avg_sq"):
            yield TensorSpec("optimizer", f"state.{name}.{key}", "float32", shape)


def _one_tensor(scale: float) -> Iterator[TensorSpec]:
    yield TensorSpec("model", "weight", "float32", _scaled((16384, 32768), scale))


def _tiny_tensors(scale: float) -> Iterator[TensorSpec]:
    for index in range(max(10, int(20_000 * scale))):
        kib = 4 + index * 37 % 61
        dtype = ("float32", "bfloat16")[index % 2]
        columns = 1024 // _DTYPES[dtype].itemsize
        yield TensorSpec("model", f"blocks.{index // 100}.p{index % 100}", dtype, (kib, columns))


WORKLOADS: dict[str, tuple[str, Callable[[float], Iterator[TensorSpec]]]] = {
    "gpt2-adam": ("GPT-2 124M with Adam, fp32", _gpt2_adam),
    "bf16-master": ("Llama 135M in bf16, fp32 master weights and moments", _bf16_master),
    "one-tensor": ("one tensor of 2 GiB", _one_tensor),
    "tiny-tensors": ("20,000 tensors of 4 to 64 KiB", _tiny_tensors),
}
"""By name: a title, and the tensors at a scale."""


def make(name: str, scale: float = 1.0) -> Workload:
    """Return the workload of this name, reduced to about ``scale`` of its bytes."""
    title, tensors = WORKLOADS[name]
    return Workload(name, title, tuple(tensors(scale)))


class Memory:
    """Private anonymous memory that can be released and faulted in again at the same address.

    ``huge`` requests huge pages, as staging memory does; a trainer's tensors are on ordinary pages.
    """

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        self._mapping = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=_PRIVATE)
        if huge:
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._mapping)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def touch(self) -> None:
        """Fault every page in."""
        try:
            self._mapping.madvise(_POPULATE_WRITE)
        except OSError:  # older kernel
            self.tensor[:: mmap.PAGESIZE] = 0

    def release(self) -> None:
        """Release the pages and their content."""
        self._mapping.madvise(mmap.MADV_DONTNEED)


_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class State:
    """The tensors of a workload. They remain the same objects at the same addresses in all turns."""

    def __init__(self, workload: Workload) -> None:
        self.nbytes = workload.nbytes
        self._starts = [0]
        at = _ALIGNMENT
        places = []
        for spec in workload.tensors:
            places.append(at)
            at += -(-max(spec.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._memory = Memory(at)
        self._words = self._memory.tensor[: at // 8 * 8].view(torch.int64)
        self._names = [f"{spec.section}.{spec.name}" for spec in workload.tensors]
        self._places = [*places, at]
        self.sections: dict[str, dict[str, torch.Tensor]] = {}
        self.flat: dict[str, torch.Tensor] = {}
        for spec, place in zip(workload.tensors, places):
            piece = self._memory.tensor[place : place + spec.nbytes]
            # A separate storage, like that of a real tensor: some savers write whole storages.
            tensor = torch.frombuffer(piece.numpy(), dtype=_DTYPES[spec.dtype]).view(spec.shape)
            self.sections.setdefault(spec.section, {})[spec.name] = tensor
            self.flat[f"{spec.section}.{spec.name}"] = tensor

    def fill(self) -> None:
        """Fault the memory in and write the known content."""
        self._memory.touch()
        for words, expected in self._chunks():
            words.copy_(expected)

    def scramble(self) -> None:
        """Overwrite every tensor, so that only a load can restore the content."""
        for tensor in self.flat.values():
            tensor.view(-1).view(torch.uint8).fill_(_SCRAMBLED)

    def difference(self) -> str | None:
        """Return the first tensor that differs in any bit from what ``fill`` wrote, or None."""
        at = 0
        for words, expected in self._chunks():
            if not torch.equal(words, expected):
                byte = (at + int(torch.nonzero(words != expected)[0])) * 8
                found = [i for i, (a, b) in enumerate(pairwise(self._places)) if a <= byte < b]
                return self._names[found[0]] if found else "memory between tensors"
            at += len(words)
        return None

    def release(self) -> None:
        """Release the memory until the next ``fill``."""
        self._memory.release()

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        expected = torch.empty(_CHUNK, dtype=torch.int64)
        for start in range(0, len(self._words), _CHUNK):
            stop = min(start + _CHUNK, len(self._words))
            known = torch.arange(start, stop, out=expected[: stop - start]).mul_(_ODD)
            yield self._words[start:stop], known


def _scaled(shape: tuple[int, ...], scale: float) -> tuple[int, ...]:
    return (max(1, round(shape[0] * scale)), *shape[1:]) if shape else shape
