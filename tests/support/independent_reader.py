"""A reader written from docs/format.md alone, without any code of the library.

Tensors are returned as numpy arrays. Dtypes that numpy lacks become void types of the same size, compared by bytes.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import xxhash
import zstandard

NUMPY = {
    "bool": "?", "uint8": "u1", "int8": "i1", "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4",
    "int64": "<i8", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16", "bfloat16": "V2", "complex32": "V4", "bits16": "V2",
}  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(NUMPY.get(name, "V1"))


def names(column: dict[str, Any]) -> list[str]:
    return str(column["d"].decode()).split("\0")[:-1]


def numbers(column: dict[str, Any]) -> list[int]:
    return list(map(int, np.frombuffer(column["d"], f"<u{column['w']}")))


def choices(column: dict[str, Any]) -> list[str]:
    return [names(column["of"])[i] for i in numbers(column["index"])]


def ragged(column: dict[str, Any], ndim: list[int]) -> list[list[int]]:
    rest = numbers(column)
    return [[rest.pop(0) for _ in range(n)] for n in ndim]


def read_payload(data: bytes) -> dict[str, Any]:
    assert xxhash.xxh3_128_digest(data[:-16]) == data[-16:]
    magic, version, codec, raw_length, payload, _ = msgpack.unpackb(data)
    assert magic == "bytecheckpoint"
    assert version == 1
    if codec == "zstd":
        payload = zstandard.decompress(payload)
    assert len(payload) == raw_length
    document: dict[str, Any] = msgpack.unpackb(payload)
    return document


def checksums(column: bytes) -> list[bytes]:
    return [column[at : at + 16] for at in range(0, len(column), 16)]


def data_of(root: Path, document: dict[str, Any]) -> Path:
    return root.parent / "objects" if document["shared"] else root


def data_areas(root: Path, document: dict[str, Any]) -> list[bytes]:
    """Return the decoded data of every file, and check every frame."""
    files, tensors, shards = document["files"], document["tensors"], document["shards"]
    areas = []
    for name, head_length, size in zip(names(files["name"]), numbers(files["head_length"]), numbers(files["size"])):
        content = (data_of(root, document) / name).read_bytes()
        assert len(content) == size
        areas.append(content[head_length:])
    ndim, counts = numbers(tensors["ndim"]), numbers(tensors["shards"])
    owner = [row for row, count in enumerate(counts) for _ in range(count)]
    lengths = ragged(shards["lengths"], [ndim[row] for row in owner])
    itemsize = [numpy_dtype(dtype).itemsize for dtype in choices(tensors["dtype"])]
    nbytes = [math.prod(of_shard) * itemsize[row] for of_shard, row in zip(lengths, owner)]
    frames, references = document["frames"], names(document["references"]["name"])
    rows = list(zip(numbers(frames["length"]), numbers(frames["source"]), strict=True))
    offsets, sums = numbers(frames["offset"]), checksums(frames["checksums"])
    for file, codec in enumerate(choices(files["codec"])):
        if codec == "raw":
            continue
        head = (data_of(root, document) / names(files["name"])[file]).read_bytes()[:8]
        assert head == b"bcp\xffenc1"
        stored, data = areas[file], b""
        step = numbers(files["chunk_size"])[file]
        inside = [row for row, other in enumerate(numbers(shards["file"])) if other == file and nbytes[row]]
        for row in sorted(inside, key=numbers(shards["offset"]).__getitem__):
            for at in range(0, nbytes[row], step):
                length, source = rows.pop(0)
                if source:
                    begin = offsets.pop(0)
                    frame = (data_of(root, document) / references[source - 1]).read_bytes()[begin : begin + length]
                else:
                    frame, stored = stored[:length], stored[length:]
                if length < min(step, nbytes[row] - at):
                    assert xxhash.xxh3_128_digest(frame) == sums.pop(0)
                data += decode_frame(codec, frame, min(step, nbytes[row] - at))
        assert stored == b""
        areas[file] = data
    assert rows == []
    assert offsets == []
    assert sums == []
    return areas


def decode_frame(codec: str, frame: bytes, size: int) -> bytes:
    if len(frame) == size:
        return frame
    if codec == "zstd":
        chunk = zstandard.decompress(frame)
    else:
        assert codec == "zstd-planes"
        width = frame[0]
        lengths = struct.unpack(f"<{width}I", frame[1 : 1 + 4 * width])
        out = np.zeros((size // width, width), "u1")
        at = 1 + 4 * width
        for plane, length in enumerate(lengths):
            out[:, plane] = np.frombuffer(decode_frame("zstd", frame[at : at + length], size // width), "u1")
            at += length
        assert at == len(frame)
        chunk = out.tobytes()
    assert len(chunk) == size
    return chunk


def read_checkpoint(root: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return every whole tensor by full name, and check every chunk."""
    document = read_payload((root / "manifest.msgpack").read_bytes())
    files, tensors, shards = document["files"], document["tensors"], document["shards"]
    ndim = numbers(tensors["ndim"])
    owner = [row for row, count in enumerate(numbers(tensors["shards"])) for _ in range(count)]
    dtypes = [numpy_dtype(dtype) for dtype in choices(tensors["dtype"])]
    out = [np.zeros(shape, dtype) for shape, dtype in zip(ragged(tensors["shape"], ndim), dtypes)]
    offsets, lengths = (ragged(shards[key], [ndim[row] for row in owner]) for key in ("offsets", "lengths"))
    sums = checksums(shards["checksums"])
    areas = data_areas(root, document)
    for shard, row in enumerate(owner):
        file = numbers(shards["file"])[shard]
        begin = numbers(shards["offset"])[shard]
        nbytes = math.prod(lengths[shard]) * dtypes[row].itemsize
        data = areas[file][begin : begin + nbytes]
        step = numbers(files["chunk_size"])[file]
        for at in range(0, nbytes, step):
            assert xxhash.xxh3_128_digest(data[at : at + step]) == sums.pop(0)
        box = tuple(slice(o, o + n) for o, n in zip(offsets[shard], lengths[shard]))
        out[row][box] = np.frombuffer(data, dtypes[row]).reshape(lengths[shard])
    assert sums == []
    found = dict(zip(names(tensors["name"]), out))
    return found | {
        a: found[t] for a, t in zip(names(document["aliases"]["name"]), names(document["aliases"]["target"]))
    }


