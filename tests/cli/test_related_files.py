"""The configuration and the tokenizer of a model: import keeps them, export writes them back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bytecheckpoint as bcp
from bytecheckpoint.convert.export import ExportedBox, export_safetensors
from bytecheckpoint.convert.importing import import_checkpoint
from bytecheckpoint.errors import KeyExistsError, NameCollisionError, NameNotFoundError
from bytecheckpoint.tensors.geometry import Box

_KEPT = {
    "config.json": json.dumps({"dtype": "float32", "hidden_size": 3}),
    "generation_config.json": "{}",
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "merges.txt": "a b\n",
    "chat_template.jinja": "{{ messages }}",
}
_OTHERS = {"modeling_custom.py": "raise SystemExit", "README.md": "#", "training_args.bin": "x"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, text in (_KEPT | _OTHERS).items():
        (folder / name).write_text(text)
    save_file({"a": torch.randn(4, 3), "b": torch.arange(5)}, folder / "model.safetensors")
    return folder


def _related(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix != ".safetensors"}


def test_an_import_keeps_what_an_export_restores(source: Path, tmp_path: Path, bcp_command) -> None:
    import_checkpoint(bcp.open(source), str(tmp_path / "own"))
    assert bcp.open(tmp_path / "own").verify().ok
    ran = bcp_command("export", tmp_path / "own", tmp_path / "back", "--json")
    assert (ran.code, set(ran.json["related"])) == (0, set(_KEPT))
    assert ran.json["compared_with"] is None, "transformers is not installed, or does not have the architecture"
    assert _related(tmp_path / "back") == _KEPT
    # They are files of the checkpoint: copied, verified and removed with it.
    assert bcp_command("copy", tmp_path / "own", tmp_path / "copy").code == 0
    kept = next((tmp_path / "copy").glob("*/tokenizer.json"))
    kept.write_text(kept.read_text().replace("1.0", "1.1"))
    assert bcp_command("verify", tmp_path / "copy").code == 1
    assert bcp_command("export", tmp_path / "copy", tmp_path / "damaged").code == 4
    assert bcp_command("rm", tmp_path / "copy", "--yes").code == 0
    assert not list((tmp_path / "copy").glob("*/*"))


def test_files_come_from_the_named_folder(source: Path, tmp_path: Path, bcp_command) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"torch_dtype": "float32", "hidden_size": 4}))
    ran = bcp_command("export", source, tmp_path / "out", "--config-from", other, "--cast", "bfloat16")
    assert ran.code == 0
    assert {name: json.loads(text) for name, text in _related(tmp_path / "out").items()} == {
        "config.json": {"torch_dtype": "bfloat16", "hidden_size": 4}
    }
    (other / "config.json").unlink()
    ran = bcp_command("export", source, tmp_path / "none", "--config-from", other)
    assert (ran.code, (tmp_path / "none").exists()) == (2, False)
    assert "has no config.json" in ran.stderr


def test_existing_files_are_not_changed(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "config.json").write_text("{}")
    related = {name: text.encode() for name, text in _KEPT.items()}
    with pytest.raises(KeyExistsError, match=r"config\.json exists with other contents"):
        export_safetensors(bcp.open(source), str(target), related=related)
    assert _related(target) == {"config.json": "{}"}
    report = export_safetensors(bcp.open(source), str(target), related={"config.json": b"{}", "merges.txt": b"a b"})
    assert report.related == ("merges.txt",)


def test_parts_of_stacked_tensors(tmp_path: Path) -> None:
    """Numpy's slices are the oracle. Parts may be larger than the pieces in which an export reads."""
    stacked = torch.randn(3, 2 * 700_001, 2, dtype=torch.float64)
    bcp.save(tmp_path / "c", {"model": {"experts": {"w": stacked}, "a": torch.ones(2)}})
    half = 700_001
    parts = {
        f"{number}.{name}": ExportedBox("experts.w", Box((number, start, 0), (1, half, 2)), (half, 2))
        for number in range(3)
        for name, start in (("gate", 0), ("up", half))
    }
    checkpoint = bcp.open(tmp_path / "c")
    export_safetensors(checkpoint, str(tmp_path / "out"), parts=parts, exclude=["2.up"], cast="float32")
    found = load_file(tmp_path / "out/model.safetensors")
    expected = {"a": torch.ones(2)}
    for number in range(3):
        expected |= {f"{number}.gate": stacked[number, :half], f"{number}.up": stacked[number, half:]}
    del expected["2.up"]
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.float()), name
    with pytest.raises(NameNotFoundError, match=r"parts of experts\.v"):
        export_safetensors(
            checkpoint, str(tmp_path / "x"), parts={"p": ExportedBox("experts.v", Box((0,), (1,)), (1,))}
        )
    with pytest.raises(NameCollisionError, match="a"):
        export_safetensors(
            checkpoint, str(tmp_path / "x"), parts={"a": ExportedBox("experts.w", Box((0, 0, 0), (1, 1, 2)), (1, 2))}
        )


def test_a_configuration_that_names_no_architecture(source: Path, tmp_path: Path, bcp_command) -> None:
    (source / "config.json").write_text(json.dumps({"model_type": "mixtral", "architectures": []}))
    ran = bcp_command("export", source, tmp_path / "out")
    assert (ran.code, "config.json names no architecture" in ran.stderr) == (6, True)
    assert not (tmp_path / "out").exists()
    assert bcp_command("export", source, tmp_path / "out", "--partial").code == 0
