"""The state of a vLLM worker: its runner, whether its memory is mapped, and whether vLLM has loaded other
weights since. A model without an engine; needs vLLM."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from torch import nn
from vllm_pushes import made

from bytecheckpoint.inference.push.messages import PROTOCOL, decode, encode
from bytecheckpoint.inference.push.receiver import Receiver

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those that vLLM's own modules give rise to
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from benchmarks import vllm_layout
    from benchmarks.vllm_layout import EngineRank
    from bytecheckpoint.inference.vllm import worker as vllm_worker
    from bytecheckpoint.inference.vllm.model import VllmModel, keep_receiver

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # the warnings are vLLM's own
    pytest.mark.sampled(2, of=__name__),
]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Any, nn.Module]]:
    """The configuration and the model of a worker."""
    made("llama", 0).save_pretrained(tmp_path)
    config = vllm_layout._engine_config(tmp_path, EngineRank())
    with vllm_layout._built(config, EngineRank(), real=True) as model:
        record_metadata_for_reloading(model)
        model.load_weights(_weights(0))  # type: ignore[operator]
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        yield config, model


def _weights(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(list(made("llama", seed).state_dict().items()))


@pytest.mark.parametrize("first", ["a request without it", "a start from peers"])
def test_the_runner_that_a_later_request_brings(worker: tuple[Any, nn.Module], first: str) -> None:
    config, model = worker
    if "peers" in first:
        loading = VllmModel(config, model)
        keep_receiver(loading, Receiver(loading))
    else:
        vllm_worker.answer(config, model, encode({"kind": "state", "nonce": "n"}))
    done: list[str] = []
    resets = ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache")
    runner = SimpleNamespace(**{name: lambda name=name: done.append(name) for name in resets})
    receiver = vllm_worker.receiver(config, model, runner)
    receiver._model.load(_weights(1))
    assert tuple(done) == resets
    assert vllm_worker.receiver(config, model) is receiver
    assert "failure" not in decode(receiver.answer(encode({"kind": "state", "nonce": "n", "protocol": PROTOCOL})))


def _asleep(monkeypatch: pytest.MonkeyPatch, *tags: str) -> None:
    """Let vLLM's allocator, which only devices have, have unmapped the memory of these tags."""
    held = [SimpleNamespace(tag=tag, is_asleep=tag in tags) for tag in ("weights", "kv_cache", "runtime")]
    allocator = SimpleNamespace(instance=SimpleNamespace(pointer_to_data=dict(enumerate(held))))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=allocator))


def test_a_worker_whose_memory_is_not_mapped(worker: tuple[Any, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = vllm_worker.receiver(*worker)
    for tags in ((), ("kv_cache", "weights"), ("kv_cache",)):
        _asleep(monkeypatch, *tags)
        answer = decode(receiver.answer(encode({"kind": "state", "nonce": "n", "protocol": PROTOCOL})))
        assert answer["asleep"] == list(tags)


def test_weights_that_vllm_reloads(worker: tuple[Any, nn.Module]) -> None:
    config, model = worker
    serving = VllmModel(config, model)
    assert not serving.was_replaced()
    serving.load(_weights(1))
    assert not serving.was_replaced()
    with pytest.raises(ValueError, match="no module or parameter"):
        serving.load(iter([("model.other", torch.zeros(1))]))
    assert not serving.was_replaced()
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        model.load_weights(_weights(2))  # type: ignore[operator]
        finalize_layerwise_reload(model, config.model_config)
    assert serving.was_replaced()
    serving.load(_weights(3))
    assert not serving.was_replaced()


def test_start_weights_are_loaded_again_after_a_failure(
    worker: tuple[Any, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = iter([("model.other", torch.zeros(1))])
    loader = SimpleNamespace(get_all_weights=lambda config, model: next(found))
    found = iter([broken, _weights(1)])
    monkeypatch.setattr("bytecheckpoint.inference.vllm.model.get_model_loader", lambda config: loader)
    serving = VllmModel(*worker)
    serving.load(_weights(2))
    with pytest.raises(ValueError, match="no module or parameter"):
        serving.restore()
    assert serving.restore()
