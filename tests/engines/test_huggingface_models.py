"""The load rules on tiny models of transformers: tied and untied, plain, with adapters, on the meta device, sharded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.testing.ranks import RankPool

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore"), pytest.mark.sampled(8, of=__name__)]

_ARCHITECTURES = re.findall(
    r"\w+",
    """
    LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM MistralForCausalLM MixtralForCausalLM
    GPT2LMHeadModel GPTNeoXForCausalLM GPTJForCausalLM OPTForCausalLM BloomForCausalLM GemmaForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM PhiForCausalLM Phi3ForCausalLM OlmoForCausalLM Olmo2ForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM CohereForCausalLM GraniteForCausalLM MambaForCausalLM
    Mamba2ForCausalLM DeepseekV3ForCausalLM GptOssForCausalLM SmolLM3ForCausalLM Glm4ForCausalLM BertForMaskedLM
    RobertaForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM AlbertForMaskedLM DebertaV2ForMaskedLM
    ModernBertForMaskedLM T5ForConditionalGeneration BartForConditionalGeneration MarianMTModel
    WhisperForConditionalGeneration Wav2Vec2ForCTC ViTForImageClassification DeiTForImageClassification
    ResNetForImageClassification CLIPModel LlavaForConditionalGeneration
    """,
)
_SIZES = {
    32: "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size",
    2: "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_key_value_heads eos_token_id "
    "expand num_experts_per_tok num_feat_extract_layers",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads rotary_dim "
    "num_experts num_local_experts n_routed_experts num_conv_pos_embedding_groups",
    8: "d_kv head_dim q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim state_size num_mel_bins "
    "patch_size num_conv_pos_embeddings",
    48: "intermediate_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim",
    1: "n_group topk_group bos_token_id",
    0: "pad_token_id decoder_start_token_id",
    16: "image_size",
    24: "moe_intermediate_size",
    61: "vocab_size",
    64: "max_position_embeddings max_source_positions max_target_positions",
}
_PARTS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_OTHER_SIZES: Mapping[str, dict[str, Any]] = {
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 1},
    "Wav2Vec2ForCTC": {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2]},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "CLIPModel": {
        "text_config": {**_PARTS, "vocab_size": 61},
        "vision_config": {**_PARTS, "image_size": 16, "patch_size": 8},
    },
    "LlavaForConditionalGeneration": {
        "text_config": {**_PARTS, "model_type": "llama", "vocab_size": 61},
        "vision_config": {**_PARTS, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8},
    },
}


def _model(name: str, seed: int, *, tie: bool) -> Any:
    import transformers

    kind = getattr(transformers, name)
    known = kind.config_class()
    sizes = {key: size for size, keys in _SIZES.items() for key in keys.split() if hasattr(known, key)}
    sizes = {**sizes, **_OTHER_SIZES.get(name, {})}
    if "text_config" in sizes:
        sizes = _OTHER_SIZES[name]
    torch.manual_seed(seed)
    return kind(kind.config_class(**sizes, tie_word_embeddings=tie))


def _adapted(model: Any, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    linear = [name for name, one in model.named_modules() if type(one) in (torch.nn.Linear, _conv1d())]
    config = LoraConfig(
        r=2, target_modules=[name for name in linear if not name.endswith(("lm_head", "embed_out", "out_proj"))][:3]
    )
    torch.manual_seed(seed)
    return get_peft_model(model, config)


def _conv1d() -> type:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _differing(left: Any, right: Any, *ignored: str) -> list[str]:
    ours, theirs = left.state_dict(), right.state_dict()
    return [name for name, value in ours.items() if name not in ignored and not torch.equal(value, theirs[name])]


_EACH = pytest.mark.parametrize("name", _ARCHITECTURES)
_TIED = pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])


@pytest.mark.sampled(6)
@_TIED
@_EACH
def test_a_checkpoint_without_one_name(name: str, tie: bool, tmp_path: Path) -> None:
    model, other = _model(name, 0, tie=tie), _model(name, 1, tie=tie)
    dropped = f"model.{[key for key, _ in model.named_parameters()][-1]}"
    bcp.save(tmp_path, {"model": model}, exclude=[dropped])
    report = bcp.load(tmp_path, {"model": other}, strict=False)
    assert {*report.left_out, *report.missing} == {dropped}
    assert {f"model.{one}" for one in _differing(model, other)} <= {dropped}


@pytest.mark.sampled(6)
@_TIED
@_EACH
def test_a_folder_of_save_pretrained(name: str, tie: bool, tmp_path: Path) -> None:
    model, other = _model(name, 0, tie=tie), _model(name, 1, tie=tie)
    model.save_pretrained(tmp_path)
    bcp.load(tmp_path, {"model": other})
    assert not _differing(model, other)
    with torch.device("meta"):
        empty = _model(name, 1, tie=tie)
    report = bcp.load(tmp_path, {"model": empty})
    unstored = {name for name, value in empty.state_dict().items() if value.is_meta}  # the model computes these
    assert {f"model.{one}" for one in unstored} <= {*report.lazy}
    assert not _differing(model, empty, *unstored)


@pytest.mark.sampled(4)
@_TIED
@_EACH
def test_adapters(name: str, tie: bool, tmp_path: Path) -> None:
    """A checkpoint of what is trained, and a folder of PEFT."""
    from peft import get_peft_model_state_dict

    base = _model(name, 0, tie=tie)
    if not any(type(one) in (torch.nn.Linear, _conv1d()) for one in base.modules()):
        return
    model, others = _adapted(base, 2), [_adapted(_model(name, 0, tie=tie), 3) for _ in range(2)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    bcp.save(tmp_path / "trained", {"model": model}, options={"trainable_only": True})
    model.save_pretrained(tmp_path / "peft")
    for path, other in zip(("trained", "peft"), others, strict=True):
        bcp.load(tmp_path / path, {"model": other})
        stored, found = get_peft_model_state_dict(model), get_peft_model_state_dict(other)
        assert all(torch.equal(found[key], value) for key, value in stored.items())


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _load_sharded(rank: int, world_size: int, path: str, name: str, tie: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model, expected = _model(name, 1, tie=tie), _model(name, 0, tie=tie)
    fully_shard(model)
    bcp.load(path, {"model": model})
    full = dict(expected.named_parameters())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), full[key]), key


@pytest.mark.sampled(3)
@_TIED
@_EACH
def test_two_ranks_with_fsdp2(name: str, tie: bool, pool: RankPool, tmp_path: Path) -> None:
    if name == "CLIPModel":  # fully_shard takes no scalar parameters
        return
    _model(name, 0, tie=tie).save_pretrained(tmp_path)
    pool.run(_load_sharded, str(tmp_path), name, tie)
