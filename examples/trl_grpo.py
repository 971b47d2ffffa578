"""GRPO with TRL: a vLLM server that gets the policy's weights by pushes, and checkpoints of this library.

    python examples/trl_grpo.py --write-start runs/start        # the small model and its tokenizer, for the server
    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model runs/start --port 8000 \\
        --served-model-name policy --worker-extension-cls bytecheckpoint.inference.vllm.worker.WorkerExtension
    torchrun --nproc-per-node 2 examples/trl_grpo.py --engine http://127.0.0.1:8000 --root runs/grpo

The script goes on at its newest checkpoint; on SIGTERM, all processes save the current step and exit. The reward is the
share of even digits. For your own training, copy ``Rollouts``, the ``rollout_func`` of a ``GRPOTrainer``. The trainer's
processes need no vLLM.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bytecheckpoint.inference.push import HttpEngine, Pusher
from bytecheckpoint.integrations.transformers import BcpTrainerMixin

LENGTH = 12


class PolicyTrainer(BcpTrainerMixin, GRPOTrainer):
    """A GRPOTrainer that saves and resumes with this library."""


class Rollouts:
    """Completions by a vLLM server, which gets the policy's weights before the first one of each step."""

    def __init__(self, engine):
        self.engine, self.pusher, self.pushed = engine, Pusher(HttpEngine(engine)), None

    def push(self, trainer):
        if trainer.state.global_step != self.pushed:
            self.pushed = trainer.state.global_step
            self.pusher.push(trainer.model, version=self.pushed)

    def __call__(self, prompts, trainer):
        self.push(trainer)
        ids = trainer.processing_class(prompts)["input_ids"]
        place = trainer.state.global_step * trainer.accelerator.num_processes + trainer.accelerator.process_index
        seeds = range(place * len(ids), (place + 1) * len(ids))  # a resumed run samples the same
        with ThreadPoolExecutor(len(ids)) as threads:
            completions = list(threads.map(self.complete, ids, seeds))
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    def complete(self, prompt, seed):
        document = {"model": "policy", "prompt": prompt, "max_tokens": LENGTH, "temperature": 1.0, "seed": seed}
        document |= {"return_token_ids": True, "skip_special_tokens": False}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.engine}/v1/completions", json.dumps(document).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["choices"][0]["token_ids"]


class PrintSteps(TrainerCallback):
    def on_log(self, args, state, control, *, logs, **_):
        if state.is_world_process_zero and "reward" in logs:
            kept = {name: logs[name] for name in ("loss", "grad_norm", "reward")}
            print(json.dumps({"step": state.global_step, **kept}), flush=True)


def make_tokenizer():
    words = ["<pad>", "<eos>", *map(str, range(10))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<eos>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def make_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes["attention_dropout"] = 0.1
    return LlamaForCausalLM(LlamaConfig(pad_token_id=0, bos_token_id=1, eos_token_id=1, **sizes))


def share_of_even_digits(completions, **_):
    return [sum(word in "02468" for word in text.split()) / LENGTH for text in completions]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="the address of the vLLM server")
    parser.add_argument("--root", default="runs/grpo", help="where checkpoints are saved")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--write-start", type=Path, metavar="FOLDER", help="only write what the server starts with")
    args = parser.parse_args()
    model, tokenizer = make_model(), make_tokenizer()
    if args.write_start:
        model.save_pretrained(args.write_start)
        tokenizer.save_pretrained(args.write_start)
        return
    settings = GRPOConfig(
        output_dir=args.root,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=LENGTH,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to=[],
        bf16=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    prompts = datasets.Dataset.from_list([{"prompt": f"{a} {b}"} for a in range(10) for b in range(10)])
    rollouts = Rollouts(args.engine)
    trainer = PolicyTrainer(
        model,
        share_of_even_digits,
        settings,
        prompts,
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[PrintSteps()],
    )
    with rollouts.pusher:
        trainer.train(resume_from_checkpoint=True)
        rollouts.push(trainer)


if __name__ == "__main__":
    main()
