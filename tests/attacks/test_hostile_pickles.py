"""Attacks by pickles and by archives of ``torch.save``: nothing runs, and each gives an error or a harmless value."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pickle_mutants
import pytest
import sampling
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from warm_python import warm_python

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointError, CorruptionError, FormatError, RuleError, UnsupportedTensorError
from bytecheckpoint.foreign.archives.torch_archive import read_archive
from bytecheckpoint.foreign.pickles.classes import explain
from bytecheckpoint.foreign.pickles.interpreter import interpret
from bytecheckpoint.foreign.pickles.records import Global, Instance
from bytecheckpoint.rules import Flat, Replicated, Rules, Sharded
from bytecheckpoint.storage_backends.memory import MemoryBackend
from bytecheckpoint.testing import time_limit

pytestmark = pytest.mark.sampled(30, of=__name__)

MIB = 1 << 20


def long1(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def laughs(opening: bytes, closing: bytes, levels: int) -> bytes:
    """Return containers, each of which holds the one before twice."""
    return b"\x80\x04" + b"]\x94" + b"".join(
        b"".join([opening, b"h", bytes([level]), b"h", bytes([level]), closing, b"\x94"]) for level in range(levels)
    )  # fmt: skip


COLLISIONS = b"\x80\x02}(" + b"".join(long1(number * (2**61 - 1)) + b"N" for number in range(9, 30_000)) + b"u."

PICKLES: dict[str, bytes] = {
    "lists that laugh": laughs(b"](", b"e", 60) + b".",
    "tuples that laugh": laughs(b"(", b"t", 60) + b".",
    "tuples that laugh as a key": b"\x80\x04)\x94" + laughs(b"(", b"t", 60)[4:] + b"}" + b"h\x3bNs.",
    "dicts that laugh": laughs(b"}(K\x01", b"K\x02\x8c\x00u", 0) + b"}" + b"(h\x00h\x00u.",
    "deep lists": b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
    "deep tuples": b"\x80\x02N" + b"\x85" * 100_000 + b".",
    "deep lists by append": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep tuples as a key": b"\x80\x02}N" + b"\x85" * 100_000 + b"Ns.",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a dict in itself": b"\x80\x02}q\x00K\x01h\x00s.",
    "integer of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "integer of -1 bytes": b"\x80\x02\x8b\xff\xff\xff\xff.",
    "integer of a million bytes": b"\x80\x02\x8b" + struct.pack("<i", MIB) + b"\x7f" * MIB + b".",
    "integer of a million digits": b"I" + b"7" * MIB + b"\n.",
    "text of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "bytes of 2^64 - 1": b"\x80\x04\x8e" + b"\xff" * 8 + b"a.",
    "bytearray of 2^62": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"a.",
    "text of Python 2 of -1 bytes": b"\x80\x02T\xff\xff\xff\xffa.",
    "half of a surrogate pair": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
    "half of a surrogate pair as a line": b"V\\ud800\n.",
    "half a million sets": b"\x80\x04" + b"\x8f" * (MIB // 2) + b".",
    "copies of a long list": b"\x80\x02c__builtin__\nset\nq\x00]("
    + b"".join(b"M" + struct.pack("<H", n) for n in range(65_000))
    + b"e\x85q\x01(" + b"h\x00h\x01R" * 20_000 + b"t.",
    "marks": b"\x80\x02" + b"(" * MIB + b".",
    "integers that collide": COLLISIONS,
    "a list as a key": b"\x80\x02}]Ns.",
    "a key without a value": b"\x80\x02}(K\x01u.",
    "no mark": b"\x80\x02K\x01t.",
    "an empty stack": b"\x80\x02.",
    "not memorized": b"\x80\x02h\x05.",
    "extension registry": b"\x80\x02\x82\x01.",
    "buffer outside": b"\x80\x05\x97.",
    "object outside": b"\x80\x02K\x01Q.",
    "protocol 6": b"\x80\x06N.",
    "bytes behind": b"\x80\x02N.N.",
    "no end": b"\x80\x02N",
    "nothing": b"",
    "call of a text": b"\x80\x02X\x01\x00\x00\x00a)R.",
    "call of a call": b"\x80\x02c__builtin__\neval\n)R)R.",
    "state of a number": b"\x80\x02K\x01}b.",
    "tuple with appended items": b"\x80\x02)K\x01a.",
    "array of 10^12": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01bt"
    b"R(K\x01\x8a\x05"
    + (10**11).to_bytes(5, "little")
    + b"\x85cnumpy\ndtype\n(X\x02\x00\x00\x00f4\x89\x88tRC\x00tb.",
    "array of objects": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01bt"
    b"R(K\x01K\x01\x85cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tRC\x08\0\0\0\0\0\0\0\0tb.",
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_pickle_is_refused(name: str) -> None:
    data = PICKLES[name]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="file: "):
            interpret(data, "file")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 120 * MIB + 60 * len(data)


@pytest.mark.sampled(2, of="long searches")
def test_a_large_pickle_is_refused_before_its_objects_take_what_one_of_its_size_may() -> None:
    """Also one of which most bytes, that precede the objects, take no memory."""
    data = b"\x80\x04" + b"N0" * MIB + b"\x8f" * (6 * MIB) + b"."
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="far more memory than its size explains"):
            interpret(data, "file")
        assert tracemalloc.get_traced_memory()[1] < 250 * MIB
    finally:
        tracemalloc.stop()


def test_memo_index_costs_nothing() -> None:
    tracemalloc.start()
    try:
        assert interpret(b"\x80\x02Nr\xff\xff\xff\x7f.", "file") is None
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import sys; sys.bytecheckpoint_canary = True",)


def test_calls_of_a_pickle_become_placeholders() -> None:
    found = interpret(pickle.dumps({"step": 3, "payload": Payload()}), "file")
    assert found["step"] == 3
    assert type(found["payload"]) is Instance
    assert (found["payload"].cls, explain(found["payload"])) == (
        Global("builtins", "exec"),
        "an object of class builtins.exec",
    )
    chain = b"\x80\x02c__builtin__\ngetattr\n(cos\nsystem\nX\x08\x00\x00\x00__call__tR."
    assert interpret(chain, "file").args == (Global("os", "system"), "__call__")
    assert not hasattr(sys, "bytecheckpoint_canary")


# -- archives ---------------------------------------------------------------------------------------------------------


def entries_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


VALUE = {"a": torch.arange(5), "b": torch.ones(3)}
VALID = pickle_mutants.saved(VALUE)
PARTS = entries_of(VALID)
END = VALID.rindex(b"PK\5\6")
DIRECTORY = VALID.index(b"PK\1\2")


def patched(at: int, raw: bytes, data: bytes = VALID) -> bytes:
    return data[:at] + raw + data[at + len(raw) :]


def central(name: bytes) -> int:
    """Return the position of an entry in the directory."""
    return VALID.rindex(name, 0, END) - 46


def same_bytes_twice() -> bytes:
    first = struct.unpack_from("<I", VALID, central(b"archive/data/0") + 42)[0]
    return patched(central(b"archive/data/1") + 42, struct.pack("<I", first))


def with_pickle(data: bytes) -> bytes:
    return packed({**PARTS, "archive/data.pkl": data})


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "compressed": (lambda: packed(PARTS, zipfile.ZIP_DEFLATED), "compressed or encrypted"),
    "encrypted": (lambda: patched(central(b"archive/data/0") + 8, b"\x01\x00"), "compressed or encrypted"),
    "big-endian": (lambda: packed({**PARTS, "archive/byteorder": b"big"}), "big-endian"),
    "TorchScript": (lambda: packed({**PARTS, "archive/code/__torch__.py": b"pass"}), "TorchScript"),
    "no pickle": (lambda: packed({"archive/x": b""}), "no data.pkl"),
    "two folders": (lambda: packed({**PARTS, "other/x": b""}), "not in one folder"),
    "no storage": (lambda: packed({k: v for k, v in PARTS.items() if k != "archive/data/1"}), "not in the archive"),
    "short storage": (lambda: packed({**PARTS, "archive/data/1": b"x"}), "has 1 bytes"),
    "long storage": (lambda: packed({**PARTS, "archive/data/1": b"x" * 16}), "has 16 bytes"),
    "overlapping storages": (same_bytes_twice, "differs from the directory"),
    "directory elsewhere": (lambda: patched(END - 60, b"\0\0\0\0", VALID[: END - 76] + VALID[END:]), "directory"),
    "directory of 4 GB": (lambda: patched(END - 20 - 56 + 40, struct.pack("<Q", 1 << 32)), "directory"),
    "2^63 entries": (lambda: patched(END - 20 - 56 + 24, struct.pack("<QQ", 1 << 63, 1 << 63)), "cannot list"),
    "end record at 2^63": (lambda: patched(END - 20 + 8, struct.pack("<Q", 1 << 63)), "outside"),
    "entry of 4 GB": (lambda: patched(central(b"archive/data/0") + 20, b"\xf0\xff\xff\xff" * 2), "overlap|differs"),
    "header outside": (lambda: patched(central(b"archive/data/0") + 42, b"\xf0\xff\xff\xff"), "outside"),
    "name not in UTF-8": (lambda: patched(central(b"archive/data/0") + 46, b"\xff"), "UTF-8"),
    "another name": (lambda: patched(central(b"archive/data/0") + 46 + 13, b"7"), "differs from the directory"),
    "name twice": (lambda: patched(central(b"archive/data/0") + 46 + 13, b"1"), "two entries"),
    "truncated": (lambda: VALID[:-1], "no zip archive ends here"),
    "appended": (lambda: VALID + b"x", "no zip archive ends here"),
    "empty": (lambda: b"", "did not write it"),
    "no archive": (lambda: b"GGUF" + bytes(100), "did not write it"),
    "tensor outside of its storage": (
        lambda: with_pickle(PARTS["archive/data.pkl"].replace(b"K\x05\x85", b"K\x06\x85")),
        "reaches outside its storage",
    ),
    "strides outside of the storage": (
        lambda: with_pickle(PARTS["archive/data.pkl"].replace(b"K\x01\x85", b"K\x03\x85")),
        "reaches outside its storage",
    ),
}


def read(data: bytes) -> Any:
    backend = MemoryBackend("archives")
    backend.put("file", data)
    return read_archive(backend, "file")


@pytest.mark.parametrize("name", ARCHIVES)
def test_archive_is_refused(name: str) -> None:
    make, message = ARCHIVES[name]
    with pytest.raises(FormatError, match=message):
        read(make())


def test_archive_that_another_program_packed_is_read() -> None:
    for data in (VALID, packed(PARTS), packed({"renamed" + k.removeprefix("archive"): v for k, v in PARTS.items()})):
        found = read(data)
        assert pickle_mutants.fingerprint(found, data) == pickle_mutants.fingerprint(read(VALID), VALID)


def test_damaged_pickle_of_an_archive_is_named() -> None:
    at = VALID.index(b"LongStorage")
    with pytest.raises(CorruptionError, match=r"data.pkl.*CRC-32"):
        read(patched(at, b"W"))


def test_unsupported_tensors_are_placeholders() -> None:
    tensors = {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
        "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
        "subclass": torch.nn.Buffer(torch.ones(2)),
        "plain": torch.ones(2),
    }
    found = read(pickle_mutants.saved(tensors))
    assert found["plain"].shape == (2,)
    assert explain(found["sparse"]) == "a sparse tensor"
    assert "meta device" in explain(found["meta"])
    assert "conjugated" in explain(found["conjugated"])


# -- objects ----------------------------------------------------------------------------------------------------------


def dcp_with(**changes: Any) -> dict[str, bytes]:
    """Metadata of DCP for one tensor, with other objects in it."""
    given = {"chunks": None, "fqn": "w", "offsets": torch.Size([0]), **changes}
    index = MetadataIndex("w", torch.Size([0]))
    places = {index: _StorageInfo("__0_0.distcp", 0, 9)}
    object.__setattr__(index, "fqn", given["fqn"])  # which may have no hash
    chunks = [ChunkStorageMetadata(given["offsets"], torch.Size([2]))] if given["chunks"] is None else given["chunks"]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([2]), chunks)
    return {".metadata": pickle.dumps(Metadata({"w": tensor}, {}, places))}


def deepspeed_with(**changes: Any) -> dict[str, bytes]:
    """The model file of an engine without ZeRO, with other objects in it."""
    inner = {"state": {}, "param_groups": [{"lr": 0.1, "params": []}]}
    document = {"module": {"w": torch.ones(2)}, "dp_world_size": 1, "optimizer": {"optimizer_state_dict": inner}}
    return {"mp_rank_00_model_states.pt": pickle_mutants.saved({**document, **changes})}


def file_with(value: Any) -> dict[str, bytes]:
    return {"c.pt": pickle_mutants.saved(value)}


class Expanded:
    """A tensor of one stored element."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.ones(1).untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, (0,) * len(self.shape), False, {})