def read_values(root: Path, rank: int, *, containers: bool = False) -> dict[str, dict[tuple[str | int, ...], Any]]:
    """Return the values of every section by path: those that all ranks share, then those of ``rank``.

    Containers are included only on request.
    """
    document = read_payload((root / "manifest.msgpack").read_bytes())
    files, sections = document["files"], names(document["sections"]["name"])
    shared: dict[str, dict[tuple[str | int, ...], Any]] = {section: {} for section in sections}
    own: dict[str, dict[tuple[str | int, ...], Any]] = {section: {} for section in sections}
    rows = zip(names(files["name"]), numbers(files["section"]), numbers(files["rank"]), choices(files["kind"]))
    for row, (name, section, writer, kind) in enumerate(rows):
        if kind == "tensors" or (kind == "rank_values" and writer != rank):
            continue
        data = (data_of(root, document) / name).read_bytes()
        assert len(data) == numbers(files["size"])[row] == numbers(files["head_length"])[row]
        assert xxhash.xxh3_128_digest(data) == checksums(files["head_checksum"])[row]
        if kind == "companion":
            continue
        content = msgpack.unpackb(data)
        assert content.keys() == {"values_version", "entries"}
        assert content["values_version"] == 1
        for path, is_shared, value in content["entries"]:
            assert is_shared == (kind == "values")
            (shared if is_shared else own)[sections[section]][tuple(path)] = read_value(value)
    merged = {section: shared[section] | own[section] for section in sections}
    return {
        section: {path: v for path, v in values.items() if containers or not is_container(v)}
        for section, values in merged.items()
    }


