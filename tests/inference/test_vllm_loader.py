"""What the load format accepts: the same as a push. No engine runs; needs vLLM."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytest.importorskip("transformers")

from toy_blocks import reference
from vllm_pushes import made

import bytecheckpoint as bcp
from bytecheckpoint.errors import MismatchError, StateError, UsageError
from bytecheckpoint.inference.push import Pusher
from bytecheckpoint.inference.push.engine_model import record_load
from bytecheckpoint.inference.push.engines.base import Engine
from bytecheckpoint.inference.push.messages import Table
from bytecheckpoint.tensors.shards import basic_meta

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those that vLLM's own modules give rise to
    from vllm.config import LoadConfig

    from benchmarks import vllm_layout
    from benchmarks.vllm_layout import EngineRank
    from bytecheckpoint.inference.vllm import worker as vllm_worker
    from bytecheckpoint.inference.vllm.loader import BcpModelLoader
    from bytecheckpoint.inference.vllm.model import VllmModel

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # the warnings are vLLM's own
    pytest.mark.sampled(4, of=__name__),
]

_FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(2)],
}  # fmt: skip
_NAME = "model.layers.1.self_attn.q_proj.weight"


class _Engine(Engine):
    """Of one worker, in this process."""

    name = "the engine"

    def __init__(self, config: Any, model: nn.Module) -> None:
        self._config, self._model = config, model

    def call(self, request: str, timeout_s: float) -> list[str]:
        return [vllm_worker.answer(self._config, self._model, request)]

    def pause(self, timeout_s: float) -> None:
        return

    def resume(self, version: int | str | None, timeout_s: float, *, changed: bool) -> None:
        return


@contextmanager
def _started(folder: Path, checkpoint: Path, **options: Any) -> Iterator[tuple[Any, nn.Module]]:
    """The model of the configuration in ``folder``, as it starts from ``checkpoint``."""
    config = vllm_layout._engine_config(folder, EngineRank())
    with vllm_layout._built(config, EngineRank(), real=True) as model:
        extra = {"path": str(checkpoint), **options}
        loader = BcpModelLoader(LoadConfig(load_format="bcp", model_loader_extra_config=extra))
        loader.load_weights(model, config.model_config)
        yield config, model


def _stored(folder: Path, state: Any, step: int | None = None) -> Path:
    bcp.save(folder / "checkpoint", {"model": state}, step=step)
    return folder / "checkpoint"


def _is_refused(folder: Path, kind: str, state: dict[str, torch.Tensor], *texts: str) -> None:
    made(kind, 0).save_pretrained(folder / "hf")
    checkpoint = _stored(folder, state)
    with pytest.raises((MismatchError, StateError)) as raised:
        with _started(folder / "hf", checkpoint):
            pass
    assert not [text for text in texts if text not in str(raised.value)], raised.value


def test_whole_numbers(tmp_path: Path) -> None:
    state = made("llama", 1).state_dict()
    state[_NAME] = state[_NAME].to(torch.int64)
    _is_refused(tmp_path, "llama", state, "there are whole numbers", f"{_NAME}: it is int64")


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    state = made("llama", 1).state_dict()
    state[_NAME].view(-1)[7] = torch.nan
    _is_refused(tmp_path, "llama", state, _NAME, "1 of 16,384 values are NaN or infinite", "check_finite=False")
    with _started(tmp_path / "hf", tmp_path / "checkpoint", check_finite=False) as (_, model):
        assert model.get_parameter("model.layers.1.self_attn.qkv_proj.weight").isnan().sum() == 1


def test_a_shorter_tensor(tmp_path: Path) -> None:
    state = made("llama", 1).state_dict()
    state[_NAME] = state[_NAME][:-1]
    _is_refused(tmp_path, "llama", state, f"at {_NAME}, which is float32[127, 128]", "no weight was changed")


def test_a_longer_tensor(tmp_path: Path) -> None:
    """vLLM's loader takes what it needs."""
    state = made("llama", 1).state_dict()
    state[_NAME] = torch.cat([state[_NAME], state[_NAME]])
    _is_refused(tmp_path, "llama", state, f"{_NAME}: it is float32[256, 128], of which the engine uses 16,384 of")


def test_another_architecture(tmp_path: Path) -> None:
    state = {f"transformer.{name}": tensor for name, tensor in made("llama", 1).state_dict().items()}
    _is_refused(
        tmp_path, "llama", state, "the engine's model does not accept these tensors", "compare names and shapes"
    )


def test_a_missing_tensor(tmp_path: Path) -> None:
    state = made("llama", 1).state_dict()
    del state[_NAME]
    _is_refused(tmp_path, "llama", state, "do not completely fill 1 parameter(s)", "self_attn.qkv_proj.weight")
    with _started(tmp_path / "hf", tmp_path / "checkpoint", strict=False):
        pass


def test_an_address_that_is_none(tmp_path: Path) -> None:
    made("llama", 0).save_pretrained(tmp_path / "hf")
    with pytest.raises(UsageError, match="begins with http"):
        with _started(tmp_path / "hf", _stored(tmp_path, made("llama", 1)), peers=["a:8000"]):
            pass


def test_a_stored_head_where_the_engine_uses_the_embedding(tmp_path: Path) -> None:
    """By its configuration, as vLLM's own loader and transformers do."""
    made("qwen2", 0).save_pretrained(tmp_path / "hf")
    state = {name: tensor.clone() for name, tensor in made("qwen2", 1).state_dict().items()}
    state["lm_head.weight"] = torch.zeros(260, 128)
    with _started(tmp_path / "hf", _stored(tmp_path, state)) as (config, model):
        assert torch.equal(model.lm_head.weight[:260], state["model.embed_tokens.weight"].bfloat16())
        rows = ((name, basic_meta(tensor.dtype, tensor.shape)) for name, tensor in state.items())
        record = record_load(VllmModel(config, model), Table(tuple(rows)))
        assert {part.name for part in record.parts} == state.keys() - {"lm_head.weight"}


def test_the_version_of_what_an_engine_started_with(tmp_path: Path) -> None:
    made("llama", 0).save_pretrained(tmp_path / "hf")
    with _started(tmp_path / "hf", _stored(tmp_path, made("llama", 1), step=7)) as (config, model):
        with Pusher(_Engine(config, model)) as pusher:
            assert pusher.state()[0][0]["version"] == 7


def test_wide_weights_are_quantized_as_by_a_push(tmp_path: Path) -> None:
    wide = made("qwen3_moe", 1)
    wide.config.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": _FP8}
    path.write_text(json.dumps(json.loads(path.read_text()) | kind))
    quantized: dict[str, torch.Tensor] = {}
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in revert_weight_conversion(wide, wide.state_dict()).items():
        quantized[name] = tensor
        if "proj" in name:
            quantized[name], quantized[f"{name}_scale_inv"] = reference(tensor, (128, 128))
    found = []
    for number, state in enumerate([wide, quantized]):
        with _started(tmp_path / "hf", _stored(tmp_path / str(number), state, step=3)) as (config, model):
            found.append({name: one.clone() for name, one in model.named_parameters() if "_scale" not in name[-7:]})
            with Pusher(_Engine(config, model)) as pusher:
                assert pusher.state()[0][0]["version"] == 3
    assert any(one.dtype == torch.float8_e4m3fn for one in found[0].values())
    assert any("weight_scale" in name for name in found[0])
    different = [name for name, one in found[0].items() if not torch.equal(one.float(), found[1][name].float())]
    assert not different
