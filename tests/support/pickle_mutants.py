"""Damaged pickles and archives of ``torch.save``: make them from a seed, read them, and watch what the reader does.

As a script (``seed first last``), it prints what became of the mutants, which files it opened or imported, and how much
memory it took, as JSON.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import resource
import sys
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bytecheckpoint.errors import BytecheckpointError
from bytecheckpoint.foreign.archives.torch_archive import read_archive
from bytecheckpoint.foreign.pickles.interpreter import interpret
from bytecheckpoint.foreign.pickles.records import Instance, Storage, TensorRef
from bytecheckpoint.storage_backends.memory import MemoryBackend

FORBIDDEN = ("import", "open", "exec", "compile", "os.", "subprocess.", "socket.", "ctypes.", "pickle.", "marshal.")
"""Events of audit hooks begin like this if something is imported, opened or run."""


def sources() -> dict[str, bytes]:
    """Return valid files: archives, an old torch file, and plain pickles."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    nested = {
        "a": [torch.arange(6).view(2, 3).t(), (1, 2.5, None, True)],
        "b": OrderedDict(x={1, 2}, y=b"bytes", z=1j),
        "n": np.arange(5),
        "d": torch.bfloat16,
        "s": torch.Size([2, 3]),
        "big": 2**100,
    }
    metadata = Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(torch.float32),
                torch.Size([4, 3]),
                [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)],
            ),
            "step": BytesStorageMetadata(),
        },
        {"w": ("model", "w")},
        {MetadataIndex("w", torch.Size([row, 0]), row): _StorageInfo("__0_0.distcp", row, 99) for row in (0, 2)},
    )
    found = {
        "state_dict.pt": saved(model.state_dict()),
        "optimizer.pt": saved(optimizer.state_dict()),
        "nested.pt": saved(nested),
        "nested4.pt": saved(nested, pickle_protocol=4),
        "metadata": pickle.dumps(metadata, protocol=4),
        "values": pickle.dumps([nested["b"], nested["n"], 2**100, "text", {"x": [1, 2]}], protocol=2),
        "framed": pickle.dumps([nested["b"], 1.5, "text", {"x": [1, 2]}, bytearray(3)], protocol=5),
    }
    return found


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


OPCODES = bytes(ord(one) for one in "(.0123FIJKLMNPQRSTUVXabcdeghijloprstu]}GqBC") + bytes(range(0x80, 0x99))
"""All of pickle, valid and not."""

CRAFTED = (
    b"cos\nsystem\n",
    b"cbuiltins\nexec\n",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0" * 8,
    b"PK\5\6",
    b"data/0",
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a damaged copy."""
    result = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(result) or 1)
        kind = rng.randrange(8)
        if kind == 0 and result:
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 2 and result:
            result[at] = rng.choice(OPCODES)
        elif kind == 3:
            del result[at : at + rng.randint(1, 40)]
        elif kind == 4:
            del result[at:]
        elif kind == 5:
            other = rng.randrange(len(result) or 1)
            result[at:at] = result[other : other + rng.randint(1, 200)]
        elif kind == 6:
            piece = rng.choice(CRAFTED)
            result[at : at + len(piece)] = piece
        else:
            result[at:at] = bytes([rng.choice(OPCODES)]) * rng.choice([1, 3, 300])
    return bytes(result)


def fingerprint(value: Any, file: bytes, depth: int = 0) -> Any:
    """Return everything that a reader would use of a value. Raises ``ValueError`` if a CRC-32 differs."""
    assert depth < 300
    if type(value) is TensorRef:
        storage = value.storage
        return (
            str(value.dtype),
            value.shape,
            value.strides,
            value.start if value.numel else 0,
            contents(storage, file),
        )
    if type(value) is Storage:
        return contents(value, file)
    if type(value) is Instance:
        return str(value.cls) if depth > 100 else (str(value.cls), fingerprint(value.state, file, depth + 1))
    if isinstance(value, dict):
        return [(repr(key)[:100], fingerprint(one, file, depth + 1)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [fingerprint(one, file, depth + 1) for one in value])
    return repr(value)[:1000]


def contents(storage: Storage, file: bytes) -> bytes:
    raw = file[storage.offset : storage.offset + storage.nbytes]
    if len(raw) != storage.nbytes or (storage.crc32 is not None and zlib.crc32(raw) != storage.crc32):
        raise ValueError("CRC-32")
    return raw


def read(name: str, data: bytes) -> Any:
    """Read a file as a reader does."""
    if name.endswith(".pt"):
        backend = MemoryBackend("mutants")
        backend.put("file", data)
        return read_archive(backend, "file")
    return interpret(data, "file")


def outcome(name: str, data: bytes, expected: Any) -> str:
    """Return what became of a mutant."""
    try:
        found = fingerprint(read(name, data), data)
    except BytecheckpointError as error:
        return type(error).__name__
    except ValueError as error:
        if str(error) != "CRC-32":
            raise
        return "CRC-32"
    if found == expected:
        return "equal"
    return "wrong" if name.endswith(".pt") else "other value"


def watch() -> Callable[[], list[str]]:
    """Record what this process imports, opens and runs, until the returned function is called."""
    events: list[str] = []
    is_over = threading.Event()

    def hook(event: str, args: Any) -> None:
        if not is_over.is_set() and event.startswith(FORBIDDEN) and len(events) < 20:
            events.append(f"{event} {str(args)[:100]}")

    sys.addaudithook(hook)

    def stop() -> list[str]:
        is_over.set()
        return events

    return stop


def main(seed: int, first: int, last: int) -> None:
    files = sources()
    names = sorted(files)
    expected = {name: fingerprint(read(name, data), data) for name, data in files.items()}
    for name, data in files.items():
        outcome(name, data[:-5], None)  # imports what the library imports when it first needs it
    results: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stop = watch()
    for number in range(first, last):
        rng = random.Random(seed * 1_000_003 + number)
        name = names[number % len(names)]
        try:
            result = outcome(name, mutate(files[name], rng), expected[name])
        except Exception as error:
            result = f"mutant {number} of {name} raised {error!r:.200}"
        results[result if result != "wrong" else f"mutant {number} of {name} gave a wrong value"] += 1
    events = stop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"results": results, "events": events, "grown_mib": grown / 1024}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