def read_tree(root: Path, section: str, rank: int) -> dict[Any, Any]:
    """Return a ``tree`` section whose root is a mapping, as ``rank`` loads it.

    Lists become dicts by index, and tensors become ``("tensor", dtype, shape, bytes)``.
    """
    values = read_values(root, rank, containers=True)[section]
    containers = {path: read_value(value.data) for path, value in values.items() if is_container(value)}
    leaves = {path: value for path, value in values.items() if not is_container(value)}
    branches: dict[str, list[tuple[str | int, ...]]] = {}
    for path, (kind, *_) in containers.items():
        if kind != "tensor":
            branches.setdefault(".".join(map(str, path)), []).append(path)
    exact = {".".join(map(str, path)): path for path, (kind, *_) in containers.items() if kind == "tensor"}
    for fqn, tensor in section_tensors(root, section, rank).items():
        cuts = [i for i, letter in enumerate(fqn) if letter == "." and fqn[:i] in branches]
        place: tuple[str | int, ...] = (fqn,)
        if fqn in exact:
            place = exact[fqn]
        elif cuts:
            (parent,) = branches[fqn[: cuts[-1]]]
            name = fqn[cuts[-1] + 1 :]
            place = (*parent, int(name) if containers[parent][0] in ("list", "tuple") else name)
        leaves[place] = tensor
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return {"containers": {p: tuple(c[:2]) for p, c in containers.items() if c[0] != "tensor"}, "tree": tree}


def section_tensors(root: Path, section: str, rank: int) -> dict[str, tuple[Any, ...]]:
    """Return a section's shared tensors, aliases, and tensors of ``rank`` as ``("tensor", dtype, shape, bytes)``."""
    document = read_payload((root / "manifest.msgpack").read_bytes())
    tensors, arrays = document["tensors"], read_checkpoint(root)
    rows = zip(names(tensors["name"]), choices(tensors["dtype"]), numbers(tensors["scope"]))
    found = {}
    for name, dtype, scope in rows:
        if name.startswith(f"{section}.") and scope in (0, rank + 1):
            fqn = name[len(section) + 1 :].removesuffix(f"@{scope - 1}" if scope else "")
            found[fqn] = ("tensor", dtype, list(arrays[name].shape), arrays[name].tobytes().hex())
    for alias, target in zip(names(document["aliases"]["name"]), names(document["aliases"]["target"])):
        if alias.startswith(f"{section}."):
            found[alias[len(section) + 1 :]] = found[target[len(section) + 1 :]]
    return found


def is_container(value: Any) -> bool:
    return type(value) is msgpack.ExtType and value.code == 18


def read_value(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_extension, strict_map_key=False)


def _extension(tag: int, payload: bytes) -> Any:
    import torch

    if tag == 1:
        return int.from_bytes(payload, "little", signed=True)
    if tag == 2:
        return complex(*struct.unpack(">dd", payload))
    if tag == 3:
        return payload.decode("utf-8", "surrogatepass")
    if tag == 4:
        return bytearray(payload)
    if tag == 15:
        return getattr(torch, payload.decode())
    if tag == 18:
        return msgpack.ExtType(tag, payload)
    parts = read_value(payload)
    if tag == 13:
        return np.frombuffer(parts[2], parts[0]).reshape(parts[1])
    if tag == 14:
        return np.frombuffer(parts[1], parts[0])[0]
    if tag == 16:
        return torch.device(*(part for part in parts if part is not None))
    pairs = zip(parts[::2], parts[1::2])
    if tag in (8, 9):
        return {8: OrderedDict, 9: Counter}[tag](dict(pairs))
    if tag == 10:
        return deque(parts[1], parts[0])
    if tag in (11, 12):
        return {11: range, 12: slice}[tag](*parts)
    return {5: tuple, 6: set, 7: frozenset, 17: torch.Size}[tag](parts)
