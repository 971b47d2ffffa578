"""Attacks: files that an attacker crafted with knowledge of the format.

Each is refused with the error it deserves, runs no code, and makes no large allocation. They are generated, so that
the folder holds nothing harmful; ``python tests/attacks/test_hostile_files.py`` runs them all in this process.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard
from made_manifests import make_manifest

from bytecheckpoint.errors import CheckpointError, CorruptionError, FormatError, StateError, UnsupportedVersionError
from bytecheckpoint.format.manifest.envelope import decode
from bytecheckpoint.format.manifest.payload import pack_payload
from bytecheckpoint.format.safetensors import parse_header
from bytecheckpoint.format.values.decoding import decode_value
from bytecheckpoint.format.values.files import decode_values_file
from bytecheckpoint.tensors.dtypes import find_dtype
from bytecheckpoint.tensors.geometry import Box
from bytecheckpoint.tensors.metadata import BasicMeta
from bytecheckpoint.testing import time_limit

MIB = 1 << 20
CANARY = "bytecheckpoint_canary"  # the attacker's code sets this attribute of sys


class Payload:
    """An attacker's pickle: unpickling it runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import sys; sys.{CANARY} = True",)


# -- crafting ------------------------------------------------------------------------------------------------------


def sealed(*parts: Any) -> bytes:
    """Return an envelope with a correct checksum, which an attacker can compute too."""
    packed = [part if isinstance(part, Packed) else msgpack.packb(part) for part in parts]
    body = b"\x96" + b"".join(packed) + b"\xc4\x10"
    return body + xxhash.xxh3_128_digest(body)


class Packed(bytes):
    """Return msgpack without compression."""


def envelope(payload: bytes, codec: str = "raw", raw_length: int | None = None) -> bytes:
    return sealed("bytecheckpoint", 1, codec, len(payload) if raw_length is None else raw_length, payload)


def document() -> dict[str, Any]:
    """Return a valid payload: two tensors, the second in two shards, in one file."""
    manifest = make_manifest(
        [
            ("model", "b", BasicMeta(find_dtype("uint8"), (4,)), [Box((0,), (4,))]),
            ("model", "w", BasicMeta(find_dtype("uint8"), (4, 4)), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]),
        ],
        aliases=[("model.tied", "model.w")],
    )
    payload: dict[str, Any] = msgpack.unpackb(pack_payload(manifest))
    return payload


def crafted(**changes: Any) -> bytes:
    """Return the valid manifest with some fields replaced, ``section__field`` for ``section.field``."""
    changed = copy.deepcopy(document())
    for path, value in changes.items():
        *tables, last = path.split("__")
        target = changed
        for table in tables:
            target = target[table]
        target[last] = value
    return envelope(msgpack.packb(changed))


def names(*values: str) -> dict[str, Any]:
    return {"n": len(values), "d": "".join(f"{v}\0" for v in values).encode()}


def numbers(*values: int, width: int = 8) -> dict[str, Any]:
    return {"w": width, "d": np.array(values, np.uint64).astype(f"<u{width}").tobytes()}


def file_named(name: str) -> bytes:
    return crafted(files__name=names(name))


def raw_payload(*pairs: tuple[str, bytes]) -> bytes:
    """Return a payload map from values in msgpack bytes."""
    body = b"".join(msgpack.packb(key) + value for key, value in pairs)
    return envelope(bytes([0x80 | len(pairs)]) + body)


@functools.cache
def bomb(states_size: bool = True) -> bytes:
    """Return a zstd frame of 1 GiB of zeros, made without that much memory."""
    stream = zstandard.ZstdCompressor(level=1, write_content_size=states_size).compressobj(size=1 << 30)
    zeros = bytes(1 << 20)
    return b"".join([*(stream.compress(zeros) for _ in range(1 << 10)), stream.flush()])