OBJECTS: dict[str, dict[str, bytes]] = {
    "chunks are a number": dcp_with(chunks=5),
    "name is a list": dcp_with(fqn=["w"]),
    "box of other dimensions": dcp_with(offsets=torch.Size([0, 0])),
    "names are numbers": deepspeed_with(module={5: torch.ones(2)}),
    "masters are a number": deepspeed_with(
        optimizer={"optimizer_state_dict": {"state": {}, "param_groups": []}, "fp32_groups": 5}
    ),
    "key is NaN": file_with({"lr_scheduler": {float("nan"): 1}}),
    "tensor below a tuple": file_with({"optimizer": {"state": {(0,): {"step": torch.ones(1)}}, "param_groups": []}}),
    "one name twice": file_with({"model": {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}}),
    "10^24 elements": file_with({"model": {"w": Expanded(1 << 40, 1 << 40)}}),
    "no element, but strides of 10^36": file_with({"model": {"w": Expanded(0, 1 << 61, 1 << 61)}}),
}


@pytest.mark.parametrize("files", OBJECTS.values(), ids=OBJECTS)
def test_objects_of_other_types_are_refused(files: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    path = tmp_path / "c.pt" if "c.pt" in files else tmp_path
    with pytest.raises(FormatError, match=str(path)) as caught:
        bcp.open(path)
    assert len(str(caught.value)) < 1000


MANY = 10_000_000


def _as_ranks(folder: Path, rule: Sharded | Flat) -> None:
    """Open files of ranks 0 and ``MANY``."""
    for rank in (0, MANY):
        torch.save({"w": torch.ones(4), "b": torch.ones(2)}, folder / f"rank{rank}.pt")
    bcp.open(folder, options={"rules": Rules([rule, Replicated(match="b")], files="rank{tp}.pt")})


def _of_deepspeed(folder: Path) -> None:
    document = {"module": {}, "dp_world_size": MANY, "param_shapes": [{"w": torch.Size([2])}]}
    torch.save(document, folder / "mp_rank_00_model_states.pt")
    torch.save({}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    bcp.open(folder)


def _of_dcp(folder: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    found = pickle.loads((folder / ".metadata").read_bytes())
    for one in found.storage_data.values():
        one.relative_path = f"__{'9' * 25}_0.distcp"
        (folder / "__0_0.distcp").rename(folder / one.relative_path)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    bcp.open(folder)


def _of_torch_save(folder: Path) -> None:
    torch.save({"model": {f"w{n}": torch.ones(1).expand(1 << 20) for n in range(3)}}, folder / "c.pt")
    bcp.open(folder / "c.pt")


COUNTS: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "files of sharded tensors": (
        lambda folder: _as_ranks(folder, Sharded(match="w", dim=0, axis=("tp",))),
        RuleError,
        "needs the shard of tp=1, which no rank stored",
    ),
    "files of flat buffers": (
        lambda folder: _as_ranks(folder, Flat(match="w", rename="{member}", axis=("tp",), order=("b",))),
        RuleError,
        "needs the buffer of rank 1 of tp",
    ),
    "DeepSpeed's world size": (_of_deepspeed, CorruptionError, "zero_pp_rank_1_.* is missing, although 10000000 ranks"),
    "expanded tensors": (_of_torch_save, UnsupportedTensorError, r"model\.w0: its elements are scattered in the file"),
    "a file name of DCP": (_of_dcp, FormatError, "torch.distributed.checkpoint.: .*out of range"),
}


@pytest.mark.parametrize(("attack", "error", "message"), COUNTS.values(), ids=COUNTS)
def test_numbers_cost_no_memory(
    attack: Callable[[Path], None], error: type[Exception], message: str, tmp_path: Path
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message) as caught:
            attack(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    assert str(tmp_path) in str(caught.value)


# -- mutants ----------------------------------------------------------------------------------------------------------


def test_mutants_run_nothing_and_need_little_memory() -> None:
    count = 10_000 if sampling.is_full() else 1500
    command = [pickle_mutants.__file__, str(sampling.seed()), "0", str(count)]
    done = warm_python().run(command, timeout=time_limit(300))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["events"] == []
    assert report["grown_mib"] < 200
    results = report["results"]
    assert sum(results.values()) == count
    refused = {kind.__name__ for kind in (FormatError, CorruptionError, CheckpointError)} | {"CRC-32"}
    assert set(results) <= refused | {"equal", "other value"}
    assert all(results.get(kind) for kind in ("FormatError", "CorruptionError", "equal", "other value"))
