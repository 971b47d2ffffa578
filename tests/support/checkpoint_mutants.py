"""Damaged checkpoints of this library, whose checksums are right again, and of other systems: make them from a seed,
use them as a user would, and watch what the library does.

As a script (``folder seed first last``), it prints what became of the mutants, as JSON: errors that are not the
library's, hangs, what was opened or changed outside of the mutant, and how much memory they took.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import random
import resource
import shutil
import signal
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import golden
import msgpack
import numpy as np
import torch
import xxhash
from click.testing import CliRunner
from independent_reader import choices, names, numbers, read_payload
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from trainer_folders import Block, optimizer_of, write_trainer_folder

import bytecheckpoint as bcp
from bytecheckpoint.cli import cli
from bytecheckpoint.convert.copy import remove
from bytecheckpoint.errors import BytecheckpointError, StateError

OWN = ("single", "fsdp2-4", "tp-2", "per-rank-2", "values", "dtypes", "zstd", "zstd-planes", "incremental")
MANIFEST = "manifest.msgpack"
HANG_S = 60
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.", "socket.connect", "pickle.find_class")
OUTSIDE = "private"  # the name of everything that no mutant may reach

HOSTILE = (
    *("..", ".", "", "/", "../private", "../../private/a.txt", "/etc/passwd", "private", "a/../../private", "x/", "//"),
    *("attempt-golden-single/../../private/a.txt", "manifest.msgpack", "objects", "../step-1", "file:///etc/passwd"),
    *(
        "9" * 5000,
        "a" * 5000,
        "model.",
        ".",
        "model..w",
        "\ud800",
        "\n",
        "\0",
        "%s{}",
        "float32",
        "exec",
        "zstd",
        "raw",
    ),
    *("nan", "-1", "1e999", "0", "c10::BFloat16", "é"),
)
NUMBERS = (0, 1, 2, -1, 7, 255, 4096, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 10**12, (1 << 62), (1 << 63) - 1)
HUGE = (1 << 63, (1 << 64) - 1, 10**30, 10**4000)
VALUES: tuple[Any, ...] = (None, True, 1.5, float("nan"), float("inf"), b"", b"bytes", [], {}, [[]], {"a": 1}, "text")


# -- sources ----------------------------------------------------------------------------------------------------------


def write_sources(folder: Path) -> None:
    """Write one root for each kind of checkpoint."""
    for name in OWN:
        source = golden.ROOT / name
        shutil.copytree(source, folder / name if name == "incremental" else folder / name / "step-1")
    model = Block(seed=1)
    optimizer = optimizer_of(model, lr=0.1)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    write_trainer_folder(folder / "trainer" / "step-1", state, step=1, ranks=2)
    tensors = model.state_dict()
    dcp_save(
        {"model": tensors, "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "dcp" / "step-1", no_dist=True
    )
    _write_bytecheckpoint(folder / "bytecheckpoint" / "step-1", tensors)
    _write_huggingface(folder / "huggingface" / "step-1", tensors)
    _write_deepspeed(folder / "deepspeed" / "step-1", model, optimizer)
    (folder / "torch" / "step-1").mkdir(parents=True)
    whole = {"model": tensors, "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(whole, folder / "torch" / "step-1" / "checkpoint.pt")


def _write_bytecheckpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """As the package writes it: a folder of DCP with another class, and one file for each rank."""
    dcp_save(dict(tensors), checkpoint_id=folder / "model", no_dist=True)
    metadata = pickle.dumps(pickle.loads((folder / "model" / ".metadata").read_bytes()), protocol=2)
    theirs = b"cbytecheckpoint.checkpointer.meta_type\nMetadata\n"
    named = metadata.replace(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", theirs)
    (folder / "model" / ".metadata").write_bytes(named)
    (folder / "extra_state").mkdir()
    for rank in range(2):
        torch.manual_seed(rank)
        own = {"step": 3, "numpy": np.random.RandomState(rank).get_state(), "cpu": torch.random.get_rng_state()}
        torch.save(own, folder / "extra_state" / f"extra_state_rank_{rank}.pt")


def _write_huggingface(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True)
    shards = list(tensors.items())[::2], list(tensors.items())[1::2]
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in shard}, folder / file, metadata={"format": "pt"})
        places.update({name: file for name, _ in shard})
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["A"]}))


def _write_deepspeed(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Of two ranks with ZeRO-2."""
    folder.mkdir(parents=True)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    flat = torch.cat([flat, torch.zeros(-len(flat) % 4)])
    common = {"dp_world_size": 2, "mp_world_size": 1, "ds_version": "0.15.0", "ds_config": {}, "global_steps": 3}
    names_of = dict(enumerate(shapes))
    model_file = {
        **common,
        "module": model.state_dict(),
        "buffer_names": [],
        "param_shapes": [shapes],
        "shared_params": {},
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "lr_scheduler": None,
    }
    torch.save(model_file, folder / "mp_rank_00_model_states.pt")
    for rank, part in enumerate(flat.chunk(2)):
        group = {"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "names": names_of}
        inner = {"state": {0: {"step": 1, "exp_avg": part * 2, "exp_avg_sq": part * 3}}, "param_groups": [group]}
        zero = {
            "zero_stage": 2,
            "loss_scaler": None,
            "base_optimizer_state": inner,
            "single_partition_of_fp32_groups": [part],
            "partition_count": [2],
            "group_paddings": [0],
        }
        saved = {"optimizer_state_dict": zero, "ds_config": {}, "ds_version": "0.15.0"}
        torch.save(saved, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


# -- changes ----------------------------------------------------------------------------------------------------------


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes that are damaged at one place."""
    result, at = bytearray(data), rng.randrange(len(data) or 1)
    kind = rng.randrange(6)
    if kind == 0 and result:
        result[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        result[at:at] = rng.randbytes(rng.randint(1, 8))
    elif kind == 2:
        del result[at : at + rng.randint(1, 40)]
    elif kind == 3:
        del result[at:]
    elif kind == 4:
        result[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"))
    else:
        result[at:at] = result[: rng.randint(1, 200)]
    return bytes(result)


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _nodes(one, (*path, key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _nodes(one, (*path, number))


def change_tree(tree: Any, rng: random.Random, change: Callable[[Any, random.Random], Any]) -> Any:
    """Change one node of a tree of dicts, lists and other values, or remove, add or repeat one."""
    path = rng.choice(list(_nodes(tree)))
    if not path:
        return change(tree, rng)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    kind, key = rng.randrange(10), path[-1]
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice([*HOSTILE, *NUMBERS, *parent])] = parent[key] if rng.random() < 0.5 else parent.pop(key)
    elif kind == 1:
        parent.insert(key, parent[key])
    else:
        parent[key] = change(parent[key], rng)
    return tree


def change_value(value: Any, rng: random.Random) -> Any:
    """Return another value, mostly of the same type."""
    if rng.random() < 0.15:
        return copy.deepcopy(rng.choice([*VALUES, *NUMBERS, *HOSTILE]))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([*NUMBERS, *HUGE, value + 1, value - 1, -value])
    if isinstance(value, str):
        return rng.choice([*HOSTILE, value + "x", value[:-1], value + "/../private"])
    if isinstance(value, bytes):
        return change_bytes(value, rng)
    if isinstance(value, float):
        return rng.choice([float("nan"), float("inf"), -value, 1e308])
    if isinstance(value, torch.Tensor):
        return rng.choice(
            [value.double(), value.flatten()[:-1], value.new_empty(0), value[None], value.to(torch.complex64)]
        )
    if isinstance(value, (tuple, torch.Size)):
        items = list(value)
        return tuple(change_tree(items, rng, change_value) if items else [1])
    if isinstance(value, (dict, list)):
        return rng.choice([type(value)(), None, 3, "text", [value], {"a": value}])
    return copy.deepcopy(rng.choice(VALUES))


def change_column(value: Any, rng: random.Random) -> Any:
    """Return another value; of a column of a manifest, often with one other number or name."""
    if isinstance(value, dict) and set(value) == {"w", "d"} and value["d"] and rng.random() < 0.9:
        found = numbers(value)
        row = rng.randrange(len(found))
        found[row] = rng.choice([*map(abs, NUMBERS), (1 << 64) - 1, found[row] + 1, rng.choice(found)])
        if rng.random() < 0.2:
            found = found[:row] + found[row + 1 :] if rng.random() < 0.5 else [*found, found[row]]
        return {"w": 8, "d": np.array(found, np.uint64).tobytes()}
    if isinstance(value, dict) and set(value) == {"n", "d"} and value["n"] and rng.random() < 0.9:
        found_names = names(value)
        row = rng.randrange(len(found_names))
        hostile = change_value(found_names[row], rng) if rng.random() < 0.7 else rng.choice(found_names)
        found_names[row] = hostile if isinstance(hostile, str) else "x"
        packed = "".join(f"{one}\0" for one in found_names).encode("utf-8", "surrogatepass")
        return {"n": len(found_names), "d": packed}
    return change_value(value, rng)


def seal(document: dict[str, Any]) -> bytes:
    """Return a manifest with a correct checksum."""
    payload = _packed(document)
    parts = ("bytecheckpoint", 1, "raw", len(payload), payload)
    body = b"\x96" + b"".join(msgpack.packb(part) for part in parts) + b"\xc4\x10"
    return body + xxhash.xxh3_128_digest(body)


def _packed(value: Any) -> bytes:
    def plain(one: Any) -> Any:
        if isinstance(one, dict):
            return {plain(key): plain(entry) for key, entry in one.items()}
        if isinstance(one, list):
            return [plain(entry) for entry in one]
        if isinstance(one, int) and not -(1 << 63) <= one < 1 << 64:
            return "9" * 4000
        return one

    return bytes(msgpack.packb(plain(value), unicode_errors="surrogatepass"))


def mutate_own(root: Path, rng: random.Random) -> None:
    """Change one to three places of a checkpoint, and make the checksums right again."""
    step = root / ("step-2" if (root / "step-2").exists() else "step-1")
    document = read_payload((step / MANIFEST).read_bytes())
    files = [
        root / "objects" / name if document["shared"] else step / name for name in names(document["files"]["name"])
    ]
    kinds = choices(document["files"]["kind"])
    for _ in range(rng.choice([1, 1, 2, 3])):
        with suppress(Exception):  # an earlier change may have damaged what this one would change
            which = rng.randrange(10)
            if which < 6:
                document = change_tree(document, rng, change_column)
            elif which == 6:
                document["metadata"] = _packed(change_tree(msgpack.unpackb(document["metadata"]), rng, change_value))
            else:
                number = rng.randrange(len(files))
                data = files[number].read_bytes()
                changed = _change_values(data, rng) if kinds[number] == "values" else _change_tensors(data, rng)
                _replace(document, number, files[number], changed, is_whole=kinds[number] == "values")
    (step / MANIFEST).write_bytes(seal(document))


def _replace(document: Any, number: int, file: Path, data: bytes, *, is_whole: bool) -> None:
    """Write a changed file, and state its size and the checksum of its header as the manifest does."""
    file.write_bytes(data)
    table = document["files"]
    sizes, heads = numbers(table["size"]), numbers(table["head_length"])
    sizes[number] = len(data)
    heads[number] = len(data) if is_whole else min(heads[number], len(data))
    digest = xxhash.xxh3_128_digest(data[: heads[number]])
    sums = table["head_checksum"]
    table["head_checksum"] = sums[: 16 * number] + digest + sums[16 * number + 16 :]
    table["size"] = {"w": 8, "d": np.array(sizes, np.uint64).tobytes()}
    table["head_length"] = {"w": 8, "d": np.array(heads, np.uint64).tobytes()}


def _change_values(data: bytes, rng: random.Random) -> bytes:
    """Change a file of plain values: its bytes, its structure, or one encoded value."""
    if rng.random() < 0.3:
        return change_bytes(data, rng)
    document = msgpack.unpackb(data)
    if rng.random() < 0.4 or not document["entries"]:
        return _packed(change_tree(document, rng, change_value))
    entry = rng.choice(document["entries"])
    encoded = entry[-1]
    if rng.random() < 0.5:
        entry[-1] = change_bytes(encoded, rng)
    else:
        value = msgpack.unpackb(encoded, strict_map_key=False)
        if isinstance(value, msgpack.ExtType):
            entry[-1] = msgpack.packb(
                msgpack.ExtType(rng.choice([value.code, rng.randrange(20)]), change_bytes(value.data, rng))
            )
        else:
            entry[-1] = _packed(change_tree(value, rng, change_value))
    return _packed(document)


def _change_tensors(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a file of tensors, as JSON or bytes, or its data."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) or rng.random() < 0.4:
        return change_bytes(data, rng)
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return change_bytes(data, rng)
    changed = _json(change_tree(header, rng, change_value))
    return len(changed).to_bytes(8, "little") + changed + data[8 + length :]


def _json(value: Any) -> bytes:
    return json.dumps(value, default=repr).encode("utf-8", "surrogatepass")


def mutate_foreign(root: Path, rng: random.Random) -> None:
    """Change one or two files of another system."""
    files = sorted(path for path in (root / "step-1").rglob("*") if path.is_file())
    for _ in range(rng.choice([1, 1, 2])):
        file = rng.choice(files)
        kind = rng.randrange(12)
        if kind == 0:
            file.unlink(missing_ok=True)
        elif kind == 1:
            file.with_name(rng.choice(files).name).write_bytes(file.read_bytes() if file.exists() else b"")
        elif file.exists():
            file.write_bytes(_change_foreign(file, rng))


def _change_foreign(file: Path, rng: random.Random) -> bytes:
    data = file.read_bytes()
    if rng.random() < 0.2:
        return change_bytes(data, rng)
    try:
        if file.suffix == ".json":
            return _json(change_tree(json.loads(data), rng, change_value))
        if file.suffix == ".safetensors":
            return _change_tensors(data, rng)
        if file.name == ".metadata":
            return _change_pickle(data, rng)
        if rng.random() < 0.3:
            return _change_archive(data, rng)
        saved = io.BytesIO()
        found = torch.load(io.BytesIO(data), weights_only=False)
        torch.save(change_tree(found, rng, change_value), saved)
        return saved.getvalue()
    except Exception:  # an earlier change has damaged it, or torch cannot store this one
        return change_bytes(data, rng)


def _change_pickle(data: bytes, rng: random.Random) -> bytes:
    """Change the metadata of DCP: one of the objects in it."""
    found = pickle.loads(data)  # of this script
    objects: list[Any] = [found, found.__dict__, *_objects(found)]
    change_tree(rng.choice([one for one in objects if isinstance(one, (dict, list))]), rng, change_value)
    return pickle.dumps(found, protocol=rng.choice([2, 4]))


def _objects(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what can be changed in objects of metadata."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    inner = list(inner) + (
        [value.__dict__] if hasattr(value, "__dict__") and not isinstance(value, torch.dtype) else []
    )
    for one in inner if depth < 6 else []:
        yield one
        yield from _objects(one, depth + 1)


def _change_archive(data: bytes, rng: random.Random) -> bytes:
    """Change one member of an archive of ``torch.save``; its CRC-32 is right again."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(changed, "w") as target:
        members = source.infolist()
        chosen = rng.choice(
            [one for one in members if one.filename.endswith(("data.pkl", "version", "byteorder", "/0"))]
        )
        for member in members:
            content = source.read(member)
            name = (
                rng.choice([*HOSTILE, member.filename]) if member is chosen and rng.random() < 0.2 else member.filename
            )
            target.writestr(name.replace("\ud800", ""), change_bytes(content, rng) if member is chosen else content)
    return changed.getvalue()


# -- uses -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> None:
    """Read everything that a checkpoint has."""
    found = bcp.open(path)
    repr(found), found.metadata, found.step, found.left_out, found.aliases, found.world_size
    for name in list(found)[:50]:
        repr(found[name])
    with suppress(StateError):  # files without checksums
        found.verify()
    for section in list(found.sections)[:20]:
        found.state_dict(section)
        for rank in range(min(found.world_size, 2)):
            found.tree(section, rank=rank)


def load(path: Path) -> None:
    """Load into a model and an optimizer."""
    if path.parent.name in ("single", "fsdp2-4", "tp-2"):
        state = dict(zip(("model", "optimizer"), golden.plain_target(path.parent.name)))
    else:
        model = Block(seed=2)
        state = {"model": model, "optimizer": optimizer_of(model, lr=0.2), "extra_state": {}}
    bcp.load(path, state, strict=False)


def search(path: Path) -> None:
    """Look for checkpoints in the root."""
    bcp.latest(path.parent)
    command("ls", path.parent, "--json")


def command(*words: object) -> None:
    """Run one command, which ends as documented."""
    result = CliRunner().invoke(cli, [*map(str, words)], prog_name="bcp", input="")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in range(7), result.exit_code
    assert "bcp: unexpected" not in result.stderr, result.stderr


def overwrite(path: Path) -> None:
    """Save at the same path."""
    bcp.save(path, {"model": {"w": torch.ones(2)}}, step=3)
    assert bcp.open(path).step == 3


def retain(path: Path) -> None:
    """Save in the same root, and keep one checkpoint."""
    with bcp.CheckpointManager(path.parent, keep=1, cadence=1, async_save=False) as manager:
        manager.save(900, {"model": {"w": torch.ones(2)}})


def export(path: Path) -> None:
    """Write what it has in another form, next to the root."""
    target = path.parent.parent / "exported"
    shutil.rmtree(target, ignore_errors=True)
    command(random.choice(["export", "import", "reshard", "copy"]), path, target)
    shutil.rmtree(target, ignore_errors=True)


def delete(path: Path) -> None:
    """Remove the checkpoint."""
    remove(str(path))


USES: tuple[Callable[[Path], None], ...] = (
    *(read, read, read, load, load, search, overwrite, retain, delete, export),
    lambda path: command("inspect", path, "--json"),
    lambda path: command("show", path, "model"),
    lambda path: command("rm", path, "--yes"),
)
READS = USES[:5]


# -- the run ----------------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """A mutant took too long."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Watch:
    """What this process opens outside and runs while it is on."""

    def __init__(self) -> None:
        self.is_on, self.events = False, list[str]()
        sys.addaudithook(self._see)

    def _see(self, event: str, args: Any) -> None:
        if not self.is_on or len(self.events) > 20:
            return
        file = str(args[0]) if event == "open" else ""
        # A search looks for a manifest in each folder of the root.
        is_outside = "/etc/passwd" in file or (OUTSIDE in file and not file.endswith(f"{OUTSIDE}/{MANIFEST}"))
        if is_outside or event.startswith(FORBIDDEN):
            self.events.append(f"{event} {str(args)[:200]}")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def main(folder: Path, seed: int, first: int, last: int) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sources, work = folder / "sources", folder / "work"
    write_sources(sources)
    kinds = sorted(path.name for path in sources.iterdir())
    outside = [work / OUTSIDE, *(work / kind / OUTSIDE for kind in kinds)]
    for kind in kinds:  # also what the library imports when it first needs it
        read(_paths(sources, kind))
    watch, results, faults = Watch(), Counter[str](), list[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, last):
        rng = random.Random(f"{seed} {number}")
        kind = kinds[number % len(kinds)]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(sources / kind, work / kind)
        for one in (work / OUTSIDE, work / kind / OUTSIDE):
            one.mkdir()
            (one / "a.txt").write_bytes(b"dear")
        (mutate_own if kind in OWN else mutate_foreign)(work / kind, rng)
        use = rng.choice(USES if kind in OWN else READS)
        label = "own" if kind in OWN else kind
        random.seed(number)
        watch.is_on = True
        try:
            with limited(HANG_S):
                use(_paths(work, kind))
            results[f"{label}: accepted"] += 1
        except BytecheckpointError as error:
            results[f"{label}: {type(error).__name__}"] += 1
        except Hang:
            faults.append(f"mutant {number} of {kind} hangs in {use.__name__}")
        except Exception as error:
            faults.append(f"mutant {number} of {kind} in {use.__name__} raised {error!r:.300}")
        watch.is_on = False
        if watch.events:
            faults.append(f"mutant {number} of {kind} in {use.__name__}: {watch.events}")
            watch.events.clear()
        if any(contents(one) != {str(one / "a.txt"): b"dear"} for one in outside if one.parent in (work, work / kind)):
            faults.append(f"mutant {number} of {kind} in {use.__name__} changed what is outside")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"results": dict(sorted(results.items())), "faults": faults, "grown_mib": grown / 1024}))


def _paths(root: Path, kind: str) -> Path:
    if kind == "torch":
        return root / kind / "step-1" / "checkpoint.pt"
    return root / kind / ("step-2" if kind == "incremental" else "step-1")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
