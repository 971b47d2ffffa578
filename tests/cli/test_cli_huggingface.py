"""``bcp export`` and ``bcp import``: bit-exact, complete or nothing, and robust against hostile files."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import cli_checkpoints as kit
import pytest
import safetensors.torch
import torch

import bytecheckpoint as bcp
from bytecheckpoint.convert.export import export_safetensors
from bytecheckpoint.convert.importing import import_checkpoint
from bytecheckpoint.convert.rewriter import PIECE_BYTES
from bytecheckpoint.errors import (
    KeyExistsError,
    MismatchError,
    NameCollisionError,
    NameNotFoundError,
    StateError,
    UnsupportedTensorError,
    UsageError,
)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Read a folder with the safetensors library, through its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.torch.load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_map.values())):
        part = safetensors.torch.load_file(folder / file)
        assert set(part) == {name for name, where in weight_map.items() if where == file}
        tensors |= part
    return tensors


def model_of(path: Path) -> dict[str, torch.Tensor]:
    return {name[6:]: tensor for name, tensor in kit.tensors_of(path).items() if name.startswith("model.")}


@pytest.mark.parametrize("which", ["one", "four"])
def test_export_is_bit_equal(which: str, request: pytest.FixtureRequest, tmp_path: Path, bcp_command) -> None:
    path = request.getfixturevalue(which)
    ran = bcp_command("export", path, tmp_path / "hf", "--json")
    assert ran.code == 0
    assert [file["name"] for file in ran.json["files"]] == ["model.safetensors"]
    expected = model_of(path)
    assert ran.json["dropped"] == ({"head.weight": "embed.weight"} if which == "one" else {})
    expected.pop("head.weight", None)
    kit.assert_same_tensors(read_folder(tmp_path / "hf"), expected)
    with safetensors.safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("which", ["one", "four"])
def test_file_sizes_are_bounded_and_the_index_is_right(
    which: str, request: pytest.FixtureRequest, tmp_path: Path, bcp_command
) -> None:
    path = request.getfixturevalue(which)
    limit = 4096 + 200
    ran = bcp_command("export", path, tmp_path / "hf", "--max-file-size", limit, "--json")
    assert ran.code == 0
    assert len(ran.json["files"]) > 1
    for file in ran.json["files"]:
        assert file["bytes"] == (tmp_path / "hf" / file["name"]).stat().st_size
        tensors = safetensors.torch.load_file(tmp_path / "hf" / file["name"])
        assert file["bytes"] <= limit or len(tensors) == 1
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found = read_folder(tmp_path / "hf")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    expected = model_of(path)
    expected.pop("head.weight", None)
    kit.assert_same_tensors(found, expected)


def test_tied_names_cast_and_rename(one: Path, tmp_path: Path, bcp_command) -> None:
    options = ["--tied", "copy", "--cast", "bfloat16", "--rename", "model.inner.=model.core.", "--exclude", "none"]
    assert bcp_command("export", one, tmp_path / "hf", *options).code == 0
    found = read_folder(tmp_path / "hf")
    stored = model_of(one)
    assert set(found) == {"coarse", "count", "core.bias", "core.weight", "embed.weight", "head.weight"}
    assert torch.equal(found["embed.weight"], found["head.weight"])
    assert torch.equal(found["core.weight"], stored["inner.weight"].to(torch.bfloat16))
    assert found["count"].dtype == torch.int64
    assert torch.equal(found["coarse"], stored["coarse"])


def test_patterns_that_match_nothing_are_errors(one: Path, tmp_path: Path, bcp_command) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors")
    excluding = ["--exclude", "inner.*", "--exclude", "iner.*", "--exclude", "model.inner.*"]
    for command in (
        ["export", one, tmp_path / "out", *excluding],
        ["export", one, tmp_path / "out", "--format", "dcp", *excluding],
        ["export", one, tmp_path / "out", "--format", "torch", *excluding],
        ["import", tmp_path / "m.safetensors", tmp_path / "out", *excluding],
        ["average", one, one, "--output", tmp_path / "out", *excluding],
    ):
        ran = bcp_command(*command)
        assert ran.code == 1, (command, ran.stderr)
        assert "exclude has patterns that match nothing" in ran.stderr
        assert "  iner.*" in ran.stderr
        assert not (tmp_path / "out").exists()
    ran = bcp_command("inspect", one, "--tensor", "model.iner.*")
    assert ran.code == 2
    assert "matches no tensor" in ran.stderr


def test_an_export_has_all_expected_names_or_writes_nothing(one: Path, tmp_path: Path, bcp_command) -> None:
    names = ["coarse", "count", "embed.weight", "inner.bias", "inner.weight", "none"]
    expect = tmp_path / "names.json"

    def run(document: object, target: str = "hf"):
        expect.write_text(json.dumps(document))
        return bcp_command("export", one, tmp_path / target, "--expect", expect)

    ran = run([*names, "inner.wieght2"])
    assert ran.code == 1
    assert "inner.wieght2 (did you mean 'inner.weight'?)" in ran.stderr
    ran = run(names[:-1])
    assert ran.code == 1
    assert "unexpected: 1\n    none" in ran.stderr
    ran = run({**dict.fromkeys(names), "inner.weight": [4, 6]})
    assert ran.code == 1
    assert "[6, 4] is stored, [4, 6] is expected" in ran.stderr
    assert kit.folder_contents(tmp_path) == ["names.json"]
    assert run({**dict.fromkeys(names), "inner.weight": [6, 4]}).code == 0
    # The expected one of tied names is the one that is written, whichever the checkpoint stored.
    assert run([name.replace("embed", "head") for name in names], "head").code == 0
    assert "head.weight" in read_folder(tmp_path / "head")
    for other in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        assert bcp_command("export", one, tmp_path / f"as-{other.name}", "--expect", other).code == 0
    assert run({"a": "b"}, "x").code == 2
    assert bcp_command("export", one, tmp_path / "x", "--expect", tmp_path / "none.json").code == 2


def test_a_failed_export_leaves_nothing(four: Path, tmp_path: Path, bcp_command) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(four, path)
    file = next(path.glob("*/model-00003.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = kit.folder_contents(tmp_path)
    ran = bcp_command("export", path, tmp_path / "hf", "--max-file-size", 4096)
    assert ran.code == 4
    assert file.name in ran.stderr
    assert kit.folder_contents(tmp_path) == before


def test_an_existing_model_is_not_mixed_with_another(one: Path, tmp_path: Path, bcp_command) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert bcp_command("export", one, tmp_path).code == 0
    ran = bcp_command("export", one, tmp_path)
    assert ran.code == 5
    assert "already holds a model" in ran.stderr


def test_export_refuses_unsupported_tensors_and_invalid_arguments(tmp_path: Path) -> None:
    bcp.save(
        tmp_path / "c",
        {"model": {"z": torch.zeros(2, dtype=torch.complex128), "a.b": torch.zeros(2), "a": torch.ones(1)}},
    )
    checkpoint = bcp.open(tmp_path / "c")
    with pytest.raises(UnsupportedTensorError, match=r"z \(complex128\)"):
        export_safetensors(checkpoint, str(tmp_path / "hf"))
    with pytest.raises(NameCollisionError, match="a"):
        export_safetensors(checkpoint.renamed({"model.a.b": "model.a"}), str(tmp_path / "hf"))
    for wrong in (
        {"section": "optimizer"},
        {"cast": "int8"},
        {"tied": "keep"},
        {"max_file_bytes": 0},
        {"expected": "a"},
    ):
        with pytest.raises((UsageError, NameNotFoundError)):
            export_safetensors(checkpoint, str(tmp_path / "hf"), **{"exclude": ["z"], **wrong})
    assert not (tmp_path / "hf").exists()


def test_export_of_per_rank_tensors_is_refused(four: Path, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="noise@0"):
        export_safetensors(bcp.open(four), str(tmp_path / "hf"), section="own")


@pytest.mark.parametrize("which", ["one", "four"])
@pytest.mark.parametrize("limit", [10**9, 4096])
def test_round_trip(which: str, limit: int, request: pytest.FixtureRequest, tmp_path: Path, bcp_command) -> None:
    path = request.getfixturevalue(which)
    assert bcp_command("export", path, tmp_path / "hf", "--max-file-size", limit).code == 0
    ran = bcp_command("import", tmp_path / "hf", tmp_path / "back", "--step", 5, "--json")
    assert ran.code == 0
    assert bcp.open(tmp_path / "back").step == 5
    expected = model_of(path)
    expected.pop("head.weight", None)
    kit.assert_same_tensors(model_of(tmp_path / "back"), expected)
    assert bcp.open(tmp_path / "back").verify().ok
    if which == "one":
        model = kit.Tied(seed=3)
        bcp.load(tmp_path / "back", {"model": model})
        kit.assert_same_tensors(dict(model.state_dict()), model_of(path))


def test_tensors_larger_than_a_piece(tmp_path: Path) -> None:
    """Pieces and chunks end inside rows."""
    big = torch.arange(PIECE_BYTES // 4 + 12_345, dtype=torch.float32).reshape(-1, 1)
    odd = torch.arange(3 * 700_001, dtype=torch.float32).reshape(3, 700_001)
    bcp.save(tmp_path / "c", {"model": {"big": big, "odd": odd}})
    export_safetensors(bcp.open(tmp_path / "c"), str(tmp_path / "hf"))
    kit.assert_same_tensors(read_folder(tmp_path / "hf"), {"big": big, "odd": odd})
    import_checkpoint(bcp.open(tmp_path / "hf" / "model.safetensors"), str(tmp_path / "back"))
    kit.assert_same_tensors(model_of(tmp_path / "back"), {"big": big, "odd": odd})


def test_import_of_a_file_by_the_safetensors_library(tmp_path: Path, bcp_command) -> None:
    """The safetensors library chooses its own order and alignment."""
    tensors = {
        "b": torch.arange(3, dtype=torch.uint8),
        "a": torch.randn(2, 3),
        "s": torch.tensor(1.5, dtype=torch.float16),
    }
    safetensors.torch.save_file(tensors, tmp_path / "adapter.safetensors")
    for source, target in ((tmp_path, "folder"), (tmp_path / "adapter.safetensors", "file")):
        ran = bcp_command("import", source, tmp_path / target, "--rename", "model.=model.x.", "--section", "lora")
        assert ran.code == 0
        kit.assert_same_tensors(kit.tensors_of(tmp_path / target), {f"lora.x.{name}": t for name, t in tensors.items()})


def header_file(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_hostile_sources_are_refused(tmp_path: Path, bcp_command) -> None:
    def refused(code: int, words: str) -> None:
        ran = bcp_command("import", tmp_path / "src", tmp_path / "dst")
        assert ran.code == code, ran.stderr
        assert words in ran.stderr
        assert not (tmp_path / "dst").exists()

    source = tmp_path / "src"
    source.mkdir()
    file, index = source / "model-1.safetensors", source / "model.safetensors.index.json"
    file.write_bytes(struct.pack("<Q", 1 << 40))
    refused(4, "model-1.safetensors")
    header_file(file, {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, b"1234")
    refused(4, "does not take 4 bytes")
    header_file(file, {"a": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]}}, b"123456")
    refused(6, "F6_E2M3")
    header_file(file, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234")
    for weight_map, code, words in (
        ({"a": "../model-1.safetensors"}, 4, "not a safetensors file in the same folder"),
        ({"a": "model-2.safetensors"}, 4, "missing"),
        ({"a": file.name, "b": file.name}, 4, "disagrees with the files"),
        ({}, 4, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(code, words)
    index.write_text("[" * 100_000)
    refused(4, "not JSON")
    index.write_text(json.dumps({"weight_map": {"a": file.name}}))
    shutil.copy(file, source / "model.safetensors")
    refused(3, "both")
    index.unlink()
    (source / "model.safetensors").unlink()
    shutil.copy(file, source / "model-2.safetensors")
    refused(3, "2 safetensors files")


def test_import_collisions_and_existing_targets(one: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "m.safetensors")
    source = bcp.open(tmp_path / "m.safetensors")
    with pytest.raises(NameCollisionError, match="two stored names"):
        import_checkpoint(source.renamed(lambda name: "model.same"), str(tmp_path / "dst"))
    with pytest.raises(NameCollisionError, match="@"):
        import_checkpoint(source.renamed({"model.a": "model.a@1"}), str(tmp_path / "dst"))
    with pytest.raises(StateError):
        import_checkpoint(source, str(tmp_path / "dst"), section="not/a/name")
    assert not (tmp_path / "dst").exists()
    shutil.copytree(one, tmp_path / "taken")
    with pytest.raises(KeyExistsError, match="already holds a checkpoint"):
        import_checkpoint(source, str(tmp_path / "taken"))
    assert bcp.open(tmp_path / "taken").verify().ok


@pytest.mark.parametrize("limit", [10**9, 4096])
def test_an_unfinished_export_cannot_be_loaded(limit: int, one: Path, tmp_path: Path) -> None:
    """Readers reject the folder at any moment of an export, and an interruption leaves nothing."""
    seen: list[int] = []

    def look(nbytes: int) -> None:
        seen.append(nbytes)
        assert not (tmp_path / "model.safetensors.index.json").exists()
        if (tmp_path / "model.safetensors").exists():
            with pytest.raises(safetensors.SafetensorError):
                safetensors.torch.load_file(tmp_path / "model.safetensors")
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_safetensors(bcp.open(one), str(tmp_path), max_file_bytes=limit, progress=look)
    assert kit.folder_contents(tmp_path) == []