def frame_claiming(size: int) -> bytes:
    """Return a zstd frame with one empty block that claims ``size`` bytes."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


NESTED_ARRAYS = b"\xdd\x7f\xff\xff\xff" * 2000  # nested arrays of two billion items each
NESTED_MAPS = b"\xdf\x7f\xff\xff\xff" * 2000
DEEP = b"\x91" * 100_000 + b"\xc0"
WIDE = b"\xdc\xff\xff" * 600 + b"\xc0" * 65535  # each count fits the data, but their sum does not

MANIFESTS: dict[str, tuple[bytes, type[Exception]]] = {
    # names that point elsewhere
    "parent directory": (file_named("../../etc/passwd"), FormatError),
    "parent below the attempt": (file_named("attempt-0/../x.safetensors"), FormatError),
    "parent at the end": (file_named("attempt-0/.."), FormatError),
    "absolute name": (file_named("/etc/passwd"), FormatError),
    "absolute name below": (file_named("attempt-0//etc/passwd"), FormatError),
    "other attempt": (file_named("attempt-1/model-00000.safetensors"), FormatError),
    "backslash": (file_named("attempt-0/..\\..\\x"), FormatError),
    "line end": (file_named("attempt-0/x\n"), FormatError),
    "url": (file_named("file:///etc/passwd"), FormatError),
    "the directory itself": (file_named("attempt-0/"), FormatError),
    "the manifest itself": (file_named("manifest.msgpack"), FormatError),
    "zero byte in a name": (crafted(files__name={"n": 1, "d": b"attempt-0/a\0b\0"}), FormatError),
    "attempt is the parent": (crafted(attempt="..", files__name=names("../x")), FormatError),
    "attempt is absolute": (crafted(attempt="/etc", files__name=names("/etc/passwd")), FormatError),
    "attempt is empty": (crafted(attempt="", files__name=names("/x")), FormatError),
    "section with a slash": (crafted(sections__name=names("../model")), FormatError),
    # byte ranges
    "overlapping ranges": (crafted(shards__offset=numbers(0, 4, 4)), FormatError),
    "same range twice": (crafted(shards__offset=numbers(0, 4, 4), files__size=numbers(4096 + 12)), FormatError),
    "hole": (crafted(files__size=numbers(4096 + 28), shards__offset=numbers(0, 4, 20)), FormatError),
    "beyond the file": (crafted(shards__offset=numbers(0, 4, 20)), FormatError),
    "offset near 2^63": (crafted(shards__offset=numbers(0, 4, (1 << 63) - 1)), FormatError),
    "offset of 2^64-1": (crafted(shards__offset=numbers(0, 4, (1 << 64) - 1)), FormatError),
    "file of 2^63-1 bytes": (crafted(files__size=numbers((1 << 63) - 1)), FormatError),
    "head beyond the file": (crafted(files__head_length=numbers(5000)), FormatError),
    "head of 10 GB": (crafted(files__head_length=numbers(10 << 30), files__size=numbers((10 << 30) + 20)), FormatError),
    "head of 2^64-1": (crafted(files__head_length=numbers((1 << 64) - 1)), FormatError),
    # shapes and boxes
    "shape of 10^12": (crafted(tensors__shape=numbers(10**12, 4, 4)), FormatError),
    "shape of 10^12 x 10^12": (crafted(tensors__shape=numbers(4, 10**12, 10**12)), FormatError),
    "all of 10^12 x 10^12": (
        crafted(tensors__shape=numbers(4, 10**12, 10**12), shards__lengths=numbers(4, 10**12, 10**12, 10**12, 10**12)),
        FormatError,
    ),
    "10^12 elements in 20 bytes": (
        crafted(tensors__shape=numbers(10**12, 4, 4), shards__lengths=numbers(10**12, 2, 4, 2, 4)),
        FormatError,
    ),
    "empty, with overflowing strides": (crafted(tensors__shape=numbers(0, 1 << 62, 1 << 62)), FormatError),
    "product that wraps to 16": (crafted(tensors__shape=numbers(4, 1 << 62, 20)), FormatError),
    "negative dimension": (crafted(tensors__shape=numbers((1 << 64) - 4, 4, 4)), FormatError),
    "a billion dimensions": (crafted(tensors__ndim=numbers(1, 10**9)), FormatError),
    "2^63 dimensions": (crafted(tensors__ndim=numbers(1, 1 << 63)), FormatError),
    "overlapping boxes": (crafted(shards__offsets=numbers(0, 0, 0, 1, 0)), FormatError),
    "boxes with a hole": (crafted(shards__lengths=numbers(4, 1, 4, 2, 4)), FormatError),
    "box outside": (crafted(shards__offsets=numbers(0, 0, 0, 3, 0)), FormatError),
    "box whose end wraps": (crafted(shards__offsets=numbers(0, 0, 0, (1 << 63) - 1, 0)), FormatError),
    # counts
    "2^62 shards": (crafted(tensors__shards=numbers(1 << 62, 2)), FormatError),
    "shards that add up by wrapping": (crafted(tensors__shards=numbers((1 << 63) - 1, 4)), FormatError),
    "too few shards": (crafted(tensors__shards=numbers(1, 1)), FormatError),
    "no shards": (crafted(tensors__shards=numbers(0, 3)), FormatError),
    "too few checksums": (crafted(shards__checksums=bytes(32)), FormatError),
    "too many checksums": (crafted(shards__checksums=bytes(64)), FormatError),
    "a part of a checksum": (crafted(shards__checksums=bytes(47)), FormatError),
    "checksums as numbers": (crafted(shards__checksums=numbers(1, 2, 3)), FormatError),
    "shared is no truth value": (crafted(shared=1), FormatError),
    "chunks of 0 bytes": (crafted(files__chunk_size=numbers(0)), FormatError),
    "2^61 chunks": (
        crafted(
            files__chunk_size=numbers(1),
            files__size=numbers((1 << 61) + 16 + 4096),
            tensors__shape=numbers(1 << 61, 4, 4),
            shards__lengths=numbers(1 << 61, 2, 4, 2, 4),
        ),
        FormatError,
    ),
    "column too short": (crafted(files__size=numbers()), FormatError),
    "column too long": (crafted(files__size=numbers(1, 2)), FormatError),
    "column of odd bytes": (crafted(files__size={"w": 8, "d": b"abc"}), FormatError),
    "width of 0": (crafted(files__size={"w": 0, "d": b""}), FormatError),
    "width of -1": (crafted(files__size={"w": -1, "d": b"a"}), FormatError),
    "width is true": (crafted(files__size={"w": True, "d": b"a"}), FormatError),
    "width of 2^60": (crafted(files__size={"w": 1 << 60, "d": b"a"}), FormatError),
    "column is a list": (crafted(files__size=[4116]), FormatError),
    "column is nil": (crafted(shards__file=None), FormatError),
    "more names than there are": (crafted(tensors__name={"n": 10**9, "d": b"model.b\0model.w\0"}), FormatError),
    "name without end": (crafted(tensors__name={"n": 2, "d": b"model.b\0model.w\0x"}), FormatError),
    "names not in UTF-8": (crafted(tensors__name={"n": 2, "d": b"model.b\0model.\xff\0"}), FormatError),
    "table missing": (crafted(files=None), FormatError),
    "field missing": (crafted(files={}), FormatError),
    "field too many": (crafted(run="exec"), FormatError),
    # indexes
    "section 5": (crafted(files__section=numbers(5)), FormatError),
    "file 5": (crafted(shards__file=numbers(0, 0, 5)), FormatError),
    "file 2^64-1": (crafted(shards__file=numbers(0, 0, (1 << 64) - 1)), FormatError),
    "rank 5": (crafted(files__rank=numbers(5)), FormatError),
    "dtype 5": (crafted(tensors__dtype={"of": names("uint8"), "index": numbers(5, 0)}), FormatError),
    "unknown dtype": (crafted(tensors__dtype={"of": names("object"), "index": numbers(0, 0)}), FormatError),
    "codec without frames": (crafted(files__codec={"of": names("exec"), "index": numbers(0)}), FormatError),
    "unknown kind": (crafted(files__kind={"of": names("pickle"), "index": numbers(0)}), UnsupportedVersionError),
    # names given twice, loops
    "tensor twice": (crafted(tensors__name=names("model.w", "model.w")), FormatError),
    "tensors out of order": (crafted(tensors__name=names("model.w", "model.b")), FormatError),
    "tensor of another section": (crafted(tensors__name=names("model.b", "optim.w")), FormatError),
    "alias loop": (
        crafted(aliases={"name": names("model.x", "model.y"), "target": names("model.y", "model.x")}),
        FormatError,
    ),
    "alias of itself": (crafted(aliases={"name": names("model.x"), "target": names("model.x")}), FormatError),
    "alias over a tensor": (crafted(aliases={"name": names("model.w"), "target": names("model.b")}), FormatError),
    "alias of nothing": (crafted(aliases={"name": names("model.x"), "target": names("model.z")}), FormatError),
    "alias columns differ": (crafted(aliases={"name": names("model.x"), "target": names()}), FormatError),
    "key twice": (raw_payload(("step", b"\x01"), ("step", b"\x02")), FormatError),
    # numbers of the job
    "negative step": (crafted(step=-1), FormatError),
    "step is a float": (crafted(step=1.5), FormatError),
    "world of 0": (crafted(world_size=0), FormatError),
    "world of 2^63": (crafted(world_size=1 << 63), FormatError),
    "time is not one": (crafted(created="__import__('os')"), FormatError),
    # bombs
    "zstd bomb": (envelope(bomb(), "zstd", 1 << 30), FormatError),
    "zstd bomb with a wrong size": (envelope(bomb(), "zstd", 1000), FormatError),
    "zstd bomb of unknown size": (envelope(bomb(states_size=False), "zstd", 1000), FormatError),
    "zstd frame claiming 2^62": (envelope(frame_claiming(1 << 62), "zstd", 1 << 62), FormatError),
    "zstd frame claiming 4 GiB": (envelope(frame_claiming(4 << 30), "zstd", 4 << 30), FormatError),
    "zstd frame claiming 1 MiB": (envelope(frame_claiming(MIB), "zstd", MIB), FormatError),
    "not zstd": (envelope(b"not zstd at all", "zstd", 100), FormatError),
    "raw length of 2^63": (envelope(b"\x80", "raw", 1 << 63), FormatError),
    "negative raw length": (envelope(b"\x80", "raw", -1), FormatError),
    "nested arrays": (envelope(NESTED_ARRAYS), FormatError),
    "nested maps": (envelope(NESTED_MAPS), FormatError),
    "deep nesting": (envelope(DEEP), FormatError),
    "wide nesting": (envelope(WIDE), FormatError),
    "bin of 4 GB": (envelope(b"\xc6\xff\xff\xff\xff"), FormatError),
    "str of 4 GB": (envelope(b"\xdb\xff\xff\xff\xff"), FormatError),
    "extension type": (envelope(b"\xc7\x04\x7fexec"), FormatError),
    "nested arrays in metadata": (crafted(metadata=NESTED_ARRAYS), FormatError),
    "deep nesting in metadata": (crafted(metadata=DEEP), FormatError),
    "wide nesting in metadata": (crafted(metadata=WIDE), FormatError),
    "extension type in metadata": (crafted(metadata=b"\x81\xa1a\xd4\x7fx"), FormatError),
    "timestamp in metadata": (crafted(metadata=b"\x81\xa1a\xd6\xff\0\0\0\0"), FormatError),
    "metadata is a list": (crafted(metadata=b"\x90"), FormatError),
    "bytes behind the payload": (envelope(msgpack.packb(document()) + b"\xc0"), FormatError),
    # envelopes
    "array of 4 billion": (sealed("bytecheckpoint", 1, Packed(b"\xdd\xff\xff\xff\xff"), 1, b""), FormatError),
    "payload is a str": (sealed("bytecheckpoint", 1, "raw", 1, "a"), FormatError),
    "payload of 4 GB": (sealed("bytecheckpoint", 1, "raw", 1, Packed(b"\xc6\xff\xff\xff\xff")), FormatError),
    "version is a list": (sealed("bytecheckpoint", [1], "raw", 1, b"a"), FormatError),
    "version is true": (sealed("bytecheckpoint", True, "raw", 1, b"a"), FormatError),
    "version 2^63": (sealed("bytecheckpoint", 1 << 63, "raw", 1, b"a"), UnsupportedVersionError),
    "version -1": (sealed("bytecheckpoint", -1, "raw", 1, b"a"), UnsupportedVersionError),
    "envelope codec": (sealed("bytecheckpoint", 1, "pickle", 1, b"a"), UnsupportedVersionError),
    "pickle instead": (pickle.dumps(Payload()), CorruptionError),
    "pickle as payload": (envelope(pickle.dumps(Payload())), FormatError),
    "pickle as metadata": (crafted(metadata=pickle.dumps(Payload())), FormatError),
    "pickle as column": (crafted(files__size=pickle.dumps(Payload())), FormatError),
}


def values_file(entries: Any) -> bytes:
    return msgpack.packb({"values_version": 1, "entries": entries})


def open_values(data: bytes) -> None:
    for _, _, value in decode_values_file(data):
        decode_value(value)


PICKLE_EXT = msgpack.packb(msgpack.ExtType(127, pickle.dumps(Payload())))

VALUES: dict[str, tuple[bytes, type[Exception]]] = {
    "pickle instead": (pickle.dumps(Payload()), FormatError),
    "pickle as entry": (values_file([pickle.dumps(Payload())]), FormatError),
    "pickle as value": (values_file([[["a"], True, pickle.dumps(Payload())]]), FormatError),
    "pickle as extension": (values_file([[["a"], True, PICKLE_EXT]]), StateError),
    "pickle inside a tuple": (
        values_file([[["a"], True, msgpack.packb(msgpack.ExtType(5, b"\x91" + PICKLE_EXT))]]),
        StateError,
    ),
    "nested arrays": (NESTED_ARRAYS, FormatError),
    "nested maps": (NESTED_MAPS, FormatError),
    "deep nesting": (DEEP, FormatError),
    "wide nesting": (WIDE, FormatError),
    "nested arrays in a value": (values_file([[["a"], True, NESTED_ARRAYS]]), FormatError),
    "deep value": (values_file([[["a"], True, DEEP]]), FormatError),
    "array of 10^12": (
        values_file([[["a"], True, msgpack.packb(msgpack.ExtType(13, msgpack.packb(["<f4", [10**12], b""])))]]),
        FormatError,
    ),
    "array of objects": (
        values_file([[["a"], True, msgpack.packb(msgpack.ExtType(13, msgpack.packb(["|O", [1], bytes(8)])))]]),
        FormatError,
    ),
    "path twice": (values_file([[["a"], True, b"\x01"], [["a"], True, b"\x02"]]), FormatError),
}


def open_tensors(data: bytes) -> None:
    parse_header(lambda offset, length: data[offset : offset + length], len(data))


TENSORS: dict[str, tuple[bytes, type[Exception]]] = {
    "pickle instead": (pickle.dumps(Payload()), FormatError),
    "header of 10 GB": ((10 << 30).to_bytes(8, "little") + b"{}", FormatError),
    "header of 2^64-1": (b"\xff" * 8 + b"{}", FormatError),
    "deep nesting": ((MIB).to_bytes(8, "little") + b'{"a":' + b"[" * (MIB - 5), FormatError),
}

ATTACKS: list[tuple[str, Callable[[bytes], object], bytes, type[Exception]]] = [
    (f"{group}: {name}", reader, data, error)
    for group, reader, attacks in (
        ("manifest", decode, MANIFESTS),
        ("values", open_values, VALUES),
        ("tensors", open_tensors, TENSORS),
    )
    for name, (data, error) in attacks.items()
]


# -- the tests -----------------------------------------------------------------------------------------------------


def attack(reader: Callable[[bytes], object], data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        reader(data)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    assert len(str(caught.value)) < 2000
    assert not hasattr(sys, CANARY)


def test_the_base_document_of_the_attacks_is_valid() -> None:
    assert decode(crafted()).tensors.names == ["model.b", "model.w"]


def test_the_canary_detects_execution() -> None:
    pickle.loads(pickle.dumps(Payload()))
    assert hasattr(sys, CANARY)
    delattr(sys, CANARY)


@pytest.mark.parametrize(("reader", "data", "error"), [a[1:] for a in ATTACKS], ids=[a[0] for a in ATTACKS])
def test_attack_is_refused(reader: Callable[[bytes], object], data: bytes, error: type[Exception]) -> None:
    tracemalloc.start()
    try:
        attack(reader, data, error)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_all_attacks_in_a_small_address_space() -> None:
    """This includes allocations that Python does not trace."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=time_limit(120)
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(len(ATTACKS)), "refused"]


def main() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, used + 64 * MIB))
    for name, reader, data, error in ATTACKS:
        try:
            attack(reader, data, error)
        except (AssertionError, MemoryError, CheckpointError) as found:
            raise SystemExit(f"{name}: {type(found).__name__}: {found}") from found
    print(len(ATTACKS), "refused")


if __name__ == "__main__":
    main()
