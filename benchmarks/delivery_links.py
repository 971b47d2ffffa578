"""Simulate bytes over links, and the seconds that they take, for ``scale_delivery``. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from bytecheckpoint.inference.layouts.parts import TensorBox
from bytecheckpoint.planners.extents import byte_span
from bytecheckpoint.tensors.geometry import Box

__all__ = ["ASSUMPTIONS", "H20", "H800", "SOURCES", "Composition", "Machine", "Prediction", "broadcast", "slices"]

GPUS_PER_NODE = 8
BUCKET = 256 << 20  # bytes of slices in flight
BROADCAST_BUCKET = 8 << 30  # checkpoint-engine's default
PER_BUCKET_S = 1e-3  # to start copies and wait for events, in each stage
AGREEMENT_S = 0.12  # before the first byte: checkpoint-engine's published time to gather metadata


@dataclass(frozen=True)
class Machine:
    """Published peak rates of one GPU's links and of a host's memory, in bytes per second and direction.

    The ``_share`` fields are the assumed achievable shares of these peaks.
    """

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

    def achievable(self) -> Machine:
        """Return the machine with its achievable rates."""
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
    "The cluster holds the model's bytes once, in pinned host memory, evenly on all hosts, without prepared slices.",
    "A contiguous part of a tensor goes directly to the only rank that needs it: over PCIe on the same host, otherwise "
    "over the network from host memory into the GPU.",
    "Column slices are not sent row by row: each rank receives a contiguous 1/t of the tensor, then ranks exchange; "
    "within a host over NVLink, between hosts over the network.",
    "Bytes that several ranks need are received once, in shares, and gathered; over the network once per further host.",
    "Copies from the host and from the network share a GPU's PCIe link, and the switch's link to the host.",
    "Stages overlap by buckets of 256 MiB (broadcast: 8 GiB): the slowest one counts in full, the others for one "
    "bucket; 1 ms a bucket, and 0.12 s before the first.",
    "All bytes are written and read twice in device memory (into a buffer, into place), and once more each way by "
    "what engines do after loading, which overlaps with nothing.",
    "No checksums, no pause of the engine, no contention from other traffic, no stragglers.",
)


@dataclass(frozen=True)
class Composition:
    """Bytes that one of ``ranks`` ranks needs.

    ``plain`` bytes are contiguous and for this rank only, ``columns`` are column slices for this rank only, and
    ``shared`` bytes are needed by several ranks; this rank's share of them is ``share``.
    """

    ranks: int
    plain: float
    columns: float
    shared: float
    share: float

    @property
    def needed(self) -> float:
        return self.plain + self.columns + self.shared

    @classmethod
    def of(cls, parts: Iterable[TensorBox], ranks: int) -> Composition:
        """Return the composition of one rank of a tensor-parallel engine. Ranks have equal parts of shared bytes."""
        plain = columns = shared = share = 0.0
        for (shape, box, dtype), count in Counter((part.shape, part.box, part.dtype) for part in parts).items():
            nbytes = count * box.numel * dtype.itemsize
            # If a tensor is split into fewer parts than there are ranks, several ranks have the same part.
            others = ranks * box.numel / math.prod(shape)
            if others > 1.5:
                shared, share = shared + nbytes, share + nbytes / round(others)
            else:
                first, stop = byte_span(box, Box.whole(shape), 1)
                if stop - first > box.numel:
                    columns += nbytes
                else:
                    plain += nbytes
        return cls(ranks, plain, columns, shared, share)


@dataclass(frozen=True)
class Prediction:
    """Seconds by stage, in total, and of the floor: the needed bytes at the published peak of the slowest link."""

    stages: dict[str, float]
    seconds: float
    floor: float


def slices(composition: Composition, gpus: int, machine: Machine) -> Prediction:
    """Predict the time if each rank receives only its parts."""
    rates, ranks = machine.achievable(), composition.ranks
    local = min(GPUS_PER_NODE, gpus) / gpus  # share of the model on the rank's host
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
        "host link": (from_host + by_network) / rates.pcie,  # copies to GPUs, and sends out of host memory
        "host memory": min(gpus, GPUS_PER_NODE) * (from_host + by_network) / rates.host_memory,
        "network": (by_network + between) / rates.nic,
        "GPU link": (from_host + by_network + between) / rates.pcie,
        "NVLink": (exchanged_near + composition.shared - composition.share - gathered_far) / rates.nvlink,
        "device memory": 4 * composition.needed / rates.hbm,
    }
    after = 2 * composition.needed / rates.hbm
    floor = max(composition.needed / machine.pcie, composition.needed * (1 - local) / machine.nic)
    return Prediction(stages | {"after": after}, _pipelined(stages, composition.needed / BUCKET) + after, floor)


def broadcast(model: float, composition: Composition, gpus: int, machine: Machine) -> Prediction:
    """Predict the time if every GPU receives the whole model, as with checkpoint-engine.

    Copies to GPUs and broadcasts do not overlap (according to its README they share the PCIe link). Engines extract
    their parts during the broadcasts.
    """
    rates = machine.achievable()
    hosts = max(1, gpus // GPUS_PER_NODE)
    copying = model / gpus / rates.pcie
    sending = {
        "NVLink": model / rates.nvlink,
        "network": (model / GPUS_PER_NODE / rates.nic) if hosts > 1 else 0.0,
        "device memory": (2 * model + 2 * composition.needed) / rates.hbm,
    }
    after = 2 * composition.needed / rates.hbm
    floor = max(model / machine.nvlink, (model / GPUS_PER_NODE / machine.nic) if hosts > 1 else 0.0)
    seconds = copying + _pipelined(sending, model / BROADCAST_BUCKET) + after
    return Prediction({"host link": copying} | sending | {"after": after}, seconds, floor)


def _pipelined(stages: dict[str, float], buckets: float) -> float:
    buckets = max(1.0, buckets)
    slowest = max(stages.values())
    return AGREEMENT_S + slowest + (sum(stages.values()) - slowest) / buckets + PER_BUCKET_S * buckets
