"""The simulation behind ``scale_delivery``: bytes over links, and the seconds that they take. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bytecheckpoint.geometry import Box, contiguous_runs
from bytecheckpoint.inference.parts import Part

__all__ = ["ASSUMPTIONS", "H20", "H800", "SOURCES", "Composition", "Machine", "Prediction", "broadcast", "slices"]

GPUS_PER_NODE = 8
BUCKET = 256 << 20  # bytes on the way at a time, of slices
BROADCAST_BUCKET = 8 << 30  # and of checkpoint-engine, by default
PER_BUCKET_S = 1e-3  # starting copies and waiting for events, in each stage
AGREEING_S = 0.12  # before the first byte: what checkpoint-engine publishes for gathering its metadata


@dataclass(frozen=True)
class Machine:
    """Bytes a second and direction of one GPU's links, and of a host's memory: published peaks; then what part of a
    peak is taken to be had."""

    name: str
    pcie: float = 63.0e9
    nvlink: float = 450e9
    nic: float = 50e9
    hbm: float = 3.35e12
    host_memory: float = 614e9
    pcie_share: float = 0.87
    nvlink_share: float = 0.80
    nic_share: float = 0.88
    memory_share: float = 0.70

    def had(self) -> Machine:
        """With the rates that are taken to be had."""
        return replace(
            self,
            pcie=self.pcie * self.pcie_share,
            nvlink=self.nvlink * self.nvlink_share,
            nic=self.nic * self.nic_share,
            hbm=self.hbm * self.memory_share,
            host_memory=self.host_memory * self.memory_share,
        )


H800 = Machine("H800", nvlink=200e9)
H20 = Machine("H20", hbm=4.0e12)

SOURCES = {
    "pcie": "PCI Express 5.0: 32 GT/s a lane, 16 lanes, 128b/130b: 63.0 GB/s a direction",
    "nvlink": "NVLink 4, NVIDIA H100 data sheet: 900 GB/s both directions (also H20); H800: 400 GB/s both directions",
    "nic": "NVIDIA ConnectX-7, NDR: 400 Gb/s = 50 GB/s a direction; one for each GPU, behind the same PCIe switch",
    "hbm": "NVIDIA data sheets: H100 and H800 SXM 3.35 TB/s, H20 4.0 TB/s",
    "host_memory": "two sockets of eight channels DDR5-4800: 614 GB/s",
    "pcie_share": "assumed: 50 to 57 GB/s are what pinned copies reach",
    "nic_share": "TensorHub (arXiv 2604.09107): 22 of 25 GB/s",
    "nvlink_share": "assumed",
    "memory_share": "assumed",
    "published": "checkpoint-engine, README: times of its broadcast update (the machines' links are not stated there)",
}

ASSUMPTIONS = (
    "The model's bytes lie once in the cluster, in pinned host memory, evenly on all hosts; nobody prepared slices.",
    "A part that is one stretch of its tensor goes straight to the one rank that wants it: by PCIe on the same host, "
    "else by the network from host memory into the GPU.",
    "Column slices are never sent as rows: each rank takes 1/t of the tensor in one stretch, then ranks exchange; "
    "within a host over NVLink, between hosts over the network.",
    "What several ranks want alike is taken once by shares and gathered, once over the network for each further host.",
    "Copies from the host and from the network share a GPU's PCIe link, and the switch's link to the host.",
    "Stages overlap by buckets of 256 MiB (broadcast: 8 GiB): the slowest one counts in full, the others for one "
    "bucket; 1 ms a bucket, and 0.12 s before the first.",
    "All bytes are written and read twice in device memory (into a buffer, into place), and once more each way by "
    "what engines do after loading, which overlaps with nothing.",
    "No checksums, no pause of the engine, no contention from other traffic, no stragglers.",
)


@dataclass(frozen=True)
class Composition:
    """Bytes that one rank of ``ranks`` wants: in one stretch and for it alone, as column slices for it alone, and
    also for others, of which ``share`` is its part."""

    ranks: int
    plain: float
    columns: float
    shared: float
    share: float

    @property
    def wanted(self) -> float:
        return self.plain + self.columns + self.shared

    @classmethod
    def of(cls, parts: Iterable[Part], ranks: int) -> Composition:
        """Of a rank of a tensor-parallel engine, in which ranks have equal parts of what they share."""
        plain = columns = shared = share = 0.0
        for (shape, box, dtype), count in Counter((part.shape, part.box, part.dtype) for part in parts).items():
            nbytes = count * box.numel * dtype.itemsize
            # Of a tensor that is cut into fewer parts than there are ranks, several have the same.
            others = ranks * box.numel / math.prod(shape)
            if others > 1.5:
                shared, share = shared + nbytes, share + nbytes / round(others)
            elif contiguous_runs(box, Box.whole(shape))[1] < box.numel:
                columns += nbytes
            else:
                plain += nbytes
        return cls(ranks, plain, columns, shared, share)


@dataclass(frozen=True)
class Prediction:
    """Seconds by stage, of the whole, and of the floor: wanted bytes at the published peak of the link they cross."""

    stages: dict[str, float]
    seconds: float
    floor: float


def slices(composition: Composition, gpus: int, machine: Machine) -> Prediction:
    """Each rank gets its parts."""
    had, ranks = machine.had(), composition.ranks
    local = min(GPUS_PER_NODE, gpus) / gpus  # of the model, on a rank's own host
    hosts = max(1, ranks // GPUS_PER_NODE)  # of one engine
    near = min(ranks, GPUS_PER_NODE)
    taken = composition.plain + composition.columns + composition.share
    exchanged = composition.columns * (ranks - 1) / ranks
    exchanged_near = composition.columns * (near - 1) / ranks
    gathered_far = composition.share * (hosts - 1)
    from_host = taken * local
    by_network = taken * (1 - local)
    between = exchanged - exchanged_near + gathered_far
    stages = {
        "host link": (from_host + by_network) / had.pcie,  # copies to GPUs, and sends out of host memory
        "host memory": min(gpus, GPUS_PER_NODE) * (from_host + by_network) / had.host_memory,
        "network": (by_network + between) / had.nic,
        "GPU link": (from_host + by_network + between) / had.pcie,
        "NVLink": (exchanged_near + composition.shared - composition.share - gathered_far) / had.nvlink,
        "device memory": 4 * composition.wanted / had.hbm,
    }
    after = 2 * composition.wanted / had.hbm
    floor = max(composition.wanted / machine.pcie, composition.wanted * (1 - local) / machine.nic)
    return Prediction(stages | {"after": after}, _pipelined(stages, composition.wanted / BUCKET) + after, floor)


def broadcast(model: float, composition: Composition, gpus: int, machine: Machine) -> Prediction:
    """Every GPU gets the whole model, as checkpoint-engine does: copies to GPUs, then broadcasts, which do not overlap
    (its README: on PCIe they share the link); engines cut their parts out meanwhile."""
    had = machine.had()
    hosts = max(1, gpus // GPUS_PER_NODE)
    copying = model / gpus / had.pcie
    sending = {
        "NVLink": model / had.nvlink,
        "network": (model / GPUS_PER_NODE / had.nic) if hosts > 1 else 0.0,
        "device memory": (2 * model + 2 * composition.wanted) / had.hbm,
    }
    after = 2 * composition.wanted / had.hbm
    floor = max(model / machine.nvlink, (model / GPUS_PER_NODE / machine.nic) if hosts > 1 else 0.0)
    seconds = copying + _pipelined(sending, model / BROADCAST_BUCKET) + after
    return Prediction({"host link": copying} | sending | {"after": after}, seconds, floor)


def _pipelined(stages: dict[str, float], buckets: float) -> float:
    buckets = max(1.0, buckets)
    slowest = max(stages.values())
    return AGREEING_S + slowest + (sum(stages.values()) - slowest) / buckets + PER_BUCKET_S * buckets
