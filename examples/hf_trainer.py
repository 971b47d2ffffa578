"""The Trainer of transformers with checkpoints of this library: kill it at any time, and start it again.

python examples/hf_trainer.py runs/trainer
torchrun --nproc-per-node 2 examples/hf_trainer.py runs/trainer
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from bytecheckpoint.integrations.transformers import BcpTrainer


def main(root):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (512, 32))]
    args = TrainingArguments(
        root,
        max_steps=60,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        load_best_model_at_end=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    trainer = BcpTrainer(model, args, train_dataset=rows, eval_dataset=rows[:64])
    trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main(sys.argv[1])
